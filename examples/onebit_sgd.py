r"""The 1-bit SGD system of 2014, put together: what each of its parts does to accuracy, bytes and
time, in one table.

    python -m gradcomp.launch -n 2 --torch examples/onebit_sgd.py
    torchrun --nproc-per-node 2 examples/onebit_sgd.py --data DIR --epochs 1 --link 1gbit \
        --json table.json

Rows: fp32; 1-bit gradients; double buffering on top; on top of both AdaGrad in each of its three
places; and the whole system, where AdaGrad on the aggregate is joined by a search for the minibatch
size. All but the first begin with a warm-up in fp32. Every rank of a row sees the same samples
in the same order as in the other rows of that seed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import cross_entropy

import gradcomp
from gradcomp.bench.about import table
from gradcomp.bench.data import ImageData, load
from gradcomp.bench.models import LeNet
from gradcomp.comm import LinkCommunicator, TorchCommunicator
from gradcomp.onebit_sgd import (
    AggregateAdagrad,
    DoubleBuffer,
    LocalAdagrad,
    MomentumAdagrad,
    find_batch_size,
)
from gradcomp.plan.links import parse_link

MINIBATCH = 64  # samples of all ranks together, at first
WARM_START = 0.1  # share of the samples that train in fp32
LR, MOMENTUM, WEIGHT_DECAY = 0.03, 0.9, 5e-4
ADAGRAD_LR = 0.003  # once gradients are divided by AdaGrad
ACCUMULATOR = 1e-4  # AdaGrad's sums of squares at first: with 0 each weight's first change is lr


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: its first column.
        codec: of the gradients.
        halves: double buffering.
        adagrad: "", "local", "aggregate" or "momentum".
        searches: look for a larger minibatch on the way.
    """

    name: str
    codec: str = "onebit"
    halves: bool = True
    adagrad: str = ""
    searches: bool = False


ROWS = [
    Row("fp32", "fp32", halves=False),
    Row("+ 1-bit", halves=False),
    Row("+ double buffering"),
    Row("+ AdaGrad after momentum", adagrad="momentum"),
    Row("+ AdaGrad before encoding", adagrad="local"),
    Row("+ AdaGrad on the aggregate", adagrad="aggregate"),
    Row("+ the same, minibatch search", adagrad="aggregate", searches=True),
]


