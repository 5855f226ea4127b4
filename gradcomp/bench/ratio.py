"""Count the bytes that each rank sends in a training step, for real models, every codec and
exchange, 2 to 64 ranks.

Nothing is sent: the numbers are the exchange's own sizing (`gradcomp.plan.nbytes.predict_bytes`),
headers, scales, padding and the scale round included, for rank 0 and DDP's default buckets.
``--verify`` trains LeNet for a few steps over gloo and requires that the `stats` of every rank
equal the prediction to the byte. compression_ratio = 2 (N - 1) / N * 4 * numel / bytes sent.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

import gradcomp
import gradcomp.ddp
from gradcomp.arguments import words
from gradcomp.bench import plots
from gradcomp.bench.about import save_json, table
from gradcomp.bench.models import LeNet
from gradcomp.bench.options import command_line
from gradcomp.bench.ranks import Emit, Place, RankFailed, run
from gradcomp.plan.costs import METHODS
from gradcomp.plan.models import MODELS, find_model
from gradcomp.plan.nbytes import predict_bytes

WORLD_SIZES = (2, 4, 8, 16, 64)
VERIFY_WORLD_SIZE, VERIFY_STEPS = 2, 3
FLATNESS = 0.12
FLOORS = {  # smallest accepted compression ratio on ResNet-50 at N = 8
    "terngrad exact": 8.0,
    "terngrad requantize": 15.0,
    "terngrad own requantize": 15.0,
    "onebit reduce_scatter": 26.0,
}
SCHEMES: dict[str, tuple[gradcomp.codecs.Codec, str]] = {  # codec and exchange
    "fp32 (Identity)": (gradcomp.Identity(), "auto"),
    **{method.name: (method.codec, method.exchange) for method in METHODS if method.codec},
    "terngrad own requantize": (
        gradcomp.TernGrad(scale="own", second_phase="requantize"),
        "reduce_scatter",
    ),
}


Row = dict[str, Any]  # as in the JSON file


class Check(NamedTuple):
    """Requirement, its result, and the result as text."""

    name: str
    passed: bool
    found: str


def count(models: Iterable[str]) -> list[Row]:
    """Return the bytes per rank and step of every scheme and world size."""
    out = []
    for model, scheme, world_size in itertools.product(models, SCHEMES, WORLD_SIZES):
        codec, exchange = SCHEMES[scheme]
        n = predict_bytes(codec, find_model(model).parameters, world_size, exchange=exchange)
        row = {"model": model, "scheme": scheme, "world_size": world_size, "bytes_sent": n.sent}
        row |= {"bytes_received": n.received, "baseline_bytes": n.baseline}
        out.append(row | {"compression_ratio": n.baseline / n.sent})
    return out


def check_ratios(rows: Iterable[Row]) -> list[Check]:
    """Check ResNet-50's ratios: at N = 8 the floor of `FLOORS`, and the same within 12 % up to 64.

    The exact scheme must instead follow 64 / (2 + bits), since its second phase takes ceil(log2(2N
    + 1)) bits.
    """
    ratios = {
        (row["scheme"], row["world_size"]): row["compression_ratio"]
        for row in rows
        if row["model"] == "ResNet-50"
    }
    checks = []
    for scheme, floor in FLOORS.items():
        found = ratios[scheme, 8]
        name = f"{scheme} on ResNet-50 at N = 8 at least {floor:g}x"
        checks.append(Check(name, found >= floor, f"{found:.2f}x"))
        exact = scheme == "terngrad exact"
        wanted = {n: 64 / (2 + (2 * n).bit_length()) if exact else found for n in WORLD_SIZES[2:]}
        off = max(abs(ratios[scheme, n] / ratio - 1) for n, ratio in wanted.items())
        shape = "follows 64 / (2 + ceil(log2(2N + 1)))" if exact else "flat"
        name = f"{scheme} {shape} from N = 8 to 64 within {FLATNESS:.0%}"
        checks.append(Check(name, off <= FLATNESS, f"off by {off:.1%} at most"))
    return checks


def verify() -> list[Check]:
    """Train LeNet over gloo with every scheme; compare every rank's bytes with the prediction."""
    errors: dict[str, list[str]] = {name: [] for name in SCHEMES}
    lenet = find_model("LeNet").parameters
    sent = {}

    def compare(message: tuple[str, int, set[tuple[int, int, int]]]) -> None:
        name, rank, steps = message
        codec, exchange = SCHEMES[name]
        n = predict_bytes(codec, lenet, VERIFY_WORLD_SIZE, exchange=exchange, rank=rank)
        sent[name] = f"{n.sent:,} bytes sent per rank and step, to the byte"
        if steps != {(n.sent, n.received, n.baseline)}:
            errors[name].append(f"rank {rank}: {steps}, predicted {n}")

    title = f"LeNet over gloo, {VERIFY_WORLD_SIZE} ranks"
    try:
        run(Place(VERIFY_WORLD_SIZE), _count_rank, on_message=compare)
    except RankFailed as error:
        return [Check(title, False, str(error))]
    return [
        Check(f"{name}: {title}", not wrong, "; ".join(wrong) or sent[name])
        for name, wrong in errors.items()
    ]


