"""Tables of the papers, made again: their model, data, schedule and batch, compressed beside fp32,
with several seeds.

A table is runs of `bench accuracy`; a program that was stopped continues where it was. What the
paper has measured is printed below what was measured here.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from gradcomp.arguments import Parser
from gradcomp.bench.accuracy import run_and_show
from gradcomp.bench.options import Option, add_options
from gradcomp.bench.trainer import Task


class Table(NamedTuple):
    """One of a paper's tables.

    Attributes:
        about: its subject, in a line.
        workload, optimizer, methods, workers, steps: of the runs, as `bench accuracy` has them.
        published: what the paper has measured.
    """

    about: str
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
    names = "\n".join(f"  {name:<16}{table.about}" for name, table in TABLES.items())
    example = "python -m gradcomp.bench paper terngrad-lenet --data DIR"
    epilog = f"tables:\n{names}\n\nexample:\n  {example}"
    out = Parser(prog="python -m gradcomp.bench paper", description=__doc__, epilog=epilog)
    out.add_argument("table", choices=TABLES, help="table to make again, listed below")
    text = "folder with mnist/ and cifar10_jpeg.npz"
    out.add_argument("--data", type=Path, required=True, metavar="DIR", help=text)
    steps = "optimizer steps of each training (default: those of the table)"
    folder = "folder for runs.jsonl, TABLE.json and TABLE.png (default: paper-TABLE)"
    options: dict[str, Option] = {"steps": (int, "N", steps), "out": (Path, "DIR", folder)}
    add_options(out, options, ("seeds", "jobs"))
    return out


def tasks_of(table: Table, steps: int, seeds: int) -> list[Task]:
    """Return the runs of a table."""
    return [
        Task(table.workload, table.optimizer, method, workers, steps, seed=seed)
        for seed in range(seeds)
        for workers in table.workers
        for method in table.methods
    ]


def main(argv: list[str]) -> int:
    """Run `python -m gradcomp.bench paper` with these words; return the exit status."""
    args = parser().parse_args(argv)
    table = TABLES[args.table]
    steps, folder = args.steps or table.steps, args.out or Path(f"paper-{args.table}")
    tasks = tasks_of(table, steps, args.seeds)
    given = {"table": args.table, "steps": steps, "seeds": args.seeds}
    file = folder / f"{args.table}.json"
    status = run_and_show("paper", tasks, args.data, file, args.jobs, given)
    if status == 0:
        print(f"published: {table.published}")
    return status
