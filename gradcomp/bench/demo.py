"""Train LeNet on real images with 2 ranks through DDP, once a codec of `CODECS`, and compare them
in one table.

``python -m gradcomp.bench demo`` starts the ranks itself (gloo, this machine, one torch thread
each), prints one table and writes demo.json and demo.png.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

import gradcomp
from gradcomp.arguments import Parser
from gradcomp.bench.data import ImageData, load, save
from gradcomp.bench.methods import NONE
from gradcomp.bench.models import LeNet
from gradcomp.bench.options import add_option
from gradcomp.bench.ranks import warm_context
from gradcomp.bench.train import rank
from gradcomp.bench.train.predict import planned
from gradcomp.bench.train.rank import Task
from gradcomp.bench.train.run import Place, cores_of, run_method
from gradcomp.comm.rounds import ring_bytes
from gradcomp.plan.links import parse_link
from gradcomp.plan.rates import calibrate
from gradcomp.plan.step import simulate
from gradcomp.plan.workload import Workload

PHASES = {
    "statistics": ("statistics",),
    "encode": ("encode",),
    "exchange": ("scale_round", "first_phase", "second_phase"),
    "average": ("owner",),
    "decode": ("decode",),
}
COLORS = ("#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7")  # of the codecs, in their order
SHORT_STEPS = 40
CODECS = ("fp32", "ternary", "onebit", "terngrad")
LR = 0.03
ALONE_STEPS = 20  # of the model alone, for the prediction
CURVE_POINTS = 8
HANG_S = 300.0
LINK = "1gbe"  # 1 Gbit/s, of the predicted step


Result = Mapping[str, Any]  # of a rank


@dataclass(frozen=True)
class Config:
    """What to train.

    Attributes:
        codecs: names out of `CODECS`, trained in this order.
        seeds: number of seeds; run i uses seed i for weights and batches.
        steps: optimizer steps of a run.
        batch: images a step over all ranks together; a multiple of ``ranks``.
        lr: first learning rate; it decays to 0 with the square root of the steps left (TernGrad's
            LeNet schedule).
        ranks: processes.
        data: folder of IDX files, None for scikit-learn's digits.
    """

    codecs: tuple[str, ...]
    seeds: int
    steps: int
    batch: int
    lr: float
    ranks: int
    data: Path | None


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of the demo."""
    parser = Parser(
        prog="python -m gradcomp.bench demo",
        description=(
            "Train LeNet on real images under DistributedDataParallel, once per codec with the same"
            " seeds, steps and batches. Show test accuracy, bytes sent and the step time predicted"
            " for a 1 Gbit/s network."
        ),
        epilog=(
            "examples:\n  python -m gradcomp.bench demo --short\n"
            "  python -m gradcomp.bench demo --data path/to/mnist --steps 600"
        ),
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help=(
            "folder with the IDX files of MNIST or Fashion-MNIST, "
            "plain or .gz (default: scikit-learn's digits, upsampled to 28x28)"
        ),
    )
    parser.add_argument(
        "--codecs",
        default="fp32,ternary,onebit",
        metavar="A,B",
        help=f"codecs to train with, of {', '.join(CODECS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=250,
        metavar="N",
        help="optimizer steps of each training (default: %(default)s)",
    )
    add_option(parser, "seeds")
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        metavar="N",
        help="processes to start on this machine (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=64,
        metavar="N",
        help="images per step over all ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=LR,
        metavar="RATE",
        help="first learning rate; it falls to 0 (default: %(default)s)",
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help=f"train one seed for {SHORT_STEPS} steps: a check that everything works",
    )
    parser.add_argument(
        "--phases",
        action="store_true",
        help="also show the measured step and the milliseconds of each phase of an exchange",
    )
    text = "folder for demo.json and demo.png (default: this one)"
    add_option(parser, "out", default=Path(), help=text)
    return parser


def parse_config(argv: Sequence[str]) -> tuple[Config, Path, bool]:
    """Turn the command line into a checked configuration, the output folder and whether phases are
    shown.

    Wrong values end the program with status 2.
    """
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
    return (
        Config(codecs, seeds, steps, args.batch, args.lr, args.ranks, args.data),
        args.out,
        args.phases,
    )


