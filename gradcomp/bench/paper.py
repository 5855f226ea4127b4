"""Tables of the papers, made again: their model, data, schedule and batch, compressed beside fp32,
with several seeds.

A table is runs of `bench accuracy`; a program that was stopped continues where it was. What the
paper has measured is printed below what was measured here.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gradcomp.arguments import count
from gradcomp.bench.accuracy import run_and_show
from gradcomp.bench.options import Option, command_line
from gradcomp.bench.trainer import Task


class Table(NamedTuple):
    """Table of a paper; its runs are those of `bench accuracy` with SGD."""

    about: str
    workload: str
    methods: tuple[str, ...]
    workers: tuple[int, ...]
    steps: int
    published: str  # the paper's results, as text


TABLES = {
    "terngrad-lenet": Table(
        "LeNet on MNIST, 10,000 steps of 64 images, 2 and 4 workers",
        "lenet-terngrad",
        ("fp32", "terngrad"),
        (2, 4),
        10_000,
        "Wen et al. 2017 (TernGrad), read off a figure, within 0.03: baseline 99.20 %, TernGrad"
        " with 2 workers 99.22, with 4 workers 99.08",
    ),
    "ef-sign": Table(
        "a small ResNet on CIFAR-10, 1 bit with and without error feedback",
        "resnet",
        ("fp32", "onebit", "onebit:feedback=off"),
        (2,),
        1000,
        "Karimireddy et al. 2019 (EF-SignSGD), VGG-19 on CIFAR-10: SGD with momentum 93.38 %,"
        " scaled sign -1.31, error feedback -0.68",
    ),
}


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    names = "\n".join(f"  {name:<16}{table.about}" for name, table in TABLES.items())
    example = "python -m gradcomp.bench paper terngrad-lenet --data DIR"
    epilog = f"tables:\n{names}\n\nexample:\n  {example}"
    steps = "optimizer steps of each training (default: those of the table)"
    folder = "folder for runs.jsonl, TABLE.json and TABLE.png (default: paper-TABLE)"
    options: dict[str, Option] = {"steps": (count, "N", steps), "out": (Path, "DIR", folder)}
    out = command_line("paper", __doc__, epilog, options, ("seeds", "jobs"))
    out.add_argument("table", choices=TABLES, help="table to make again, listed below")
    text = "folder with mnist/ and cifar10_jpeg.npz"
    out.add_argument("--data", type=Path, required=True, metavar="DIR", help=text)
    return out.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run `python -m gradcomp.bench paper` with these arguments; return the exit status."""
    args = read_options(argv)
    table = TABLES[args.table]
    steps, folder = args.steps or table.steps, args.out or Path(f"paper-{args.table}")
    tasks = [
        Task(table.workload, "sgd", method, workers, steps, seed=seed)
        for seed, workers, method in itertools.product(
            range(args.seeds), table.workers, table.methods
        )
    ]
    given = {"table": args.table, "steps": steps, "seeds": args.seeds}
    file = folder / f"{args.table}.json"
    status = run_and_show("paper", tasks, args.data, file, args.jobs, given)
    if status == 0:
        print(f"published: {table.published}")
    return status