def _count_rank(emit: Emit) -> None:
    """Emit (scheme, rank, {(sent, received, baseline)}) of all steps but the first."""
    for name, (codec, exchange) in SCHEMES.items():
        torch.manual_seed(0)
        model = DistributedDataParallel(LeNet())
        state = gradcomp.ddp.register(model, codec, exchange=exchange)
        totals = []
        for _ in range(VERIFY_STEPS):
            torch.autograd.backward(model(torch.randn(2, 1, 28, 28)).square().mean())
            stats = state.stats
            totals.append((stats.bytes_sent, stats.bytes_received, stats.baseline_bytes))
        state.close()
        steps = itertools.pairwise(totals)
        emit(
            (name, dist.get_rank(), {tuple(b - a for a, b in zip(*s, strict=True)) for s in steps})
        )


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    epilog = "example:\n  python -m gradcomp.bench ratio --models LeNet,ResNet-50 --plot r.png"
    text = "models to count bytes of, as a list"
    options = {"models": (",".join(MODELS), "", text, words(*MODELS))}
    parser = command_line("ratio", __doc__, epilog, options, ("check", "json", "plot"))
    text = "train LeNet over gloo, which takes seconds, and require the same bytes (default: yes)"
    parser.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help=text)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the benchmark; return 1 if a check failed, 2 for invalid options."""
    args = read_options(argv)
    console = Console()
    checks = verify() if args.verify else []
    rows = count(args.models)
    by_scheme: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        by_scheme.setdefault(row["model"], {}).setdefault(row["scheme"], []).append(row)
    heads = ["", *(f"N = {world_size}" for world_size in WORLD_SIZES)]
    for model, schemes in by_scheme.items():
        cells = [(name, *map(_cell, mine)) for name, mine in schemes.items()]
        title = f"{model}, {find_model(model).numel:,} parameters: MB sent a step, ratio to fp32"
        console.print(table(heads, cells, title=title, padding=0))
    if args.check:
        checks += check_ratios(rows if "ResNet-50" in args.models else count(["ResNet-50"]))
    for check in checks:
        verdict = "[green]pass[/green]" if check.passed else "[red]FAIL[/red]"
        console.print(f"{verdict}  {check.name}: {check.found}", highlight=False, soft_wrap=True)
    save_json(args.json, rows=rows, checks=[check._asdict() for check in checks])
    if args.plot:
        panels = [(name, partial(_draw, schemes), 4.0) for name, schemes in by_scheme.items()]
        try:
            plots.write(args.plot, panels)
        except ValueError as error:  # a format that matplotlib does not write
            print(f"gradcomp.bench ratio: {error}", file=sys.stderr)
            return 2
    return 0 if all(check.passed for check in checks) else 1


def _cell(row: Row) -> str:
    """Return megabytes and ratio with three digits, or with all digits before the point."""
    mb, ratio = (
        f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
        for value in (row["bytes_sent"] / 1e6, row["compression_ratio"])
    )
    return f"{mb} {ratio}x"


def _draw(schemes: dict[str, list[Row]], figure: Any) -> None:
    """Draw the compression ratio over the number of ranks, one curve for each scheme."""
    series = {
        name: ([r["world_size"] for r in mine], [r["compression_ratio"] for r in mine])
        for name, mine in schemes.items()
    }
    labels = {"xlabel": "ranks", "ylabel": "compression ratio (fp32 ring = 1)"}
    ax = figure.subplots()
    plots.lines(ax, series, xscale="log", yscale="log", **labels)
    ax.set_xticks(WORLD_SIZES, WORLD_SIZES)
    ax.minorticks_off()
