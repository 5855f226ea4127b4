"""What the planner says of the steps that the bench has measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from torch import nn

from gradcomp.bench.methods import OVER_MPI, parse
from gradcomp.exchange.sizing import choose
from gradcomp.plan.costs import LocalSteps, Method, find_method, plan_buckets
from gradcomp.plan.links import Link
from gradcomp.plan.rates import Rates
from gradcomp.plan.step import simulate
from gradcomp.plan.workload import Transport, Workload


def planned(name: str, world_size: int, *, over_mpi: bool = False) -> Method | None:
    """Return a method of the bench as the planner has it; None for what it does not know."""
    if over_mpi and name in OVER_MPI:
        plain = OVER_MPI[name]
        strategy = choose(plain, world_size)
        return Method(f"{name} {strategy}", plain, strategy.exchange, strategy.second_phase)
    if name in ("fp32", "bf16"):
        return find_method(name)
    method, codec = parse(name), parse(name).codec
    if codec is None or method.sharded or method.double or method.momentum:
        return None
    if method.options.get("precondition") or (method.local and "start_step" in method.options):
        return None  # not modelled; two kinds of steps
    strategy = choose(codec, world_size, method.options.get("exchange", "auto"))
    known = Method(
        f"{codec.name if method.local else name} {strategy}",
        codec,
        strategy.exchange,
        strategy.second_phase,
    )
    steps = {k: v for k, v in method.local.items() if k in ("every", "fragments", "delay")}
    return known.after(LocalSteps(**steps)) if steps else known


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