def main(argv: list[str]) -> int:
    """Run the demo.

    Args:
        argv: options, see ``--help``.

    Returns:
        0 done, 1 a rank failed, 2 the data cannot be read or an option is wrong.
    """
    config, out, shows_phases = parse_config(argv)
    console = Console()
    trainings = (
        f"{len(config.codecs)} codecs x {config.seeds} seed{'s' if config.seeds > 1 else ''}"
    )
    console.print(
        f"[bold]gradcomp demo[/bold]: LeNet, {config.ranks} ranks, {trainings} x {config.steps}"
        " steps",
        highlight=False,
    )
    start = time.perf_counter()
    warm_context(rank.__name__)  # imports while this process reads the data
    try:
        out.mkdir(parents=True, exist_ok=True)
        data = load(config.data)
        if len(data.train_labels) < config.batch:
            raise ValueError(
                f"--batch {config.batch}: larger than the training set of {len(data.train_labels)}"
                " images"
            )
    except (OSError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    console.print(f"data: {data.note}", markup=False, highlight=False)
    try:
        results, alone = train_all(config, data, console)
    except RuntimeError as error:
        print(f"demo: a rank failed: {error}", file=sys.stderr)
        return 1
    report = summarise(config, data, results)
    for codec, seconds in predict_steps(config, *alone).items():
        report["codecs"][codec]["predicted_seconds_per_step"] = seconds
    report["wall_s"] = round(time.perf_counter() - start, 1)
    (out / "demo.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plot(report, out / "demo.png")
    if shows_phases:
        console.print(build_phases(report))
    console.print(build_table(report))
    console.print(
        f"wrote {out / 'demo.json'} and {out / 'demo.png'} in {report['wall_s']:.0f} s",
        highlight=False,
    )
    return 0


def train_all(
    config: Config, data: ImageData, console: Console
) -> tuple[dict[tuple[str, int], list[Result]], tuple[float, float]]:
    """Train every seed with every codec, ranks on this machine, with a bar.

    Returns:
        The ranks' results by (codec, seed), as `gradcomp.bench.train.rank.train` gives them; and
        the seconds that computing and updates of the slowest rank take without an exchange.

    Raises:
        RuntimeError: a rank failed.
    """
    columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()]
    results: dict[tuple[str, int], list[Result]] = {}
    with contextlib.ExitStack() as stack:
        folder = str(config.data)
        if config.data is None:  # scikit-learn takes a rank seconds to import
            folder = stack.enter_context(tempfile.TemporaryDirectory()) + "/digits.npz"
            save(data, Path(folder))
        # a screen refreshed ten times a second, which is the default, takes time from the ranks
        progress = stack.enter_context(
            Progress(*columns, TimeRemainingColumn(), console=console, refresh_per_second=2)
        )
        runs = list(itertools.product(range(config.seeds), config.codecs))
        bar = progress.add_task("starting the ranks", total=len(runs) * config.steps)

        def run(method: str, seed: int, steps: int, points: int, before: int) -> list[Result]:
            task = Task(
                method,
                "lenet-demo",
                folder,
                "sgd",
                steps,
                seed,
                config.batch // config.ranks,
                points,
                (),
                factor=config.lr / LR,
            )
            tasks = [
                replace(task, cores=cores_of(number, config.ranks))
                for number in range(config.ranks)
            ]
            found = run_method(
                tasks, Place(), HANG_S, lambda step: progress.update(bar, completed=before + step)
            )
            if found.failed:
                raise RuntimeError(found.failed)
            return found.results

        without = run(NONE, 0, ALONE_STEPS, 0, 0)
        for number, (seed, codec) in enumerate(runs):
            progress.update(bar, description=f"training {codec}, seed {seed + 1} of {config.seeds}")
            points = min(CURVE_POINTS, config.steps)
            found = run(codec, seed, config.steps, points, number * config.steps)
            results[codec, seed] = found
        progress.update(bar, completed=len(runs) * config.steps)
    update = max(statistics.median(one["update_seconds"]) for one in without)
    step = max(statistics.median(one["seconds"]) for one in without)
    return results, (step - update, update)


def predict_steps(config: Config, compute: float, update: float) -> dict[str, float]:
    """Return the seconds of a step that the planner predicts for each codec, with each rank on a
    machine of its own; the codecs' own seconds are measured here.

    Args:
        config: what was trained.
        compute, update: seconds of a step without an exchange.
    """
    shapes = tuple((name, tuple(p.shape)) for name, p in LeNet().named_parameters())
    work = Workload(shapes, minibatch=1.0, t_frame=compute, t_update=update, weak=True)
    found = {name: planned(name, config.ranks) for name in config.codecs}
    methods = {name: method for name, method in found.items() if method is not None}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates = calibrate(list(methods.values()))
    finally:
        torch.set_num_threads(threads)
    link = parse_link(LINK)
    return {
        name: simulate(work, method, config.ranks, link, rates=rates).seconds
        for name, method in methods.items()
    }


def summarise(
    config: Config, data: ImageData, results: Mapping[tuple[str, int], Sequence[Result]]
) -> dict[str, Any]:
    """Reduce the runs to means and spreads, in the form that demo.json has.

    Args:
        config: what was trained.
        data: what it was trained on.
        results: of the ranks, by codec and seed.

    Returns:
        Plain values only: settings, versions, and one entry a codec. Bytes are a step and rank
        (mean over ranks and seeds), seconds a step, accuracies percent, spread the standard
        deviation over seeds (0 for one seed).
    """
    codecs: dict[str, Any] = {}
    for codec in config.codecs:
        runs = [results[codec, seed] for seed in range(config.seeds)]
        accuracies = [run[0]["measure"] for run in runs]
        sent = [statistics.fmean(one["total_nbytes"] for one in run) / config.steps for run in runs]
        ring = ring_bytes(runs[0][0]["parameters"], config.ranks)
        phases = {
            phase: statistics.fmean(
                sum(run[0]["phases"].get(key, 0.0) for key in keys) for run in runs
            )
            for phase, keys in PHASES.items()
            if runs[0][0]["phases"]
        }
        codecs[codec] = {
            "accuracy_mean": statistics.fmean(accuracies),
            "accuracy_spread": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
            "accuracies": accuracies,
            "bytes_sent_per_step": statistics.fmean(sent),
            "baseline_bytes_per_step": ring,
            "compression_ratio": ring / statistics.fmean(sent),
            "seconds_per_step": statistics.fmean(
                statistics.median(run[0]["seconds"]) for run in runs
            ),
            "phase_seconds_per_step": phases,
            "curves": [
                [[step, step * nbytes, accuracy] for step, _, accuracy in run[0]["curve"]]
                for run, nbytes in zip(runs, sent, strict=True)
            ],
        }
    settings = {
        "model": "LeNet, 1256080 parameters",
        "ranks": config.ranks,
        "steps": config.steps,
        "seeds": config.seeds,
        "batch": config.batch,
        "lr": config.lr,
        "backend": "gloo",
        "threads_per_rank": len(cores_of(0, config.ranks)),
    }
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gradcomp": gradcomp.__version__,
    }
    return {
        "data": {"name": data.name, "note": data.note},
        "settings": settings,
        "versions": versions,
        "codecs": codecs,
    }


