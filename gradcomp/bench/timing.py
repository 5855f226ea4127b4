"""Timing of the benchmarks; for `bench codec` and `bench optim` also memcpy as the unit of time,
limits and output.

memcpy moves 8 bytes per fp32 element: it reads 4 and writes 4. A kernel that is bound by memory and
moves n bytes per element takes about n / 8 memcpys; the limits are derived from this.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from gradcomp.bench.about import save_json, table
from gradcomp.kernels import native

OPTIONS = "repeat", "check", "json"
MEMCPY_NBYTES = 8  # bytes per fp32 element that memcpy reads and writes


def turns(
    functions: Sequence[Callable[[], object]],
    repetitions: int,
    calls: int = 1,
    *,
    before: Callable[[], object] = lambda: None,
) -> NDArray[Any]:
    """Time functions in turn, after one turn as warm-up; `before`, such as a barrier, before each.

    Returns:
        ``(repetitions, len(functions))`` float64: seconds per call, means over `calls` calls.
    """
    found = np.zeros((1 + repetitions, len(functions)))
    for turn in found:
        for place, function in enumerate(functions):
            before()
            begun = time.perf_counter()
            for _ in range(calls):
                function()
            turn[place] = (time.perf_counter() - begun) / calls
    return found[1:]


def memcpy_of(numel: int) -> Callable[[], object]:
    """Return a memcpy of `numel` fp32 elements between buffers that were written before."""
    src, dst = torch.ones(numel), torch.zeros(numel)
    return lambda: ctypes.memmove(dst.data_ptr(), src.data_ptr(), 4 * numel)


@contextmanager
def using(tier: str, threads: int | None = None) -> Iterator[None]:
    """Use a tier's kernels and a number of threads of torch and the kernels, inside a ``with``."""
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
    """Requirement that `measured` is at most `limit`, or at least `limit` if `at_least`."""

    what: str
    measured: float
    limit: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """Whether the requirement is met."""
        low, high = (self.limit, self.measured) if self.at_least else (self.measured, self.limit)
        return low <= high


def finish(args: argparse.Namespace, verdicts: Sequence[Verdict], **found: Any) -> int:
    """Print the verdicts, write the JSON file, and return the exit status: 1 if one failed."""
    if verdicts and native.tier() == native.tiers()[0]:
        print("nothing is judged: limits are for vector tiers, and the portable tier is in use")
        verdicts = []
    rows = []
    for v in verdicts:
        what = f"{v.what}, {'at least' if v.at_least else 'at most'}"
        mark = "[green]pass[/]" if v.passed else "[red]FAIL[/]"
        rows.append((what, f"{v.measured:.2f}", f"{v.limit:.2f}", mark))
    if rows:
        Console().print(table(["requirement", "measured", "limit", ""], rows))
    save_json(args.json, **found, check=[asdict(v) | {"pass": v.passed} for v in verdicts])
    return 0 if all(v.passed for v in verdicts) else 1
