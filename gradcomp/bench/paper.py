"""Tables of the papers, made again: their model, data, schedule and batch, compressed beside fp32,
with several seeds.

A table is runs of `bench accuracy`, one after the other or side by side; a program that was stopped
goes on where it was. What the paper has measured is printed below what was measured here.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from gradcomp.arguments import Parser
from gradcomp.bench.accuracy import run_and_show
from gradcomp.bench.accuracy.run import Job
from gradcomp.bench.options import add_option
from gradcomp.bench.workloads import WORKLOADS


@dataclass(frozen=True)
class Table:
    """One of a paper's tables.

    Attributes:
        says: what it is about, in a line.
        workload, optimizer, methods, workers, steps: of the runs, as `bench accuracy` has them.
        published: what the paper has measured.
    """

    says: str
    workload: str
    optimizer: str
    methods: tuple[str, ...]
    workers: tuple[int, ...]
    steps: int
    published: str


TABLES = {
    "terngrad-lenet": Table(
        "LeNet on MNIST, 10,000 steps of 64 images, 2 and 4 workers",
        "lenet-terngrad",
        "sgd",
        ("fp32", "terngrad"),
        (2, 4),
        10_000,
        "Wen et al. 2017 (TernGrad), read off a figure, within 0.03: baseline 99.20 %, TernGrad"
        " with 2 workers 99.22, with 4 workers 99.08",
    ),
    "ef-sign": Table(
        "a small ResNet on CIFAR-10, 1 bit with and without error feedback",
        "resnet",
        "sgd",
        ("fp32", "onebit", "onebit:feedback=off"),
        (2,),
        1000,
        "Karimireddy et al. 2019 (EF-SignSGD), VGG-19 on CIFAR-10: SGD with momentum 93.38 %,"
        " scaled sign -1.31, error feedback -0.68",
    ),
}


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    names = "\n".join(f"  {name:<16}{table.says}" for name, table in TABLES.items())
    out = Parser(
        prog="python -m gradcomp.bench paper",
        description=__doc__,
        epilog=(
            f"tables:\n{names}\n\nexample:\n  python -m gradcomp.bench paper terngrad-lenet --data"
            " DIR"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument(
        "table",
        choices=TABLES,
        help="table to make again; the names are listed below",
    )
    out.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder with mnist/ and cifar10_jpeg.npz",
    )
    out.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="optimizer steps of each training (default: those of the table)",
    )
    add_option(out, "seeds")
    add_option(out, "jobs")
    text = "folder for runs.jsonl, TABLE.json and TABLE.png (default: paper-TABLE)"
    add_option(out, "out", help=text)
    return out


def jobs_of(table: Table, steps: int | None, seeds: int) -> list[Job]:
    """Return the runs of a table."""
    return [
        Job(table.workload, table.optimizer, method, workers, steps or table.steps, 1.0, seed)
        for seed in range(seeds)
        for workers in table.workers
        for method in table.methods
    ]


def main(argv: list[str]) -> int:
    """Run `python -m gradcomp.bench paper` with these words; return the exit status."""
    args = parser().parse_args(argv)
    table = TABLES[args.table]
    try:
        workload = WORKLOADS[table.workload](args.data)
    except (ValueError, FileNotFoundError) as error:
        print(f"gradcomp.bench paper: {error}", file=sys.stderr)
        return 2
    out = args.out or Path(f"paper-{args.table}")
    given = {"table": args.table, "steps": args.steps or table.steps, "seeds": args.seeds}
    run_and_show(
        jobs_of(table, args.steps, args.seeds),
        {table.workload: workload},
        args.data,
        out / f"{args.table}.json",
        args.jobs,
        given,
    )
    print(f"published: {table.published}")
    return 0
