"""What `bench codec` and `bench optim` share: clock, memcpy as the unit of time, limits, output.

memcpy moves 8 bytes an element: it reads 4 and writes 4. A kernel that only moves bytes takes about
its own bytes / 8 memcpys, and should not take much more: limits follow from that.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradcomp.bench.options import add_option
from gradcomp.kernels import native

MEMCPY_NBYTES = 8  # that memcpy of fp32 reads and writes an element


def seconds(function: Callable[[], object], calls: int = 1) -> float:
    """Return how long one call takes, the mean over `calls` of them."""
    begun = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begun) / calls


def memcpy_of(numel: int) -> Callable[[], object]:
    """Return a memcpy of `numel` fp32 elements between buffers that have been touched before."""
    src, dst = torch.ones(numel), torch.zeros(numel)
    return lambda: ctypes.memmove(dst.data_ptr(), src.data_ptr(), 4 * numel)


@contextmanager
def using(tier: str, threads: int | None = None) -> Iterator[None]:
    """Use the kernels of a tier, and so many threads of torch and of the kernels."""
    before = native.tier(), torch.get_num_threads()
    native.select_tier(tier)
    torch.set_num_threads(threads or before[1])
    try:
        yield
    finally:
        native.select_tier(before[0])
        torch.set_num_threads(before[1])


@dataclass
class Verdict:
    """One requirement: `measured` is at most `limit`, or at least where `at_least` is set."""

    what: str
    measured: float
    limit: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """Whether the requirement is met."""
        low, high = (self.limit, self.measured) if self.at_least else (self.measured, self.limit)
        return low <= high


def table(title: str, left: Sequence[str], right: Sequence[str], rows: Sequence[Any]) -> None:
    """Print rows of texts under the column names `left`, aligned left, and `right`."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title)
    for name in (*left, *right):
        shown.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --repeat, --check, --json and --plot."""
    add = parser.add_argument
    text = "repetitions of each measurement, of which the median counts (default: %(default)s)"
    add("--repeat", type=int, default=9, help=text)
    text = "judge the limits: print pass or FAIL for each, and exit with status 1 if one fails"
    add("--check", action="store_true", help=text)
    add_option(parser, "json")
    add_option(parser, "plot")


def finish(args: argparse.Namespace, found: dict[str, Any], verdicts: Sequence[Verdict]) -> int:
    """Print the verdicts, write the JSON file, and return the exit status."""
    if verdicts and native.tier() == native.tiers()[0]:
        print("nothing is judged: limits are for vector tiers, and the portable tier is in use")
        verdicts = []
    texts = []
    for v in verdicts:
        what = f"{v.what}, {'at least' if v.at_least else 'at most'}"
        mark = "[green]pass[/]" if v.passed else "[red]FAIL[/]"
        texts.append((what, f"{v.measured:.2f}", f"{v.limit:.2f}", mark))
    if texts:
        table("Requirements", ["requirement"], ["measured", "limit", ""], texts)
    if args.json:
        judged = [asdict(v) | {"pass": v.passed} for v in verdicts]
        args.json.write_text(json.dumps(found | {"check": judged}, indent=2))
    return 0 if all(v.passed for v in verdicts) else 1
