"""The planner's predictions for the steps that the benchmarks measure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from torch import nn

from gradcomp.bench.methods import OVER_MPI, parse
from gradcomp.codecs import Codec
from gradcomp.exchange.sizing import choose
from gradcomp.plan.costs import LocalSteps, Method, find_method
from gradcomp.plan.links import Link
from gradcomp.plan.rates import Rates
from gradcomp.plan.step import simulate
from gradcomp.plan.workload import Transport, Workload


def planned(name: str, world_size: int, *, over_mpi: bool = False) -> Method | None:
    """Return the planner's method for a method of the benchmarks; None if it has none."""
    if not over_mpi and name in ("fp32", "bf16"):
        return find_method(name)
    method = parse(name)
    codec, local = OVER_MPI.get(name, method.codec), method.local
    if not isinstance(codec, Codec) or method.sharded or method.double:
        return None
    if method.options.get("precondition") or (local and "warmup_steps" in method.options):
        return None  # not modelled: preconditioning, or local steps after a warm-up
    strategy = choose(codec, world_size, method.options.get("exchange", "auto"))
    shown = f"{codec.name if local else name} {strategy}"
    known = Method(shown, codec, strategy.exchange, strategy.second_phase)
    if not local:
        return known
    rest = local.get("fragments", 1), local.get("fragment_sync_delay", 0)
    return known.after(LocalSteps(local["sync_every"], *rest))


def shapes_of(model: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (name, shape) of every parameter of a model, as the planner needs them."""
    return tuple((name, tuple(p.shape)) for name, p in model.named_parameters())


def predict(
    name: str,
    alone: Sequence[dict[str, Any]],
    model: nn.Module,
    link: Link,
    rates: Rates,
    ranks: int,
    *,
    cores: int = 2,
    transport: Transport | None = None,
    over_mpi: bool = False,
) -> float | None:
    """Return the seconds per step that the planner predicts; None: it does not model the method.

    `alone` are the ranks' results without an exchange: with DDP, except for local steps. Each rank
    is a host with `cores` cores. `transport` has the seconds of moving bytes without a link (None:
    zero).
    """
    method = planned(name, ranks, over_mpi=over_mpi)
    if method is None:
        return None
    step = max(statistics.median(one["seconds"]) for one in alone)
    update = max(statistics.median(one["update_seconds"]) for one in alone)
    work = Workload(
        shapes_of(model), minibatch=1.0, t_frame=max(0.0, step - update), t_update=update, weak=True
    )
    options: dict[str, Any] = {"rates": rates, "cores": cores, "transport": transport}
    return simulate(work, method, ranks, link, **options).seconds
