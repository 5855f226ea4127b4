"""python -m gradcomp.bench codec: speed of every kernel, beside memcpy in the same run.

ratio = seconds of the kernel / seconds of memcpy of the same number of fp32 elements, measured in
turn within one run; the median over repetitions is shown. GB/s = numel * 4 bytes / seconds / 1e9,
whatever the source dtype. Both buffers of the memcpy have been touched before. Every result is
compared with `gradcomp.reference` before its kernel is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.arguments import Parser, integers
from gradcomp.bench.kernels import Case, cases
from gradcomp.kernels import native

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# At most this many memcpys of the fp32 buffer, one thread, 64 Mi elements, fp32, the best tier.
LIMITS = {
    "terngrad encode": 3.0,
    "ternary encode": 2.0,
    "absmax + moments": 1.2,
    "ternary decode 1": 1.2,
    "terngrad decode 1": 1.2,
    "terngrad decode 4 shared": 1.9,
    "terngrad decode 4 own": 1.9,
    "onebit encode": 2.3,
    "onebit encode, one tensor": 2.6,
    "onebit decode 1": 1.2,
    **{f"block{bits} encode": 3.0 for bits in (2, 4, 8)},
    **{f"block{bits} decode 1": 1.2 for bits in (2, 4, 8)},
    "topk encode": 5.0,  # 4.1 was measured: scalar, for exchanges that are rare
    "topk decode 1": 1.2,
}
AIMS = {
    "terngrad encode": 2.0,
    "ternary encode": 1.6,
    "ternary decode 1": 0.7,
    "absmax + moments": 0.9,
    "terngrad decode 1": 0.7,
    "terngrad decode 4 shared": 1.3,
    "terngrad decode 4 own": 1.3,
    "onebit encode": 1.6,
    "onebit encode, one tensor": 2.2,
    "onebit decode 1": 0.7,
    **{f"block{bits} encode": 2.0 for bits in (2, 4, 8)},
    **{f"block{bits} decode 1": 0.8 for bits in (2, 4, 8)},
    "topk encode": 2.0,
    "topk decode 1": 0.8,
}
THREAD_GAIN = {
    "terngrad encode": 1.7,
    "onebit encode": 1.7,
}  # of two threads over one; 1.25 for the rest
# Bytes of memory an element. Next to all of a decoder's are stores: memset is its roof, memcpy that
# of all others.
TRAFFIC = {
    "terngrad encode": 4.25,
    "ternary encode": 12.25,
    "ternary decode 1": 4.25,
    "absmax + moments": 4.0,
    "terngrad decode 1": 4.25,
    "terngrad decode 4 shared": 5.0,
    "terngrad decode 4 own": 5.0,
    "onebit encode": 12.125,
    "onebit encode, one tensor": 16.125,
    "onebit decode 1": 4.125,
    **{f"block{bits} encode": 12 + bits / 8 for bits in (2, 4, 8)},
    **{f"block{bits} decode 1": 4 + bits / 8 for bits in (2, 4, 8)},
    "topk encode": 12 + 81 / 4096,
    "topk decode 1": 4 + 81 / 4096,
}
DECAYED = (
    "onebit encode",
    "block2 encode",
    "ternary encode",
)  # at most DECAY_LIMIT times slower with a residual decay
DECAY_LIMIT = 1.05
WRITERS = (
    "ternary decode 1",
    "terngrad decode 1",
    "terngrad decode 4 shared",
    "onebit decode 1",
    *(f"block{bits} decode 1" for bits in (2, 4, 8)),
    "topk decode 1",
)
TORCH_GAIN = 30.0  # ternary encode over the same in torch operations


@dataclass
class Row:
    """One measurement."""

    kernel: str
    tier: str
    dtype: str
    numel: int
    threads: int
    ratio: float
    gb_per_s: float


def seconds(function: Callable[[], object], calls: int = 1) -> float:
    """Return how long one call takes, the mean over `calls` of them."""
    begun = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begun) / calls


class Memcpy:
    """The yardstick: memcpy of `numel` fp32 elements between two buffers that have been touched.
    Other threads run meanwhile.
    """

    def __init__(self, numel: int) -> None:
        self._src, self._dst = torch.ones(numel), torch.zeros(numel)

    def __call__(self, first: int = 0, numel: int | None = None) -> None:
        numel = self._src.numel() if numel is None else numel
        ctypes.memmove(
            self._dst.data_ptr() + 4 * first, self._src.data_ptr() + 4 * first, 4 * numel
        )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use `count` kernel threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(case: Case, memcpy: Memcpy, numel: int, repetitions: int) -> tuple[float, float]:
    """Return (median ratio to memcpy, median seconds), after one warm-up of each."""
    case.run()
    memcpy()
    pairs = []
    calls = max(
        1, (1 << 22) // max(1, numel)
    )  # short calls are repeated, so that a clock tick does not matter
    for _ in range(repetitions):
        copy = seconds(memcpy, calls)
        pairs.append((seconds(case.run, calls), copy))
    return statistics.median(k / c for k, c in pairs), statistics.median(k for k, _ in pairs)


def torch_ternary(x: Tensor, scale: float) -> Tensor:
    """Encode as PyTorch users would: the same codes in torch operations (other random numbers)."""
    nonzero = torch.rand_like(x) < x.abs() / scale
    codes = (torch.sign(x) * nonzero + 1).to(torch.uint8).view(-1, 4)
    return codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6


def numpy_ternary(x: NDArray[np.float32], scale: float) -> NDArray[np.uint8]:
    """The same in NumPy."""
    random = np.random.default_rng(0).random(x.size, np.float32)
    codes = (
        (np.sign(x) * (random < np.abs(x) / np.float32(scale)) + 1).astype(np.uint8).reshape(-1, 4)
    )
    packed: NDArray[np.uint8] = codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6
    return packed


def against_libraries(numel: int, repetitions: int) -> dict[str, float]:
    """Return how many times faster the kernel encodes than torch operations and NumPy, one
    thread each.
    """
    x, scale = torch.randn(numel), 2.5
    encode = cases(numel, torch.float32)[0]
    with threads(1):
        ours, theirs = [], {"torch": [0.0] * 0, "numpy": [0.0] * 0}
        for _ in range(max(3, repetitions // 3)):
            ours.append(seconds(encode.run))
            theirs["torch"].append(seconds(lambda: torch_ternary(x, scale)))
            theirs["numpy"].append(seconds(lambda: numpy_ternary(x.numpy(), scale)))
    return {
        name: statistics.median(t / o for t, o in zip(times, ours, strict=True))
        for name, times in theirs.items()
    }


def run(args: argparse.Namespace) -> tuple[list[Row], dict[str, float]]:
    """Check and measure everything that was asked for."""
    from rich.progress import Progress

    rows: list[Row] = []
    tiers = native.tiers() if args.tiers == "all" else args.tiers.split(",")
    before = native.tier()
    with Progress(transient=True) as progress:
        work = progress.add_task(
            "", total=len(args.sizes) * len(args.dtypes) * len(tiers) * len(args.threads)
        )
        for numel in args.sizes:
            memcpy = Memcpy(numel)
            for dtype in args.dtypes:
                table = cases(numel, DTYPES[dtype])
                for tier in tiers:
                    native.select_tier(tier)
                    for count in args.threads:
                        progress.update(
                            work, description=f"{numel:,} x {dtype}, {tier}, {count} thread(s)"
                        )
                        for case in table:
                            with threads(count):
                                case.run()
                                if not case.check():
                                    raise SystemExit(
                                        f"{case.name} on tier {tier} differs from the reference"
                                    )
                                ratio, taken = measure(case, memcpy, numel, args.repeat)
                            gb = numel * 4 / taken / 1e9
                            rows.append(Row(case.name, tier, dtype, numel, count, ratio, gb))
                        progress.advance(work)
                    native.select_tier(before)
    return rows, against_libraries(min(max(args.sizes), 1 << 24), args.repeat)


@dataclass
class Memory:
    """What this machine's memory gives, GB/s, with one thread and with two."""

    memcpy: tuple[float, float]  # bytes read and bytes written
    memset: tuple[float, float]  # bytes written


