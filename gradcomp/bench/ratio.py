"""Count the bytes that one training step costs each rank, for real models, every codec and
exchange, 2 to 64 ranks.

Nothing is sent: the numbers are the exchange's own sizing
(`gradcomp.exchange.sizing.predict_bytes`), headers, scales, padding and the scale round included.
They are believed because LeNet is also trained for a few steps over gloo, and what its
`state.stats` counted must equal the prediction to the byte. compression_ratio = 2(N-1)/N * 4 *
numel / bytes sent.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import gradcomp
import gradcomp.ddp
from gradcomp.arguments import Parser
from gradcomp.bench.models import LeNet
from gradcomp.bench.palette import color_of
from gradcomp.bench.ranks import RANK_ERRORS, Emit, run_ranks
from gradcomp.exchange.sizing import predict_bytes
from gradcomp.plan.costs import METHODS
from gradcomp.plan.models import MODELS, lenet, total_numel

WORLD_SIZES = (2, 4, 8, 16, 64)
VERIFY_WORLD_SIZE = 2
VERIFY_STEPS = 3
FLATNESS = 0.12


@dataclass(frozen=True)
class Scheme:
    """A codec with its options, and how it is exchanged.

    Attributes:
        name: for tables.
        codec: with its options.
        exchange: as in `gradcomp.ddp.register`.
        floor: the ratio it must reach on ResNet-50 at N = 8, None if nothing is asked of it.
    """

    name: str
    codec: gradcomp.Codec
    exchange: str
    floor: float | None = None


FLOORS = {
    "terngrad exact": 8.0,
    "terngrad requantize": 15.0,
    "terngrad own requantize": 15.0,
    "onebit reduce_scatter": 26.0,
}
OWN = gradcomp.TernGrad(scale="own", second_phase="requantize")


def _schemes() -> list[Scheme]:
    """Return fp32 values, every way of `gradcomp.plan.METHODS` that compresses, and ternary with
    own scales.
    """
    named: list[tuple[str, gradcomp.Codec, str]] = [
        ("fp32 (Identity)", gradcomp.Identity(), "auto")
    ]
    for method in METHODS:
        if method.codec is not None:
            named.append((method.name, method.codec, method.exchange))
        if method.name == "terngrad requantize":
            named.append(("terngrad own requantize", OWN, method.exchange))
    return [Scheme(name, codec, exchange, FLOORS.get(name)) for name, codec, exchange in named]


SCHEMES = _schemes()


@dataclass(frozen=True)
class Row:
    """Bytes of one model under one scheme at one world size; per rank and step."""

    model: str
    scheme: str
    world_size: int
    bytes_sent: int
    bytes_received: int
    baseline_bytes: int
    compression_ratio: float


@dataclass(frozen=True)
class Check:
    """One requirement and what was found."""

    name: str
    passed: bool
    found: str


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of the benchmark."""
    parser = Parser(
        prog="python -m gradcomp.bench ratio",
        description=(
            "Bytes sent by each rank in a training step against an fp32 ring all_reduce: headers,"
            " scales, padding and the scale round included, rank 0, DDP's default buckets."
        ),
        epilog=(
            "example:\n  python -m gradcomp.bench ratio --models LeNet,ResNet-50 --plot ratio.png"
        ),
    )
    parser.add_argument(
        "--models",
        default=",".join(MODELS),
        metavar="A,B",
        help="models to count bytes of, as a list (default: %(default)s)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write every number to this file",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the ratio against the number of ranks into this file (PNG, SVG or PDF)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="print pass or fail of the promised ratios; the exit status is 1 when one fails",
    )
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=(
            "train LeNet for some steps over gloo and require the same bytes (default: yes; it "
            "takes seconds)"
        ),
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the benchmark.

    Args:
        argv: options, see ``--help``.

    Returns:
        0 done, 1 a check or the comparison with gloo failed, 2 wrong options.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    models = [name.strip() for name in args.models.split(",") if name.strip()]
    unknown = [name for name in models if name not in MODELS]
    if unknown or not models:
        parser.error(f"--models {args.models!r}: give names out of {', '.join(MODELS)}")
    console = Console()
    checks: list[Check] = []
    if args.verify:
        try:
            checks += verify()
        except RANK_ERRORS as error:
            checks.append(Check("LeNet over gloo", False, str(error)))
    rows = count(models)
    for name in models:
        console.print(build_table(name, rows))
    if args.check:
        checks += check_ratios(rows if "ResNet-50" in models else count(["ResNet-50"]))
    for check in checks:
        verdict = "[green]pass[/green]" if check.passed else "[red]FAIL[/red]"
        console.print(f"{verdict}  {check.name}: {check.found}", highlight=False, soft_wrap=True)
    if args.json:
        report = {
            "rows": [asdict(row) for row in rows],
            "checks": [asdict(check) for check in checks],
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if args.plot:
        plot(rows, args.plot)
    return 0 if all(check.passed for check in checks) else 1


def count(models: Sequence[str]) -> list[Row]:
    """Return the bytes of every scheme and world size for these models (names in
    :data:`~gradcomp.plan.models.MODELS`).
    """
    out: list[Row] = []
    for model in models:
        parameters = MODELS[model]()
        for scheme in SCHEMES:
            for world_size in WORLD_SIZES:
                n = predict_bytes(scheme.codec, parameters, world_size, exchange=scheme.exchange)
                out.append(
                    Row(
                        model,
                        scheme.name,
                        world_size,
                        n.sent,
                        n.received,
                        n.baseline,
                        n.baseline / n.sent,
                    )
                )
    return out


def check_ratios(rows: Sequence[Row]) -> list[Check]:
    """Hold ResNet-50's ratios against what is promised.

    The reduce_scatter schemes must reach their floor at N = 8 and stay flat from N = 8 to 64 within
    12 %; the exact one, whose second phase takes ceil(log2(2N + 1)) bits, must follow 64 / (2 +
    bits) within 12 % instead.
    """
    ratios = {(r.scheme, r.world_size): r.compression_ratio for r in rows if r.model == "ResNet-50"}
    checks: list[Check] = []
    sizes = [n for n in WORLD_SIZES if n >= 8]
    for scheme in SCHEMES:
        if scheme.floor is None:
            continue
        found = ratios[scheme.name, 8]
        name = f"{scheme.name} on ResNet-50 at N = 8 at least {scheme.floor:g}x"
        checks.append(Check(name, found >= scheme.floor, f"{found:.2f}x"))
        if scheme.name == "terngrad exact":
            offs = [
                abs(ratios[scheme.name, n] * (2 + (2 * n).bit_length()) / 64 - 1) for n in sizes
            ]
            name = (
                f"{scheme.name} follows 64 / (2 + ceil(log2(2N + 1))) from N = 8 to 64 within"
                f" {FLATNESS:.0%}"
            )
        else:
            offs = [abs(ratios[scheme.name, n] / found - 1) for n in sizes]
            name = f"{scheme.name} flat from N = 8 to 64 within {FLATNESS:.0%}"
        checks.append(Check(name, max(offs) <= FLATNESS, f"off by {max(offs):.1%} at most"))
    return checks


def verify() -> list[Check]:
    """Train LeNet over gloo with every scheme and compare what was counted with what is predicted,
    on every rank.

    The first step is left out, because DDP cuts its final buckets only after it.

    Returns:
        One check a scheme.
    """
    counted: dict[tuple[str, int], list[tuple[int, int, int]]] = {}

    def on_message(message: tuple[str, int, list[tuple[int, int, int]]]) -> None:
        counted[message[0], message[1]] = message[2]

    run_ranks(VERIFY_WORLD_SIZE, _count_rank, on_message=on_message)
    checks: list[Check] = []
    for scheme in SCHEMES:
        wrong = []
        for rank in range(VERIFY_WORLD_SIZE):
            n = predict_bytes(
                scheme.codec, lenet(), VERIFY_WORLD_SIZE, exchange=scheme.exchange, rank=rank
            )
            expected = (n.sent, n.received, n.baseline)
            wrong += [
                f"rank {rank}: {c}, predicted {expected}"
                for c in counted[scheme.name, rank]
                if c != expected
            ]
        found = "; ".join(wrong) or f"{n.sent:,} bytes sent per rank and step, to the byte"
        checks.append(
            Check(f"{scheme.name}: LeNet over gloo, {VERIFY_WORLD_SIZE} ranks", not wrong, found)
        )
    return checks


def _count_rank(rank: int, emit: Emit) -> None:
    """Emit (scheme, rank, [(sent, received, baseline) of each step but the first]) for every
    scheme.
    """
    for scheme in SCHEMES:
        torch.manual_seed(0)
        model = DistributedDataParallel(LeNet())
        state = gradcomp.ddp.register(model, scheme.codec, exchange=scheme.exchange)
        totals: list[tuple[int, int, int]] = []
        for _ in range(VERIFY_STEPS):
            torch.autograd.backward(model(torch.randn(2, 1, 28, 28)).square().mean())
            stats = state.stats
            totals.append((stats.bytes_sent, stats.bytes_received, stats.baseline_bytes))
        state.close()
        steps = itertools.pairwise(totals)
        emit((scheme.name, rank, [(b[0] - a[0], b[1] - a[1], b[2] - a[2]) for a, b in steps]))


def build_table(model: str, rows: Sequence[Row]) -> Table:
    """Return one model's table: MB sent per rank and step and the ratio to an fp32 ring, by
    scheme and world size.
    """
    numel = total_numel(MODELS[model]())
    table = Table(
        title=f"{model}, {numel:,} parameters: MB sent a step, ratio to fp32",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("", no_wrap=True)
    for world_size in WORLD_SIZES:
        table.add_column(f"N = {world_size}", justify="right", no_wrap=True)
    for scheme in SCHEMES:
        mine = [r for r in rows if r.model == model and r.scheme == scheme.name]
        table.add_row(
            scheme.name,
            *(f"{_short(r.bytes_sent / 1e6)} {_short(r.compression_ratio)}x" for r in mine),
        )
    return table


def _short(value: float) -> str:
    """Return three digits of a value above 0.1, all of those before the point."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the ratio against the number of ranks, one panel a model, one line a scheme.

    Args:
        rows: what :func:`count` returned.
        path: file to write; its suffix decides the format.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    models = list(dict.fromkeys(row.model for row in rows))
    figure = Figure(figsize=(3.1 * len(models) + 0.6, 4.4), dpi=130, layout="constrained")
    panels: Any = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        for scheme in SCHEMES:
            mine = [r for r in rows if r.model == model and r.scheme == scheme.name]
            style = (
                ":" if scheme.name.endswith("own requantize") else "-"
            )  # its bytes are those of the shared scale
            axes.plot(
                [r.world_size for r in mine],
                [r.compression_ratio for r in mine],
                style,
                color=color_of(scheme.name.split(" (")[0]),
                marker="o",
                markersize=3.5,
                linewidth=1.8,
                label=scheme.name,
            )
        axes.set(xscale="log", yscale="log", title=model, xlabel="ranks")
        axes.xaxis.set_major_locator(FixedLocator(WORLD_SIZES))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(FixedLocator([0.5, 1, 2, 4, 8, 16, 32]))
        axes.yaxis.set_minor_locator(NullLocator())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("compression ratio (fp32 ring = 1)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(4, 2 * len(models)),
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path)
