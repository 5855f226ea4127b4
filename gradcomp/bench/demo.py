"""Train LeNet on real images with 2 ranks through DDP in fp32, terngrad and onebit, and compare them in one table.

``python -m gradcomp.bench demo`` starts the ranks itself (gloo, this machine, one torch thread each), prints one table
and writes demo.json and demo.png.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import gradcomp
from gradcomp.bench.data import ImageData, load
from gradcomp.bench.ranks import RANK_ERRORS
from gradcomp.bench.training import CODECS, RunResult, TrainConfig, train_all

PHASES = {
    "statistics": ("statistics",),
    "encode": ("encode",),
    "exchange": ("scale_round", "first_phase", "second_phase"),
    "owner": ("owner",),
    "decode": ("decode",),
}
COLORS = {"fp32": "#444444", "terngrad": "#0072b2", "onebit": "#d55e00"}
SHORT_STEPS = 40


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of the demo."""
    parser = argparse.ArgumentParser(
        prog="python -m gradcomp.bench demo",
        description="Train LeNet on real images under DistributedDataParallel, once a codec with the same seeds, steps and "
        "batches, and show test accuracy beside the bytes that crossed the wire.",
        epilog="Examples:  demo --short        |  demo --data path/to/mnist --steps 600",
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="MNIST or Fashion-MNIST IDX files, plain or .gz (default: "
                        "scikit-learn's digits, upsampled to 28x28)")  # fmt: skip
    parser.add_argument("--codecs", default=",".join(CODECS), metavar="A,B", help="which ones (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=250, help="optimizer steps of a run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs a codec; mean and spread (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images a step, all ranks together (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.03, help="first learning rate (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help=f"one seed and {SHORT_STEPS} steps: does it work at all?")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where demo.json and demo.png go")
    return parser


def parse_config(argv: Sequence[str]) -> tuple[TrainConfig, Path]:
    """Turn the command line into a checked configuration and the output folder; wrong values end the program with 2."""
    parser = build_parser()
    args = parser.parse_args(argv)
    codecs = tuple(name.strip() for name in args.codecs.split(",") if name.strip())
    unknown = [name for name in codecs if name not in CODECS]
    if unknown or not codecs or len(set(codecs)) != len(codecs):
        parser.error(f"--codecs {args.codecs!r}: give different names out of {', '.join(CODECS)}")
    for name, low in (("steps", 1), ("seeds", 1), ("ranks", 2)):
        if getattr(args, name) < low:
            parser.error(f"--{name} {getattr(args, name)}: must be at least {low}")
    if args.batch < args.ranks or args.batch % args.ranks:
        parser.error(f"--batch {args.batch}: must be a multiple of the {args.ranks} ranks")
    if not 0 < args.lr < 10:
        parser.error(f"--lr {args.lr}: must be above 0 and below 10")
    steps, seeds = (min(args.steps, SHORT_STEPS), 1) if args.short else (args.steps, args.seeds)
    return TrainConfig(codecs, seeds, steps, args.batch, args.lr, args.ranks, args.data), args.out


def main(argv: list[str]) -> int:
    """Run the demo.

    Args:
        argv: options, see ``--help``.

    Returns:
        0 done, 1 a rank failed, 2 the data cannot be read or an option is wrong.
    """
    config, out = parse_config(argv)
    console = Console()
    try:
        out.mkdir(parents=True, exist_ok=True)
        data = load(config.data)
        if len(data.train_labels) < config.batch:
            raise ValueError(f"--batch {config.batch}: larger than the training set of {len(data.train_labels)} images")
    except (OSError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    console.print(f"[bold]gradcomp demo[/bold]: LeNet, {config.ranks} ranks, {config.steps} steps x {config.seeds} seed(s)")
    console.print(f"data: {data.note}", markup=False, highlight=False)
    start = time.perf_counter()
    try:
        results = _train_with_progress(config, console)
    except RANK_ERRORS as error:
        print(f"demo: a rank failed: {error}", file=sys.stderr)
        return 1
    report = summarise(config, data, results)
    report["wall_s"] = round(time.perf_counter() - start, 1)
    console.print(build_table(report))
    (out / "demo.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plot(report, out / "demo.png")
    console.print(f"wrote {out / 'demo.json'} and {out / 'demo.png'} in {report['wall_s']:.0f} s", highlight=False)
    return 0


def _train_with_progress(config: TrainConfig, console: Console) -> list[RunResult]:
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console) as progress:
        total = config.steps * config.seeds
        tasks = {codec: progress.add_task(f"{codec:<8}", total=total) for codec in config.codecs}

        def on_step(codec: str, seed: int, step: int) -> None:
            progress.update(tasks[codec], completed=seed * config.steps + step)

        return train_all(config, on_step)


def summarise(config: TrainConfig, data: ImageData, results: Sequence[RunResult]) -> dict[str, Any]:
    """Reduce the runs to means and spreads, in the form that demo.json has.

    Args:
        config: what was trained.
        data: what it was trained on.
        results: every run.

    Returns:
        Plain values only: settings, versions, and one entry a codec. Bytes are a step and rank (mean over ranks and
        seeds), seconds a step, accuracies percent, spread the standard deviation over seeds (0 for one seed).
    """
    codecs: dict[str, Any] = {}
    for codec in config.codecs:
        runs = [run for run in results if run.codec == codec]
        accuracies = [run.accuracy for run in runs]
        sent = statistics.fmean(sum(run.bytes_sent) / len(run.bytes_sent) for run in runs)
        phases = {
            phase: statistics.fmean(sum(run.phase_seconds[key] for key in keys) for run in runs) / config.steps
            for phase, keys in PHASES.items()
            if runs[0].phase_seconds
        }
        codecs[codec] = {
            "accuracy_mean": statistics.fmean(accuracies),
            "accuracy_spread": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
            "accuracies": accuracies,
            "bytes_sent_per_step": sent / config.steps,
            "baseline_bytes_per_step": runs[0].baseline_bytes / config.steps,
            "compression_ratio": runs[0].baseline_bytes / sent if sent else 1.0,
            "seconds_per_step": statistics.fmean(run.seconds_per_step for run in runs),
            "phase_seconds_per_step": phases,
            "curves": [[list(point) for point in run.curve] for run in runs],
        }
    settings = {
        "model": "LeNet, 1256080 parameters", "ranks": config.ranks, "steps": config.steps, "seeds": config.seeds,
        "batch": config.batch, "lr": config.lr, "backend": "gloo", "threads_per_rank": 1,
    }  # fmt: skip
    versions = {"python": platform.python_version(), "torch": torch.__version__, "gradcomp": gradcomp.__version__}
    return {"data": {"name": data.name, "note": data.note}, "settings": settings, "versions": versions, "codecs": codecs}


def build_table(report: dict[str, Any]) -> Table:
    """Return the table of the demo: one row a codec, phases in milliseconds a step."""
    settings = report["settings"]
    table = Table(
        title=f"LeNet on {report['data']['name']}, {settings['ranks']} ranks, {settings['steps']} steps, "
        f"{settings['seeds']} seed(s)",
        caption="sent: per rank, headers and scales included; fp32: a ring all_reduce. ms: per step on rank 0, gloo over "
        "this machine's loopback, which is faster than most networks. Phases run beside the backward.",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("\ncodec", no_wrap=True)
    heads = ["test\naccuracy %", "sent\nkB/step", "\nratio", "step\nms"]
    heads += ["statis-\ntics ms" if phase == "statistics" else f"{phase}\nms" for phase in PHASES]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for name, row in report["codecs"].items():
        spread = f" ±{row['accuracy_spread']:.2f}" if settings["seeds"] > 1 else ""
        cells = [f"{row['accuracy_mean']:.2f}{spread}", f"{row['bytes_sent_per_step'] / 1e3:,.1f}"]
        cells += [f"{row['compression_ratio']:.1f}x", f"{row['seconds_per_step'] * 1e3:.1f}"]
        phases = row["phase_seconds_per_step"]
        cells += [f"{phases[phase] * 1e3:.1f}" if phases else "-" for phase in PHASES]
        table.add_row(name, *cells)
    return table


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw test accuracy against the bytes that one rank has sent, one line a codec, and write it as PNG.

    Args:
        report: what :func:`summarise` returned.
        path: the file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    settings = report["settings"]
    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, row in report["codecs"].items():
        megabytes = [statistics.fmean(p[1] for p in points) / 1e6 for points in zip(*row["curves"], strict=True)]
        scores = [[p[2] for p in points] for points in zip(*row["curves"], strict=True)]
        mean = [statistics.fmean(s) for s in scores]
        color = COLORS[name]
        label = f"{name}: {row['accuracy_mean']:.1f} % after {megabytes[-1]:,.0f} MB ({row['compression_ratio']:.1f}x)"
        axes.plot(megabytes, mean, color=color, marker="o", markersize=4, linewidth=2, label=label)
        axes.fill_between(megabytes, [min(s) for s in scores], [max(s) for s in scores], color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.legend(loc="lower right", frameon=False, labelcolor="linecolor")
    axes.set_xlabel("bytes sent by each rank so far (MB, log scale)")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title(
        f"LeNet on {report['data']['name']}: test accuracy against bytes sent\n{settings['ranks']} ranks, "
        f"{settings['steps']} steps of {settings['batch']} images, mean and range of {settings['seeds']} seed(s)",
        fontsize=10, loc="left",
    )  # fmt: skip
    axes.grid(True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