@dataclass
class Verdict:
    """One requirement: what was measured, the limit and aim, and "pass", "FAIL", or "roof".

    "roof" is a thread gain that this machine's memory does not give: two threads of memset store
    less than the limit times what a decoder stores with one, or two threads of an encoder move more
    bytes a second than two threads of memcpy do.
    """

    what: str
    measured: float
    limit: float
    aim: float | None
    outcome: str


def verdicts(rows: list[Row], gains: dict[str, float], memory: Memory) -> list[Verdict]:
    """Judge every requirement."""
    best = {
        (r.kernel, r.threads): r
        for r in rows
        if r.tier == native.tiers()[-1] and r.dtype == "float32"
    }
    out = []
    for kernel, limit in LIMITS.items():
        ratio = best[kernel, 1].ratio
        out.append(
            Verdict(
                f"{kernel} / memcpy, at most", ratio, limit, AIMS[kernel], _word(ratio <= limit)
            )
        )
    for kernel in LIMITS:
        one, two = best[kernel, 1].gb_per_s, best[kernel, 2].gb_per_s
        least = THREAD_GAIN.get(kernel, 1.25)
        outcome = _word(two / one >= least)
        if outcome == "FAIL" and _is_at_the_roof(kernel, one, two, least, memory):
            outcome = "roof"
        out.append(
            Verdict(f"{kernel}, two threads over one, at least", two / one, least, None, outcome)
        )
    for kernel in DECAYED:
        more = best[f"{kernel}, decay", 1].ratio / best[kernel, 1].ratio
        out.append(
            Verdict(
                f"{kernel}, with a decay over without, at most",
                more,
                DECAY_LIMIT,
                1.0,
                _word(more <= DECAY_LIMIT),
            )
        )
    gain = gains["torch"]
    out.append(
        Verdict(
            "terngrad encode over torch, at least",
            gain,
            TORCH_GAIN,
            None,
            _word(gain >= TORCH_GAIN),
        )
    )
    return out


