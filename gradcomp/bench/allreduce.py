"""python -m gradcomp.bench allreduce: averages packed by gradcomp beside the library's own fp32
all_reduce.

Times are those of the slowest rank, medians over repetitions, fp32 and packed in turn within one
run, after a warm-up of each. algbw = bytes of the fp32 tensor / seconds, busbw = algbw * 2 (N - 1)
/ N, as in nccl-tests, for every codec: what an fp32 all_reduce would have needed to be as fast.
Every result is checked before it is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradcomp.arguments import Parser, integers
from gradcomp.bench.allreduce_ranks import MARK, Row, over_gloo
from gradcomp.bench.ranks import RANK_ERRORS, run_ranks

SIZES = [
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
    100_000_000,
    256 << 20,
]
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LIMITS = {
    4 << 20: 1.3,
    100_000_000: 1.0,
}  # at N = 2 over MPI: ternary seconds / seconds of MPI's own Allreduce, at most


def parse_size(text: str) -> int:
    """Return bytes of "4K", "4M", "100000000".

    Raises:
        ValueError: no positive multiple of 4 bytes.
    """
    unit = UNITS.get(text[-1:].upper(), 1)
    nbytes = int(text[: -1 if unit > 1 else None]) * unit
    if nbytes < 4 or nbytes % 4:
        raise ValueError(f"a size must be a positive multiple of 4 bytes, got {text!r}")
    return nbytes


def parse_sizes(text: str) -> list[int]:
    """Return the bytes of a list such as "4K,1M".

    Raises:
        argparse.ArgumentTypeError: not such a list.
    """
    try:
        return [parse_size(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of sizes such as 4K,1M: {error}"
        ) from None


def show_size(nbytes: int) -> str:
    """Return "4 KiB", "100 MB"."""
    for unit in ("G", "M", "K"):
        if nbytes % UNITS[unit] == 0:
            return f"{nbytes // UNITS[unit]} {unit}iB"
    return f"{nbytes // 10**6} MB" if nbytes % 10**6 == 0 else f"{nbytes:,} B"


def measure(
    transport: str, world_size: int, settings: dict[str, Any], on_row: Callable[[Row], None]
) -> None:
    """Run one transport at one world size.

    Raises:
        RuntimeError: a rank failed; the message is what it said.
    """
    if transport == "gloo":
        try:
            run_ranks(world_size, over_gloo, settings, on_message=on_row)
        except RANK_ERRORS as error:
            raise RuntimeError(str(error)) from error
        return
    command = [sys.executable, "-m", "gradcomp.launch", "-n", str(world_size)]
    command += ["-m", "gradcomp.bench.allreduce_ranks", json.dumps(settings)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith(MARK):
                on_row(Row(**json.loads(line[len(MARK) :])))
        said = process.stderr.read()
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(command[1:-1])} ended with {process.returncode}:\n{said[-2000:]}"
        )


def run(args: argparse.Namespace) -> list[Row]:
    """Measure everything that was asked for, with a progress bar."""
    from rich.progress import Progress

    rows: list[Row] = []
    settings = {
        "sizes": args.sizes,
        "codecs": args.codecs,
        "repeat": args.repeat,
        "threads": args.threads,
    }
    total = len(args.over) * len(args.ranks) * len(args.sizes) * (len(args.codecs) + 1)
    with Progress(transient=True) as progress:
        work = progress.add_task("", total=total)

        def on_row(row: Row) -> None:
            rows.append(row)
            progress.update(
                work,
                advance=1,
                description=f"{row.transport}, N = {row.world_size}, {show_size(row.nbytes)}",
            )

        for transport in args.over:
            for world_size in args.ranks:
                measure(transport, world_size, settings, on_row)
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print one table a transport and world size."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    for place in dict.fromkeys((r.transport, r.world_size) for r in rows):
        mine = [r for r in rows if (r.transport, r.world_size) == place]
        table = Table(title=f"{place[0]}, N = {place[1]}", box=box.SIMPLE_HEAD, padding=(0, 1))
        for name in ("size", "codec", "ms", "algbw GB/s", "busbw GB/s", "x fp32 time", "sent, KB"):
            table.add_column(name, justify="left" if name == "codec" else "right")
        for number, r in enumerate(mine):
            size = show_size(r.nbytes) if r.codec == "fp32" else ""
            if r.codec == "fp32" and number:
                table.add_section()
            sent = f"{r.sent_nbytes / 1e3:,.1f}" if r.sent_nbytes else ""
            table.add_row(
                size,
                r.codec,
                f"{r.seconds * 1e3:.3f}",
                f"{r.algbw:.2f}",
                f"{r.busbw:.2f}",
                f"{r.over_fp32:.2f}",
                sent,
            )
        Console().print(table)


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Return one line for each requirement that was measured, "pass" or "FAIL" first."""
    out = []
    for r in rows:
        if (
            r.transport != "gloo"
            and r.world_size == 2
            and r.codec == "terngrad"
            and r.nbytes in LIMITS
        ):
            word = "pass" if r.over_fp32 <= LIMITS[r.nbytes] else "FAIL"
            out.append(
                f"{word}  {r.transport}, N = 2, {show_size(r.nbytes)}: ternary takes"
                f" {r.over_fp32:.2f}x the time of the fp32 Allreduce, at most {LIMITS[r.nbytes]}"
                " allowed"
            )
    return out


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw time against size, one panel a transport and world size."""
    from matplotlib.figure import Figure

    places = list(dict.fromkeys((r.transport, r.world_size) for r in rows))
    figure = Figure(figsize=(4 * len(places) + 0.5, 4), dpi=130, layout="constrained")
    panels: Any = figure.subplots(1, len(places), sharey=True, squeeze=False)[0]
    for axes, place in zip(panels, places, strict=True):
        for codec in dict.fromkeys(r.codec for r in rows):
            mine = [r for r in rows if (r.transport, r.world_size) == place and r.codec == codec]
            axes.plot(
                [r.nbytes for r in mine],
                [r.seconds * 1e3 for r in mine],
                marker="o",
                markersize=3,
                label=codec,
            )
        axes.set(
            xscale="log",
            yscale="log",
            title=f"{place[0]}, N = {place[1]}",
            xlabel="bytes of the fp32 tensor",
        )
        axes.grid(True, alpha=0.25)
    panels[0].set_ylabel("ms")
    panels[0].legend(frameon=False)
    figure.savefig(path)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    has_mpi = importlib.util.find_spec("mpi4py") is not None
    parser = Parser(
        prog="python -m gradcomp.bench allreduce",
        description=(
            "Time packed averages beside the library's own fp32 all_reduce; results are checked"
            " before they are timed."
        ),
        epilog=(
            "MPI is the one of this Python environment (pip install '.[mpi]'); gradcomp.launch"
            " starts it.\n\nexample:\n  python -m gradcomp.bench allreduce --over gloo --ranks 2"
            " --sizes 1M,16M"
        ),
    )
    parser.add_argument(
        "--over",
        default="gloo,mpi" if has_mpi else "gloo",
        help=(
            "transports to time, as a list out of gloo and mpi (default: %(default)s, what is "
            "installed)"
        ),
    )
    parser.add_argument(
        "--ranks",
        type=integers,
        default=[2, 4],
        help="numbers of ranks to time with, as a list (default: 2,4)",
    )
    parser.add_argument(
        "--sizes",
        type=parse_sizes,
        default=SIZES,
        help=(
            "bytes of fp32 gradients, as a list such as 4K,1M,256M (default: ten sizes from 4K "
            "to 256M)"
        ),
    )
    parser.add_argument(
        "--codecs",
        default="terngrad,onebit",
        help="codecs to time, as a list out of terngrad and onebit (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="kernel threads of each rank (default: %(default)s)",
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=40,
        help="repetitions at the small sizes, of which the median is shown (default: %(default)s)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="print pass or fail of what gradcomp promises; the exit status is 1 when one fails",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the measurements to this file",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the measurements into this file (PNG, SVG or PDF)",
    )
    args = parser.parse_args(argv)
    args.over, args.codecs = args.over.split(","), args.codecs.split(",")
    if set(args.over) - {"gloo", "mpi"}:
        parser.error(f"--over takes gloo and mpi, got {','.join(args.over)}")
    if set(args.codecs) - {"terngrad", "onebit"}:
        parser.error(f"--codecs takes terngrad and onebit, got {','.join(args.codecs)}")
    if min(args.ranks) < 2 or args.threads < 1 or args.repeat < 1:
        parser.error("there must be at least 2 ranks, 1 thread and 1 repetition")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    args = parse(argv)
    if "mpi" in args.over and importlib.util.find_spec("mpi4py") is None:
        print(
            "gradcomp.bench allreduce: mpi4py is not installed here: pip install 'gradcomp[mpi]'",
            file=sys.stderr,
        )
        return 2
    try:
        rows = run(args)
    except RuntimeError as error:
        print(f"gradcomp.bench allreduce: {error}", file=sys.stderr)
        return 1
    show(rows)
    lines = verdicts(rows) if args.check else []
    print("\n".join(lines) or ("nothing of what --check judges was measured" if args.check else ""))
    if args.json:
        found = [{**asdict(r), "algbw": r.algbw, "busbw": r.busbw} for r in rows]
        args.json.write_text(json.dumps({"rows": found, "check": lines}, indent=2))
    if args.plot:
        plot(rows, args.plot)
    return 1 if args.check and (not lines or any(line.startswith("FAIL") for line in lines)) else 0
