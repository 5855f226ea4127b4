"""Hold predicted steps against measured ones: LeNet, `GradientAverager`, 2 and 4 ranks here, behind
links of three speeds.

Predictions are made of measured parts only (`gradcomp.bench.cluster`): computing, codecs,
collectives over loopback. The slow links are `gradcomp.comm.LinkCommunicator`'s, their rates what
it is told.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

import gradcomp
from gradcomp.bench.cluster import (
    TIMEOUT_S,
    Measured,
    Training,
    barrier,
    computing,
    gather,
    measure,
    strategy_method,
)
from gradcomp.bench.ranks import Emit, run_ranks
from gradcomp.codecs import Codec
from gradcomp.comm import Communicator, LinkCommunicator, TorchCommunicator
from gradcomp.plan.costs import Method
from gradcomp.plan.links import Link, format_seconds
from gradcomp.plan.models import find_model
from gradcomp.plan.step import simulate

LINKS = {"loopback": Link(math.inf), "1 Gbit/s": Link(1e9), "100 Mbit/s": Link(1e8)}
WORLD_SIZES = (2, 4)
GOAL = 0.2
WARM_UP = 3
STEPS = 25
SECONDS = 3.0  # of a row, about


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
    return {
        "fp32": gradcomp.Identity(),
        "terngrad": gradcomp.TernGrad(),
        "onebit": gradcomp.OneBit(),
    }


def validate(console: Console) -> list[Comparison]:
    """Measure, predict and train, print the comparison, and return its rows."""
    rows: list[Comparison] = []
    for ranks in WORLD_SIZES:
        run_ranks(ranks, _validate_rank, on_message=rows.append)
    console.print(build_table(rows))
    off = max(abs(row.error) for row in rows)
    within = sum(abs(row.error) <= GOAL for row in rows)
    console.print(
        f"{within} of {len(rows)} rows within {GOAL:.0%}; the largest error is {off:.0%}.",
        highlight=False,
    )
    return rows


def build_table(rows: list[Comparison]) -> Table:
    """Return the rows as a table."""
    table = Table(title="a step of LeNet: predicted and measured", box=box.SIMPLE_HEAD)
    for name in ("ranks", "link", "codec", "predicted", "measured", "error"):
        table.add_column(
            name, justify="left" if name in ("link", "codec") else "right", no_wrap=True
        )
    for row in rows:
        color = "green" if abs(row.error) <= GOAL else "red"
        times = (format_seconds(row.predicted), format_seconds(row.measured))
        table.add_row(
            str(row.ranks), row.link, row.codec, *times, f"[{color}]{row.error:+.0%}[/{color}]"
        )
    return table


def _validate_rank(rank: int, emit: Emit) -> None:
    comm = TorchCommunicator(timeout_s=TIMEOUT_S)
    n = comm.world_size
    methods = {name: strategy_method(name, codec, n) for name, codec in codecs().items()}
    found = measure(comm, list(methods.values()))
    for where, link in LINKS.items():
        for name, method in methods.items():
            steps = max(4, min(STEPS, int(SECONDS / predict(found, method, link))))
            seconds, parts = train(comm, codecs()[name], link, steps)
            # other programs on this machine come and go, so computing is measured between the steps
            # that it predicts
            predicted = predict(replace(found, **computing(comm, parts)), method, link)
            if rank == 0:
                emit(Comparison(n, where, name, predicted, seconds))
    comm.close()


def predict(found: Measured, method: Method, link: Link) -> float:
    """Return the seconds of a step on the ranks that were measured."""
    work = found.workload(find_model("LeNet"), averager=True)
    options = {"rates": found.rates, "cores": found.cores, "transport": found.transport}
    return simulate(work, method, found.ranks, link, **options).seconds  # type: ignore[arg-type]


def train(
    comm: Communicator, codec: Codec, link: Link, steps: int
) -> tuple[float, list[list[float]]]:
    """Train with an exchange in every other step. Collective.

    Args:
        comm: the ranks, for keeping in step.
        codec: averages gradients.
        link: they travel over.
        steps: to take of either kind.

    Returns:
        Seconds of a step with an exchange (the median over steps of the mean over ranks), and the
        parts of this rank's steps without one, as `gradcomp.bench.cluster.Training.time_parts`
        returns them.
    """
    training = Training(0)
    own: Communicator = TorchCommunicator(timeout_s=TIMEOUT_S)
    if math.isfinite(link.bits_per_s):
        own = LinkCommunicator(own, bits_per_s=link.bits_per_s, latency_s=link.latency_s)
    averager = gradcomp.GradientAverager(training.model.named_parameters(), codec, own)
    seen, parts = [], []
    for _ in range(WARM_UP + steps):
        barrier(comm)
        parts.append(training.time_parts())
        barrier(comm)
        begun = time.perf_counter()
        torch.autograd.backward(training.forward())
        averager.average()
        training.optimizer.step()
        seen.append(time.perf_counter() - begun)
    averager.close()
    own.close()
    return float(np.median(np.mean(gather(comm, seen[WARM_UP:]), axis=0))), parts[WARM_UP:]


def describe(found: Measured) -> list[str]:
    """Return the measurement in words, a line each."""
    lines = [
        (
            f"{found.ranks} ranks at once, {found.cores:g} cores each, {found.batch} samples a rank"
            " and step"
        ),
        f"LeNet: {format_seconds(found.t_frame)} a sample ({found.forward_share:.0%} of it"
        " forward), "
        + f"update {format_seconds(found.t_update)}, AdaGrad {format_seconds(found.t_post)} over"
        " all ranks together",
    ]
    for kind, alpha in found.transport.alpha_s.items():
        beta = found.transport.beta_s[kind]
        rate = "no time a byte" if beta == 0 else f"{1e-9 / beta:.3g} GB/s"
        lines.append(f"{kind}: {format_seconds(alpha)} and {rate}")
    return lines