class Samples:
    """A training set in an order that the seed decides; positions count on through the epochs."""

    def __init__(self, data: ImageData, seed: int) -> None:
        self._data, self._seed = data, seed
        self._orders: dict[int, Tensor] = {}

    def batch(self, first: int, minibatch: int) -> tuple[Tensor, Tensor]:
        """Return this rank's images and labels of the minibatch that begins at position `first`."""
        positions = torch.arange(first + dist.get_rank(), first + minibatch, dist.get_world_size())
        count = len(self._data.train_labels)
        chosen = torch.stack([self._order(int(p) // count)[int(p) % count] for p in positions])
        return self._data.train_images[chosen], self._data.train_labels[chosen]

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(1000 * self._seed + epoch)
            self._orders[epoch] = torch.randperm(len(self._data.train_labels), generator=generator)
        return self._orders[epoch]


class Averaged:
    """A training step without double buffering, with the methods of `DoubleBuffer` that `train`
    uses.
    """

    def __init__(self, model, optimizer, codec, **options):
        self._optimizer = optimizer
        self._averager = gradcomp.GradientAverager(model.named_parameters(), codec, **options)
        self.stats, self.check_replicas = self._averager.stats, self._averager.check_replicas
        self.close = self._averager.close

    def step(self, loss_fn, *batch: Tensor) -> Tensor:
        """Train on one minibatch."""
        self._optimizer.zero_grad()
        loss = loss_fn(*batch)
        loss.backward()
        self._averager.average()
        self._optimizer.step()
        return loss.detach()


@dataclass
class Result:
    """What one run of one row gave."""

    accuracy: float
    seconds: float
    nbytes: float  # sent by rank 0 in a minibatch, once compression was on
    hidden: float
    minibatch: int  # at the end


def train(row: Row, seed: int, args: argparse.Namespace, data: ImageData, on_sample) -> Result:
    """Train one row once."""
    torch.manual_seed(seed)
    model, samples = LeNet(), Samples(data, seed)
    total = args.epochs * len(data.train_labels)
    warm = int(WARM_START * total) if row.codec != "fp32" else 0
    comm, link = TorchCommunicator(), args.link
    if link:
        comm = LinkCommunicator(comm, bits_per_s=link.bits_per_s, latency_s=link.latency_s)
    per_exchange = MINIBATCH // (2 if row.halves else 1)
    first = {"initial_accumulator_value": ACCUMULATOR}
    transforms = {"local": LocalAdagrad(**first), "aggregate": AggregateAdagrad(**first)}
    options = {
        "warmup_steps": math.ceil(warm / per_exchange),
        "advanced": gradcomp.Advanced(transform=transforms.get(row.adagrad)),
    }
    if row.adagrad == "momentum":
        optimizer = MomentumAdagrad(
            model.parameters(), ADAGRAD_LR, MOMENTUM, weight_decay=WEIGHT_DECAY, **first
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY)
    codec = gradcomp.Identity() if row.codec == "fp32" else gradcomp.OneBit()
    trainer = (DoubleBuffer if row.halves else Averaged)(
        model, optimizer, codec, comm=comm, **options
    )

    def loss_fn(images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model(images), labels)

    def trial(minibatch: int, count: int):
        for first in range(seen, seen + count - minibatch + 1, minibatch):
            yield trainer.step(loss_fn, *samples.batch(first, minibatch))

    minibatch, seen, seconds, searched, factor = MINIBATCH, 0, 0.0, 0, 1.0
    packed: list[int] = []  # bytes sent in each minibatch after the warm-up
    while seen + minibatch <= total:
        if row.adagrad == "momentum":
            rate = ADAGRAD_LR
        elif row.adagrad and seen >= warm:
            # AdaGrad's gradients are of size 1: momentum adds them up to 1 / (1 - MOMENTUM)
            rate = ADAGRAD_LR * (1 - MOMENTUM)
        else:
            rate = LR
        # TernGrad's schedule
        optimizer.param_groups[0]["lr"] = factor * rate * (1 - seen / total) ** 0.5
        begun = time.perf_counter()
        if row.searches and seen >= warm and searched < 2 and seen >= searched * total // 2:
            share = max(args.search_samples, 4 * minibatch)
            searched += 1
            choice = find_batch_size(
                trial,
                model=model,
                optimizer=optimizer,
                state=trainer,
                samples=share,
                current=minibatch,
                smallest=minibatch,
                multiple=MINIBATCH // 4,
                progress=False,
            )
            minibatch, factor = choice.minibatch, factor * choice.trial.lr_factor
        before = trainer.stats.bytes_sent
        trainer.step(loss_fn, *samples.batch(seen, minibatch))
        seconds += time.perf_counter() - begun
        seen += minibatch
        if seen - minibatch >= warm:
            packed.append(trainer.stats.bytes_sent - before)
        on_sample(seen)
    trainer.check_replicas()
    hidden = trainer.report().hidden if row.halves else 0.0
    trainer.close()
    return Result(accuracy(model, data), seconds, statistics.fmean(packed), hidden, minibatch)


def accuracy(model: torch.nn.Module, data: ImageData) -> float:
    """Return the percentage of test images that the model gets right; every rank takes its
    share.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(images) for images in data.test_images[rank::world].split(500)])
    right = (scores.argmax(dim=1) == data.test_labels[rank::world]).sum()
    dist.all_reduce(right)
    return 100.0 * int(right) / len(data.test_labels)


def show(results: dict[str, list[Result]], seeds: int) -> None:
    """Print the table."""
    heads = ["", "test accuracy, %", "training, s", "sent a minibatch, kB", "hidden, %"]
    rows = []
    for name, runs in results.items():
        spread = statistics.stdev([r.accuracy for r in runs]) if len(runs) > 1 else 0.0
        sizes = [str(r.minibatch) for r in runs]
        row = (
            name,
            f"{statistics.fmean(r.accuracy for r in runs):.2f} ± {spread:.2f}",
            f"{statistics.fmean(r.seconds for r in runs):.1f}",
            f"{statistics.fmean(r.nbytes for r in runs) / 1e3:,.1f}",
            f"{100 * statistics.fmean(r.hidden for r in runs):.0f}" if runs[0].hidden else "-",
            ", ".join(sizes) if len(set(sizes)) > 1 else sizes[0],
        )
        rows.append(row)
    title = f"mean and standard deviation of {seeds} seeds"
    Console(width=120).print(table([*heads, "minibatch"], rows, title=title))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of MNIST's IDX files (default: scikit-learn's digits)",
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--search-samples",
        type=int,
        default=4096,
        help="samples of a trial of a minibatch (4096)",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--rows",
        type=int,
        nargs="*",
        metavar="N",
        choices=range(len(ROWS)),
        help=(
            "only these rows, from 0: fp32, 1-bit, double buffering, AdaGrad after momentum, before"
            " encoding, on the aggregate, with a search (all)"
        ),
    )
    parser.add_argument(
        "--link", metavar="RATE", help="emulate a slow link between the ranks: 100mbit, 1gbit, ..."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run's figures")
    args = parser.parse_args()

    try:
        args.link = parse_link(args.link) if args.link else None
    except ValueError as error:
        parser.error(str(error))
    if "RANK" not in os.environ:
        parser.error(
            "start it with several ranks: python -m gradcomp.launch -n 2 --torch"
            " examples/onebit_sgd.py"
        )
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = load(args.data)
    rows = ROWS if args.rows is None else [ROWS[number] for number in args.rows]
    results: dict[str, list[Result]] = {row.name: [] for row in rows}
    total = args.epochs * len(data.train_labels)
    with Progress(disable=rank != 0, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=args.seeds * len(rows) * total)
        for seed in range(args.seeds):
            for number, row in enumerate(rows):
                progress.update(bar, description=f"seed {seed}: {row.name.strip()}")
                done = (seed * len(rows) + number) * total
                run = train(
                    row,
                    seed,
                    args,
                    data,
                    lambda seen, done=done: progress.update(bar, completed=done + seen),
                )
                results[row.name].append(run)
    if rank == 0:
        show(results, args.seeds)
        if args.json:
            args.json.write_text(
                json.dumps({n: [vars(r) for r in runs] for n, runs in results.items()}, indent=1)
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
