"""What the planner says of the steps that the bench has measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from torch import nn

from gradcomp.bench.accuracy.methods import METHODS as CODECS
from gradcomp.bench.train.methods import OVER_MPI, codec_of, is_local, local_of
from gradcomp.exchange.sizing import choose
from gradcomp.plan.costs import LocalSteps, Method, find_method, plan_buckets
from gradcomp.plan.links import Link
from gradcomp.plan.rates import Rates
from gradcomp.plan.simulate import simulate
from gradcomp.plan.workload import Transport, Workload


def planned(name: str, world_size: int, *, over_mpi: bool = False) -> Method | None:
    """Return a method of the bench as the planner has it; None for what it does not know."""
    word = name.partition(":")[0]
    if over_mpi and name in OVER_MPI:
        strategy = choose(OVER_MPI[name], world_size)
        return Method(
            f"{name} {strategy}", OVER_MPI[name], strategy.exchange, strategy.second_phase
        )
    if word in ("fp32", "bf16"):
        return find_method(word)
    if is_local(name):
        codec, numbers = local_of(name)
        if numbers.pop("start_step", 0):
            return None  # two kinds of steps
        strategy = choose(codec, world_size, "auto")
        numbers["every"] = numbers.pop("sync_every")
        return Method(
            f"{codec.name} {strategy}", codec, strategy.exchange, strategy.second_phase
        ).after(LocalSteps(**numbers))
    if word not in CODECS:
        return None
    method, double = codec_of(name)
    if method.codec is None or method.options.get("precondition") or method.momentum or double:
        return None
    strategy = choose(method.codec, world_size, method.options.get("exchange", "auto"))
    return Method(f"{name} {strategy}", method.codec, strategy.exchange, strategy.second_phase)


def largest_bucket(model: nn.Module, ranks: int) -> int:
    """Return the values of DDP's largest bucket."""
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    return max(bucket.numel for bucket in plan_buckets(find_method("fp32"), shapes, ranks))


def predict(
    name: str,
    model: nn.Module,
    alone: Sequence[dict[str, Any]],
    link: Link,
    rates: Rates,
    transport: Transport,
    cores: int,
    ranks: int,
    *,
    over_mpi: bool = False,
) -> float | None:
    """Return the seconds of a step that the planner expects; None: it does not know the method.

    Args:
        name: of the method.
        model: what is trained.
        alone: results of the ranks without an exchange: under DDP, but for local steps.
        link: of every host.
        rates, transport: what codecs and moving bytes cost without a link.
        cores: of a host.
        ranks: how many.
        over_mpi: whether codecs' bytes go over MPI.
    """
    method = planned(name, ranks, over_mpi=over_mpi)
    if method is None:
        return None
    step = max(statistics.median(one["seconds"]) for one in alone)
    update = max(statistics.median(one["update_seconds"]) for one in alone)
    work = Workload(
        tuple((name, tuple(p.shape)) for name, p in model.named_parameters()),
        minibatch=1.0,
        t_frame=max(0.0, step - update),
        t_update=update,
        weak=True,
    )
    return simulate(
        work, method, ranks, link, rates=rates, cores=cores, transport=transport
    ).seconds
