"""What compression costs in accuracy: methods x optimizers x workloads, against fp32 and bf16, with
several seeds.

N ranks share a core and talk over loopback, so nothing but the time differs from a cluster. Every
tensor is compressed, however small, unless a method says otherwise.
Every finished run is a line of a file, and a program that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gradcomp.arguments import Parser
from gradcomp.bench import plots
from gradcomp.bench.about import save_json
from gradcomp.bench.accuracy.report import WITHIN, draw_curves, longest, summarize, tables
from gradcomp.bench.accuracy.run import Job, run_all
from gradcomp.bench.methods import DEFAULT, parse
from gradcomp.bench.optimizers import OPTIMIZERS
from gradcomp.bench.options import add_option
from gradcomp.bench.train import GRAMMAR
from gradcomp.bench.workloads import WORKLOADS, Workload

EPILOG = f"""{GRAMMAR}
examples:
  python -m gradcomp.bench accuracy --data DIR --workloads gpt-1m --optimizers adamw --seeds 3
  python -m gradcomp.bench accuracy --data DIR --methods fp32 terngrad onebit --factors 0.5 1 2
"""


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    out = Parser(
        prog="python -m gradcomp.bench accuracy",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument(
        "--data",
        type=Path,
        required=True,
        help="folder with prose.txt.gz, fashion-mnist/ and cifar10_jpeg.npz",
    )
    out.add_argument(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        default=["gpt-1m"],
        help="models and data to train (default: gpt-1m)",
    )
    out.add_argument(
        "--optimizers",
        nargs="+",
        choices=OPTIMIZERS,
        default=["adamw"],
        help="optimizers to train with (default: adamw)",
    )
    out.add_argument(
        "--methods",
        nargs="+",
        default=list(DEFAULT),
        metavar="METHOD",
        help=f"ways of exchanging gradients, listed below (default: {' '.join(DEFAULT)})",
    )
    out.add_argument(
        "--workers",
        nargs="+",
        type=int,
        default=[4],
        metavar="N",
        help="numbers of workers that average their gradients (default: 4)",
    )
    out.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="optimizer steps of each training (default: those of the workload)",
    )
    out.add_argument(
        "--batch",
        type=int,
        default=0,
        metavar="N",
        help="samples in the minibatch of each worker (default: those of the workload)",
    )
    add_option(out, "seeds")
    out.add_argument(
        "--factors",
        nargs="+",
        type=float,
        default=[1.0],
        metavar="X",
        help=(
            "factors of the workload's learning rate, a usual one for fp32 and not tuned"
            " (default: 1)"
        ),
    )
    out.add_argument(
        "--within",
        type=float,
        default=WITHIN,
        metavar="X",
        help=(
            "largest loss over fp32 at every step, in nats or points, for which the largest "
            f"number of local steps is printed (default: {WITHIN})"
        ),
    )
    add_option(out, "jobs")
    text = "folder for runs.jsonl, accuracy.json and accuracy.png (default: %(default)s)"
    add_option(out, "out", default=Path("accuracy"), help=text)
    return out


def main(argv: list[str]) -> int:
    """Run `python -m gradcomp.bench accuracy` with these words; return the exit status."""
    arguments = parser()
    args = arguments.parse_args(argv)
    try:
        for method in args.methods:
            parse(method)
        names = list(dict.fromkeys(args.workloads))
        workloads = {name: WORKLOADS[name](args.data) for name in names}
    except (ValueError, FileNotFoundError) as error:
        print(f"gradcomp.bench accuracy: {error}", file=sys.stderr)
        return 2
    grid = itertools.product(
        range(args.seeds), names, args.optimizers, args.workers, args.methods, args.factors
    )
    jobs = [
        Job(
            name,
            optimizer,
            method,
            workers,
            args.steps or workloads[name].settings.steps,
            factor,
            seed,
            args.batch,
        )
        for seed, name, optimizer, workers, method, factor in grid
    ]
    try:
        for job in jobs:
            settings = workloads[job.workload].settings
            settings.batch_of(job.workers)
            if job.optimizer not in settings.rates:
                raise ValueError(
                    f"{job.workload} has no rate for {job.optimizer}; it has"
                    f" {', '.join(settings.rates)}"
                )
    except ValueError as error:
        print(f"gradcomp.bench accuracy: {error}", file=sys.stderr)
        return 2
    given = {
        name: value for name, value in vars(args).items() if name not in ("data", "out", "jobs")
    }
    run_and_show(jobs, workloads, args.data, args.out / "accuracy.json", args.jobs, given)
    return 0


def run_and_show(
    jobs: list[Job],
    workloads: dict[str, Workload],
    data: Path,
    file: Path,
    processes: int,
    arguments: dict[str, Any],
) -> list[dict[str, Any]]:
    """Run what is not in ``runs.jsonl`` beside `file` yet, with a bar; print tables, write `file`
    and its picture, return the rows.

    Args:
        jobs: what to run.
        workloads: by name, those of `jobs`.
        data: their folder.
        file: NAME.json; its folder is made.
        processes: runs at a time.
        arguments: for the head of the file.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        steps = dict.fromkeys(jobs, 0)
        bar = progress.add_task("steps of all runs", total=sum(job.steps for job in jobs))

        def on_step(job: Job, step: int) -> None:
            progress.advance(bar, step - steps[job])
            steps[job] = step
            last = f"{job.method} {job.workload} {job.optimizer}, seed {job.seed}"
            progress.update(
                bar,
                description=(
                    f"{sum(s == j.steps for j, s in steps.items())}/{len(jobs)} runs; {last}"
                ),
            )

        results = run_all(jobs, data, file.parent / "runs.jsonl", processes, on_step)
    rows = summarize(results)
    measures = {name: workload.measure for name, workload in workloads.items()}
    save_json(file, benchmark="accuracy", arguments=arguments, measures=measures, rows=rows)
    found = tables(rows, measures)
    panels = [(title, partial(draw_curves, here), plots.HEIGHT) for title, here, _ in found]
    plots.write(file.with_suffix(".png"), panels)
    console = Console()
    for title, _, table in found:
        console.print(title, table, sep="\n", highlight=False)
    for line in longest(rows, workloads, arguments.get("within", WITHIN)):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"wrote {file}, {file.with_suffix('.png')}")
    return rows
