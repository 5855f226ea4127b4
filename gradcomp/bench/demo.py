"""Train LeNet on real images with 2 ranks through DDP, once per codec with the same seeds, steps
and batches.

Shows test accuracy, bytes sent and the step that the planner predicts for a 1 Gbit/s network, and
writes demo.json and demo.png. The ranks run on this machine, over loopback.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from gradcomp.arguments import count, words
from gradcomp.bench import plots, trainer
from gradcomp.bench.about import save_json, table
from gradcomp.bench.data import ImageData, load
from gradcomp.bench.methods import NONE
from gradcomp.bench.models import LeNet
from gradcomp.bench.options import at_least, command_line
from gradcomp.bench.predict import planned, predict
from gradcomp.bench.ranks import RankFailed, cores_of, warm_context
from gradcomp.bench.sweep import Result, run_all
from gradcomp.bench.timing import using
from gradcomp.bench.trainer import Task
from gradcomp.comm.rounds import ring_bytes
from gradcomp.kernels import native
from gradcomp.plan.links import parse_link
from gradcomp.plan.rates import calibrate

PHASES = {
    "statistics": ("statistics",),
    "encode": ("encode",),
    "exchange": ("scale_round", "first_phase", "second_phase"),
    "average": ("owner",),
    "decode": ("decode",),
}
SHORT_STEPS = 40
CODECS = ("fp32", "ternary", "onebit", "terngrad", "entropy:bits=1.25")
LR = 0.03
ALONE_STEPS = 20  # steps of the model without an exchange, for the prediction
CURVE_POINTS = 5
DIGITS = "sklearn.datasets", "sklearn.model_selection"  # preloaded: importing them takes seconds
LINK = "1gbe"  # 1 Gbit/s, for the predicted step
EPILOG = """examples:
  python -m gradcomp.bench demo --short
  python -m gradcomp.bench demo --data path/to/mnist --steps 600
"""


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, `codecs` as a list; invalid values end the program with status 2."""
    data = "folder with the IDX files of MNIST or Fashion-MNIST, plain or .gz (default:"
    data += " scikit-learn's digits, upsampled to 28x28)"
    codecs = f"codecs to train with, of {', '.join(CODECS)}"
    short = f"train one seed for {SHORT_STEPS} steps: a check that everything works"
    phases = "also show the measured step and the milliseconds of each phase of an exchange"
    options = {
        "data": (Path, "DIR", data),
        "codecs": ("fp32,ternary,onebit", "A,B", codecs, words(*CODECS)),
        "steps": (180, "N", "optimizer steps of each training", count),
        "ranks": (2, "N", "processes to start on this machine", at_least(2)),
        "batch": (64, "N", "images per step over all ranks", count),
        "lr": (LR, "RATE", "first learning rate; it falls to 0"),
        "short": (False, "", short),
        "phases": (False, "", phases),
        "out": (Path(), "DIR", "folder for demo.json and demo.png"),
    }
    parser = command_line("demo", __doc__, EPILOG, options, ["seeds"])
    args = parser.parse_args(argv)
    if len(set(args.codecs)) != len(args.codecs):
        parser.error(f"--codecs {','.join(args.codecs)}: give different names")
    if args.batch % args.ranks:
        parser.error(f"--batch {args.batch}: must be a multiple of the {args.ranks} ranks")
    if not 0 < args.lr < 10:
        parser.error(f"--lr {args.lr}: must be above 0 and below 10")
    if args.short:
        args.steps, args.seeds = min(args.steps, SHORT_STEPS), 1
    return args