def _is_at_the_roof(kernel: str, one: float, two: float, least: float, memory: Memory) -> bool:
    """Whether memory ends before `least` times `one`, GB/s of fp32 that the kernel passes with
    one thread.
    """
    if kernel in WRITERS:
        return memory.memset[1] < least * one
    return memory.memcpy[1] < two * TRAFFIC[kernel] / 4


def _word(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def memory_rates(numel: int, repetitions: int) -> Memory:
    """Measure memcpy and memset of `numel` fp32 elements with one thread and with two."""
    memcpy, half = Memcpy(numel), numel // 2
    filled = torch.ones(numel)

    def memset(first: int = 0, count: int = numel) -> None:
        ctypes.memset(
            filled.data_ptr() + 4 * first, 1, 4 * count
        )  # zeros take a short cut that no data can

    def rates(move: Callable[..., object], nbytes: int) -> tuple[float, float]:
        def both() -> None:
            other = pool.submit(move, half, numel - half)
            move(0, half)
            other.result()

        times = [(seconds(move), seconds(both)) for _ in range(repetitions + 1)][1:]
        one, two = (statistics.median(t) for t in zip(*times, strict=True))
        return nbytes / one / 1e9, nbytes / two / 1e9

    with ThreadPoolExecutor(1) as pool:
        return Memory(rates(memcpy, 8 * numel), rates(memset, 4 * numel))


def show(rows: list[Row], gains: dict[str, float]) -> None:
    """Print the measurements."""
    from rich.console import Console
    from rich.table import Table as RichTable

    table = RichTable(title="Kernels beside memcpy of the same fp32 elements (median)")
    for name in ("kernel", "tier", "dtype", "elements", "threads", "x memcpy", "GB/s of fp32"):
        table.add_column(name, justify="left" if name in ("kernel", "tier", "dtype") else "right")
    for r in rows:
        table.add_row(
            r.kernel,
            r.tier,
            r.dtype,
            f"{r.numel:,}",
            str(r.threads),
            f"{r.ratio:.2f}",
            f"{r.gb_per_s:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"terngrad encode, one thread: {gains['torch']:.0f}x torch operations,"
        f" {gains['numpy']:.0f}x NumPy (the same codec, its own random numbers)"
    )


def show_verdicts(results: list[Verdict], memory: Memory) -> None:
    """Print the outcome of every requirement."""
    from rich.console import Console
    from rich.table import Table as RichTable

    table = RichTable(title="Requirements (best tier, float32)")
    for name in ("requirement", "measured", "limit", "aim", ""):
        table.add_column(name, justify="left" if name == "requirement" else "right")
    colours = {"pass": "green", "FAIL": "red", "roof": "yellow"}
    for v in results:
        mark = f"[{colours[v.outcome]}]{v.outcome}[/]"
        table.add_row(
            v.what, f"{v.measured:.2f}", f"{v.limit:g}", f"{v.aim:g}" if v.aim else "", mark
        )
    console = Console()
    console.print(table)
    for name, (one, two) in (("memcpy moves", memory.memcpy), ("memset stores", memory.memset)):
        console.print(f"for context: {name} {one:.1f} GB/s with one thread and {two:.1f} with two")
    if any(v.outcome == "roof" for v in results):
        console.print(
            "roof: the memory here ends before the limit; see Verdict in gradcomp/bench/codec.py"
        )


def plot(rows: list[Row], path: Path) -> None:
    """Draw x memcpy of every kernel and tier at the largest size as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    largest = max(r.numel for r in rows)
    chosen = [
        r
        for r in rows
        if r.numel == largest and r.dtype == rows[0].dtype and r.threads == rows[0].threads
    ]
    kernels, tiers = (
        list(dict.fromkeys(r.kernel for r in chosen)),
        list(dict.fromkeys(r.tier for r in chosen)),
    )
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for number, tier in enumerate(tiers):
        ratios = {r.kernel: r.ratio for r in chosen if r.tier == tier}
        places = [i + 0.8 * number / len(tiers) for i in range(len(kernels))]
        bars = axes.barh(places, [ratios[k] for k in kernels], 0.75 / len(tiers), label=tier)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_yticks([i + 0.4 * (len(tiers) - 1) / len(tiers) for i in range(len(kernels))], kernels)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="grey", linewidth=1, linestyle="--")
    axes.set_xlabel(
        f"time / time of memcpy of the same fp32 buffer ({largest:,} elements, {rows[0].dtype})"
    )
    axes.legend()
    figure.savefig(path, dpi=150)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(
        prog="python -m gradcomp.bench codec",
        description=(
            "Time every kernel beside memcpy in the same run; results are checked before they are"
            " timed."
        ),
        epilog=(
            "--check measures what gradcomp promises: 64 Mi float32 elements, 1 and 2"
            " threads.\n\nexample:\n  python -m gradcomp.bench codec --sizes 4194304 --dtypes"
            " float32,bfloat16 --threads 1,2"
        ),
    )
    add = parser.add_argument
    add(
        "--sizes",
        type=integers,
        default=[1 << 16, 1 << 22, 1 << 26],
        help="elements of the tensors, as a list (default: 65536,4194304,67108864)",
    )
    add(
        "--dtypes",
        type=lambda s: s.split(","),
        default=["float32"],
        help=(
            "dtypes of the gradients, as a list out of float32, bfloat16, float16 (default:"
            " float32)"
        ),
    )
    add(
        "--tiers",
        default="all",
        help="kernel tiers to time, as a list, or all that this machine has (default: %(default)s)",
    )
    add(
        "--threads",
        type=integers,
        default=[1],
        help="numbers of threads to time with, as a list (default: 1)",
    )
    add(
        "--repeat",
        type=int,
        default=9,
        help="repetitions of each measurement, of which the median is shown (default: %(default)s)",
    )
    add(
        "--check",
        action="store_true",
        help="print pass or fail of what gradcomp promises; the exit status is 1 when one fails",
    )
    add("--json", type=Path, metavar="FILE", help="write the measurements to this file")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the measurements into this file (PNG, SVG or PDF)",
    )
    args = parser.parse_args(argv)
    if set(args.dtypes) - DTYPES.keys():
        parser.error(f"unknown dtype; known are {','.join(DTYPES)}")
    if args.tiers != "all" and set(args.tiers.split(",")) - set(native.tiers()):
        parser.error(f"unknown tier; this machine has {','.join(native.tiers())}")
    if min(args.sizes) < 1 or min(args.threads) < 1 or args.repeat < 1:
        parser.error("sizes, threads and repetitions must be at least 1")
    if args.check:
        args.sizes, args.dtypes, args.tiers, args.threads = (
            [1 << 26],
            ["float32"],
            native.tiers()[-1],
            [1, 2],
        )
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    args = parse(argv)
    rows, gains = run(args)
    show(rows, gains)
    results: list[Verdict] = []
    if args.check:
        memory = memory_rates(args.sizes[-1], args.repeat)
        results = verdicts(rows, gains, memory)
        show_verdicts(results, memory)
    if args.json:
        found = {
            "rows": [asdict(r) for r in rows],
            "terngrad_encode_over": gains,
            "check": [asdict(v) for v in results],
        }
        args.json.write_text(json.dumps(found, indent=2))
    if args.plot:
        plot(rows, args.plot)
    return 1 if any(v.outcome == "FAIL" for v in results) else 0