def build_table(report: dict[str, Any]) -> Table:
    """Return the table of the demo: one row a codec."""
    settings = report["settings"]
    table = Table(
        title=_title(report),
        caption=(
            "accuracy:"
            f" mean{' ± standard deviation over the seeds' if settings['seeds'] > 1 else ''}. sent:"
            f" by each rank. predicted: by the planner, for {settings['ranks']} machines on a 1"
            " Gbit/s network, from what computing and codecs take here."
        ),
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    table.add_column("\ncodec", no_wrap=True)
    for head in (
        "test\naccuracy %",
        "sent in a\nstep, kB",
        "fewer\nbytes",
        "predicted step\nat 1 Gbit/s",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for name, row in report["codecs"].items():
        spread = f" ± {row['accuracy_spread']:.2f}" if settings["seeds"] > 1 else ""
        cells = [f"{row['accuracy_mean']:.2f}{spread}", f"{row['bytes_sent_per_step'] / 1e3:,.0f}"]
        cells += [
            f"{row['compression_ratio']:.1f}x",
            f"{row['predicted_seconds_per_step'] * 1e3:.1f} ms",
        ]
        table.add_row(name, *cells)
    return table


def build_phases(report: dict[str, Any]) -> Table:
    """Return the table of ``--phases``: what was measured here, in milliseconds a step."""
    table = Table(
        title=_title(report) + ": milliseconds a step",
        caption=(
            "Median of rank 0, over this machine's loopback, which is faster than most networks."
            " Phases run in threads of their own beside the backward pass."
        ),
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    table.add_column("codec", no_wrap=True)
    for head in ("step", *PHASES):
        table.add_column(head, justify="right", no_wrap=True)
    for name, row in report["codecs"].items():
        phases = row["phase_seconds_per_step"]
        cells = [f"{phases[phase] * 1e3:.1f}" if phases else "-" for phase in PHASES]
        table.add_row(name, f"{row['seconds_per_step'] * 1e3:.1f}", *cells)
    return table


def _title(report: dict[str, Any]) -> str:
    settings = report["settings"]
    seeds = f"{settings['seeds']} seed{'s' if settings['seeds'] > 1 else ''}"
    return (
        f"LeNet on {report['data']['name']}, {settings['ranks']} ranks, {settings['steps']} steps,"
        f" {seeds}"
    )


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw test accuracy against the bytes that one rank has sent, one line a codec, and write it
    as PNG.

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
    for color, (name, row) in zip(itertools.cycle(COLORS), report["codecs"].items(), strict=False):
        megabytes = [
            statistics.fmean(p[1] for p in points) / 1e6
            for points in zip(*row["curves"], strict=True)
        ]
        scores = [[p[2] for p in points] for points in zip(*row["curves"], strict=True)]
        mean = [statistics.fmean(s) for s in scores]
        label = (
            f"{name}: {row['accuracy_mean']:.1f} % after {megabytes[-1]:,.0f} MB"
            f" ({row['compression_ratio']:.1f}x)"
        )
        axes.plot(megabytes, mean, color=color, marker="o", markersize=4, linewidth=2, label=label)
        axes.fill_between(
            megabytes,
            [min(s) for s in scores],
            [max(s) for s in scores],
            color=color,
            alpha=0.15,
            linewidth=0,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.legend(loc="lower right", frameon=False, labelcolor="linecolor")
    axes.set_xlabel("bytes sent by each rank so far (MB, log scale)")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title(
        f"LeNet on {report['data']['name']}: test accuracy against bytes sent\n{settings['ranks']}"
        f" ranks, {settings['steps']} steps of {settings['batch']} images, mean and range of"
        f" {settings['seeds']} seed(s)",
        fontsize=10,
        loc="left",
    )
    axes.grid(True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
