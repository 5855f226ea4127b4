"""Hold predicted steps against measured ones: LeNet, `GradientAverager`, 2 and 4 ranks here, behind links of three speeds.

Predictions are made of measured parts only (`gradcomp.bench.cluster`): computing, codecs, collectives over loopback. The slow
links are `gradcomp.comm.LinkCommunicator`'s, their rates what it is told.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

import gradcomp
from gradcomp.bench.cluster import BATCH, TIMEOUT_S, Measured, gather, measure, strategy_method
from gradcomp.bench.models import LeNet
from gradcomp.bench.ranks import Emit, run_ranks
from gradcomp.codecs import Codec
from gradcomp.comm import Communicator, LinkCommunicator, TorchCommunicator
from gradcomp.plan.links import Link, format_seconds
from gradcomp.plan.models import find_model
from gradcomp.plan.simulate import simulate

LINKS = {"loopback": Link(math.inf), "1 Gbit/s": Link(1e9), "100 Mbit/s": Link(1e8)}
WORLD_SIZES = (2, 4)
GOAL = 0.2
WARM_UP = 3
STEPS = 30


@dataclass(frozen=True)
class Comparison:
    """One row: seconds a step, predicted and measured."""

    ranks: int
    link: str
    codec: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def codecs() -> dict[str, Codec]:
    """Return the codecs that are compared, by name."""
    return {"fp32": gradcomp.Identity(), "ternary": gradcomp.Ternary(), "onebit": gradcomp.OneBit()}


def validate(console: Console) -> list[Comparison]:
    """Measure, predict and train, print the comparison, and return its rows."""
    rows: list[Comparison] = []
    for ranks in WORLD_SIZES:
        run_ranks(ranks, _validate_rank, on_message=rows.append)
    console.print(build_table(rows))
    off = max(abs(row.error) for row in rows)
    within = sum(abs(row.error) <= GOAL for row in rows)
    console.print(f"{within} of {len(rows)} rows within {GOAL:.0%}; the largest error is {off:.0%}.", highlight=False)
    return rows


def build_table(rows: list[Comparison]) -> Table:
    """Return the rows as a table."""
    table = Table(title="a step of LeNet: predicted and measured", box=box.SIMPLE_HEAD)
    for name in ("ranks", "link", "codec", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name in ("link", "codec") else "right", no_wrap=True)
    for row in rows:
        color = "green" if abs(row.error) <= GOAL else "red"
        times = (format_seconds(row.predicted), format_seconds(row.measured))
        table.add_row(str(row.ranks), row.link, row.codec, *times, f"[{color}]{row.error:+.0%}[/{color}]")
    return table


def _validate_rank(rank: int, emit: Emit) -> None:
    comm = TorchCommunicator(timeout_s=TIMEOUT_S)
    n = comm.world_size
    methods = {name: strategy_method(name, codec, n) for name, codec in codecs().items()}
    found = measure(comm, list(methods.values()))
    work = found.workload(find_model("LeNet"), averager=True)
    predictions = {
        (name, where): simulate(
            work, method, n, link, rates=found.rates, cores=found.cores, transport=found.transport
        ).seconds
        for where, link in LINKS.items()
        for name, method in methods.items()
    }
    for where, link in LINKS.items():
        for name, codec in codecs().items():
            steps = max(4, min(STEPS, int(4 / predictions[name, where])))
            seconds = train(comm, codec, link, steps)
            if rank == 0:
                emit(Comparison(n, where, name, predictions[name, where], seconds))
    comm.close()


def train(comm: Communicator, codec: Codec, link: Link, steps: int) -> float:
    """Return the seconds of a step: the median over steps of the mean over ranks, after a warm-up. Collective."""
    torch.manual_seed(0)
    model = LeNet()
    own: Communicator = TorchCommunicator(timeout_s=TIMEOUT_S)
    if math.isfinite(link.bits_per_s):
        own = LinkCommunicator(own, bits_per_s=link.bits_per_s, latency_s=link.latency_s)
    averager = gradcomp.GradientAverager(model.named_parameters(), codec, own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    seen = []
    for _ in range(WARM_UP + steps):
        begun = time.perf_counter()
        optimizer.zero_grad()
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(images), labels))
        averager.average()
        optimizer.step()
        seen.append(time.perf_counter() - begun)
    averager.close()
    own.close()
    return float(np.median(np.mean(gather(comm, seen[WARM_UP:]), axis=0)))


def describe(found: Measured) -> list[str]:
    """Return the measurement in words, a line each."""
    lines = [
        f"{found.ranks} ranks at once, {found.cores:g} cores each, {found.batch} samples a rank and step",
        f"LeNet: {format_seconds(found.t_frame)} a sample ({found.forward_share:.0%} of it forward), "
        + f"update {format_seconds(found.t_update)}",
    ]
    for kind, alpha in found.transport.alpha_s.items():
        beta = found.transport.beta_s[kind]
        rate = "no time a byte" if beta == 0 else f"{1e-9 / beta:.3g} GB/s"
        lines.append(f"{kind}: {format_seconds(alpha)} and {rate}")
    return lines