def main(argv: list[str]) -> int:
    """Run the demo; return 1 if a rank failed, 2 for wrong data or options."""
    args = read_options(argv)
    console = Console(highlight=False)
    trainings = f"{len(args.codecs)} codecs x {_seeds(args.seeds)} x {args.steps} steps"
    console.print(f"[bold]gradcomp demo[/bold]: LeNet, {args.ranks} ranks, {trainings}")
    start = time.perf_counter()
    status = Console(stderr=True).status  # shown on terminals only
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with status("reading the data"):
            # the server imports modules meanwhile
            warm_context(trainer.__name__, *(DIGITS if args.data is None else ()))
            data = load(args.data)
        if (have := len(data.train_labels)) < args.batch:
            raise ValueError(f"--batch {args.batch}: larger than the training set of {have} images")
    except (OSError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    console.print(f"data: {data.note}", markup=False)
    alone = Task("lenet-demo", "sgd", NONE, args.ranks, ALONE_STEPS, args.lr / LR)
    alone = replace(alone, batch=args.batch // args.ranks, data=str(args.data or ""))
    with_codec = replace(alone, steps=args.steps, points=min(CURVE_POINTS, args.steps))
    tasks = [alone] + [
        replace(with_codec, method=codec, seed=seed)
        for seed, codec in itertools.product(range(args.seeds), args.codecs)
    ]
    try:
        results = {(task.method, task.seed): ranks for task, ranks, _ in run_all(tasks)}
    except RankFailed as error:
        print(f"demo: a rank failed: {error}", file=sys.stderr)
        return 1
    with status("predicting"):
        predicted = predict_steps(args.codecs, args.ranks, results[NONE, 0])
    report = summarise(args, data, results, predicted)
    report["wall_s"] = round(time.perf_counter() - start, 1)
    file, picture = args.out / "demo.json", args.out / "demo.png"
    save_json(file, **report)
    plots.write(picture, [(_title(report), partial(draw, report), plots.HEIGHT)])
    if args.phases:
        console.print(build_phases(report))
    console.print(build_table(report))
    console.print(f"wrote {file} and {picture} in {report['wall_s']:.0f} s")
    return 0


def predict_steps(
    codecs: Sequence[str], ranks: int, alone: Sequence[Result]
) -> dict[str, float | None]:
    """Return the seconds per step that the planner predicts for each codec, with each rank on a
    machine of its own. The codecs' seconds are measured here; `alone` are the ranks' results
    without an exchange.
    """
    methods = [method for name in codecs if (method := planned(name, ranks)) is not None]
    with using(native.tier(), threads=1):
        rates = calibrate(methods)
    link = parse_link(LINK)
    return {name: predict(name, alone, LeNet(), link, rates, ranks) for name in codecs}


def summarise(
    args: argparse.Namespace,
    data: ImageData,
    results: Mapping[tuple[str, int], Sequence[Result]],
    predicted: Mapping[str, float | None],
) -> dict[str, Any]:
    """Return the content of demo.json from the ranks' results, by codec and seed.

    Bytes are per step and rank (mean over ranks and seeds), seconds per step, accuracies in
    percent; spread is the standard deviation over seeds (0 for one seed).
    """
    codecs: dict[str, Any] = {}
    for codec in args.codecs:
        runs = [results[codec, seed] for seed in range(args.seeds)]
        firsts = [run[0] for run in runs]
        accuracies = [first["measure"] for first in firsts]
        sent = [fmean(one["total_nbytes"] for one in run) / args.steps for run in runs]
        ring = ring_bytes(firsts[0]["parameters"], args.ranks)
        phases = {
            phase: fmean(sum(first["phases"].get(key, 0.0) for key in keys) for first in firsts)
            for phase, keys in PHASES.items()
            if firsts[0]["phases"]
        }
        codecs[codec] = {
            "accuracy_mean": fmean(accuracies),
            "accuracy_spread": stdev(accuracies) if len(accuracies) > 1 else 0.0,
            "accuracies": accuracies,
            "bytes_sent_per_step": fmean(sent),
            "baseline_bytes_per_step": ring,
            "compression_ratio": ring / fmean(sent),
            "seconds_per_step": fmean(median(first["seconds"]) for first in firsts),
            "phase_seconds_per_step": phases,
            "curves": [
                [[step, step * nbytes, accuracy] for step, _, accuracy in first["curve"]]
                for first, nbytes in zip(firsts, sent, strict=True)
            ],
            "predicted_seconds_per_step": predicted[codec],
        }
    settings = {
        "model": "LeNet, 1256080 parameters",
        **{name: getattr(args, name) for name in ("ranks", "steps", "seeds", "batch", "lr")},
        "backend": "gloo",
        "threads_per_rank": len(cores_of(0, args.ranks)),
    }
    about = {"name": data.name, "note": data.note}
    return {"data": about, "settings": settings, "codecs": codecs}


def build_table(report: dict[str, Any]) -> Table:
    """Return the table of the demo, with one row for each codec."""
    several = report["settings"]["seeds"] > 1
    caption = (
        f"accuracy: mean{' ± standard deviation over the seeds' if several else ''}. sent: by each"
        f" rank. predicted: by the planner, for {report['settings']['ranks']} machines on a 1"
        " Gbit/s network, from what computing and codecs take here."
    )
    heads = ["\ncodec", "test\naccuracy %", "sent in a\nstep, kB", "fewer\nbytes"]
    heads += ["predicted step\nat 1 Gbit/s"]
    rows = [
        (
            name,
            f"{row['accuracy_mean']:.2f}" + f" ± {row['accuracy_spread']:.2f}" * several,
            f"{row['bytes_sent_per_step'] / 1e3:,.0f}",
            f"{row['compression_ratio']:.1f}x",
            f"{row['predicted_seconds_per_step'] * 1e3:.1f} ms",
        )
        for name, row in report["codecs"].items()
    ]
    return table(heads, rows, title=_title(report), caption=caption)


def build_phases(report: dict[str, Any]) -> Table:
    """Return the table of ``--phases``: measured milliseconds per step of each phase."""
    caption = (
        "Median of rank 0, over this machine's loopback, which is faster than most networks."
        " Phases run in threads of their own beside the backward pass."
    )
    rows = []
    for name, row in report["codecs"].items():
        phases = row["phase_seconds_per_step"]
        cells = [f"{phases[phase] * 1e3:.1f}" if phases else "-" for phase in PHASES]
        rows.append((name, f"{row['seconds_per_step'] * 1e3:.1f}", *cells))
    title = f"{_title(report)}: milliseconds a step"
    return table(("codec", "step", *PHASES), rows, title=title, caption=caption)


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


def _title(report: dict[str, Any]) -> str:
    settings = report["settings"]
    where = f"LeNet on {report['data']['name']}, {settings['ranks']} ranks"
    return f"{where}, {settings['steps']} steps, {_seeds(settings['seeds'])}"


def draw(report: dict[str, Any], figure: Any) -> None:
    """Draw test accuracy over the bytes sent by one rank: mean and range over seeds."""
    curves, ranges = {}, []
    for name, row in report["codecs"].items():
        points = list(zip(*row["curves"], strict=True))  # by step, each with all seeds
        megabytes = [fmean(nbytes for _, nbytes, _ in at) / 1e6 for at in points]
        scores = [[score for *_, score in at] for at in points]
        label = f"{name}: {row['accuracy_mean']:.1f} % after {megabytes[-1]:,.0f} MB"
        curves[label] = megabytes, [fmean(at) for at in scores]
        ranges.append(([min(at) for at in scores], [max(at) for at in scores]))
    axes = figure.subplots()
    label = "bytes sent by each rank so far (MB, log scale)"
    plots.lines(axes, curves, xscale="log", xlabel=label, ylabel="test accuracy (%)")
    for line, (low, high) in zip(list(axes.lines), ranges, strict=True):
        axes.fill_between(line.get_xdata(), low, high, color=line.get_color(), alpha=0.15)
