"""One training step of N nodes, event by event: backward, the pipeline's stages, links, latencies
and stragglers.

A node has cores and one full-duplex link. Forward and backward run on a core; backward makes
buckets ready in DDP's order, and each bucket then goes through the stages of the pipeline, first
in, first out, a stage a thread: a stage waits for the collective that the stage before started,
works, starts its own. What a node sends leaves its link in the order in which it was started
(`gradcomp.comm.link`): a collective starts on a rank when its bytes have left the link and been
under way for the latency of each of its rounds, and it completes on all ranks once it has started
on the last one.

With fewer than two cores the stages' work and the moving of bytes (while the link passes them)
share backward's core, as jobs in a queue without pauses; backward is cut into pieces for that. With
c cores the stages have c - 1 of their own, and bytes move beside them.

Without stragglers all nodes are alike and one of them is simulated; `every_node` simulates all of
them nevertheless.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from gradcomp.plan.costs import (
    IDENTITY,
    Bucket,
    LocalSteps,
    Method,
    between,
    find_method,
    plan_buckets,
)
from gradcomp.plan.events import NO_LINK, BucketWork, Run, Stage
from gradcomp.plan.links import Link, Node
from gradcomp.plan.rates import FREE, Rates
from gradcomp.plan.workload import ALONE, Simulation, Stragglers, Transport, Workload

BACKWARD_PIECES = 16
LITTLE = (64, 64)  # a tensor that is compressed and takes no time
STEPS_OF_STRAGGLERS = 4
MAX_NODES = 4096


def simulate(
    workload: Workload,
    method: Method | str,
    nodes: int,
    link: Link,
    *,
    node: Node = ALONE,
    rates: Rates = FREE,
    cores: float = 2,
    double_buffering: bool = False,
    stragglers: Stragglers | None = None,
    transport: Transport | None = None,
    every_node: bool = False,
    steps: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Simulation:
    """Return what a training step takes.

    Args:
        workload: what is trained.
        method: how gradients are exchanged, or its name (`gradcomp.plan.METHODS`).
        nodes: 1 to 4096.
        link: of every node.
        node: how many ranks share it, and what joins them; one by default.
        rates: CPU seconds of the codecs; none by default.
        cores: of a rank; seconds of computing and of codecs are what they take on it.
        double_buffering: a step is computed in two halves, each exchanged while the next one is
            computed; every half is followed by an update.
        stragglers: how nodes differ; None: not at all.
        transport: takes time after the link; None: none.
        every_node: simulate alike nodes one by one.
        steps: to average over; None: as many as the answer needs.
        progress: called with the share that is done.

    Raises:
        ValueError: an argument out of its range, or an unknown method.
    """
    if isinstance(method, str):
        method = find_method(method)
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"nodes must be an integer from 1 to {MAX_NODES}, got {nodes!r}")
    if not 0 < cores < math.inf:
        raise ValueError(f"cores must be positive and finite, got {cores!r}")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ValueError(f"steps must be None or an integer of at least 1, got {steps!r}")
    stragglers = stragglers or Stragglers()
    if method.local is not None:
        if double_buffering:
            raise ValueError(
                "double_buffering exchanges halves of a minibatch; with local steps none is"
                " exchanged"
            )
        common: dict[str, Any] = {
            "node": node,
            "rates": rates,
            "cores": cores,
            "every_node": every_node,
            "steps": steps,
            "progress": progress,
        }
        return _round(
            workload, method.each_step, method.local, nodes, link, stragglers, transport, common
        )
    halves = 2 if double_buffering else 1
    if steps is None:
        steps = STEPS_OF_STRAGGLERS if stragglers.jitter > 0 else 1
    warm_up = (
        1 if double_buffering else 0
    )  # until the first exchange is behind a computation like all others
    each = nodes if stragglers.any or every_node else 1
    factors = stragglers.factors(each, halves * (warm_up + steps))
    ranks = nodes * node.ranks
    planned = plan_buckets(
        method,
        workload.parameters,
        ranks,
        bucket_cap_mb=workload.bucket_cap_mb,
        node_ranks=node.ranks,
    )
    compute = workload.samples(ranks) * workload.t_frame / halves
    update = workload.t_update + workload.parallel_post * workload.t_post / ranks
    travels = between(method, nodes)
    run = Run(
        nodes=each,
        buckets=(
            [one for b in planned for one in _slice_work(travels, b, ranks, nodes, rates)]
            if ranks > 1
            else []
        ),
        pieces=_pieces(workload, planned),
        forward_share=workload.forward_share,
        compute=(factors * compute).tolist(),
        update=update,
        link=link,
        inside=node.inside,
        cores=cores,
        double_buffering=double_buffering,
        transport=transport.parts if transport is not None else None,
        progress=progress,
    )
    run.run()
    first, last = halves * warm_up, halves * (warm_up + steps)
    seconds = (run.started[last] - run.started[first]) / each / steps
    counted = factors[first:last] * compute
    computing = float(counted.mean()) * halves + update * halves
    slowest = float((counted.max(axis=1) - counted.mean(axis=1)).mean()) * halves
    waiting = min(slowest, max(0.0, seconds - computing))
    exposed = max(0.0, seconds - computing - waiting)
    exchange = sum(run.exchange[first:last]) / steps
    return Simulation(
        nodes,
        seconds,
        computing,
        waiting,
        exposed,
        exchange,
        max(0.0, 1 - exposed / exchange) if exchange > 0 else 1.0,
        sum(b.leaving_nbytes for b in planned) * halves if nodes > 1 else 0,
        ranks,
    )


def _round(
    workload: Workload,
    method: Method,
    local: LocalSteps,
    nodes: int,
    link: Link,
    stragglers: Stragglers,
    transport: Transport | None,
    common: dict[str, Any],
) -> Simulation:
    """Return what a step takes where H of them are followed by one exchange, which nothing hides
    but the steps that it may be late.

    Times of H steps differ less than those of one, by the root of H. With fewer than two cores
    codecs and the moving of bytes are hidden by no step.
    """
    h, ranks = local.every, nodes * common["node"].ranks
    outer = common["rates"].outer_seconds(workload.numel) if ranks > 1 else 0.0
    if local.fragments > len(workload.parameters):
        raise ValueError(
            f"{local.fragments} fragments of {len(workload.parameters)} tensors: a fragment has at"
            " least one"
        )
    update = (
        h * (workload.t_update + workload.parallel_post * workload.t_post) + outer
    )  # nothing is shared out
    whole = replace(
        workload, t_frame=h * workload.t_frame, t_post=0.0, t_update=update, overlaps=False
    )
    calmer = replace(stragglers, jitter=stragglers.jitter / math.sqrt(h))
    found = simulate(whole, method, nodes, link, stragglers=calmer, transport=transport, **common)
    exposed, exchange = found.exposed_seconds, found.exchange_seconds
    if (
        local.fragments > 1 and ranks > 1
    ):  # what an exchange takes however little it carries, once more for each
        tiny = replace(whole, parameters=(("", LITTLE),), flops=None)
        more = (local.fragments - 1) * simulate(
            tiny, method, nodes, link, stragglers=calmer, transport=transport, **common
        ).exposed_seconds
        exposed, exchange = exposed + more, exchange + more
    if local.delay:
        busy = 0.0
        if common["cores"] < 2:
            busy = simulate(
                whole, method, nodes, NO_LINK, stragglers=calmer, transport=transport, **common
            ).exposed_seconds
        steps = min(h, local.fragments * local.delay)
        exposed = min(exposed, max(busy, exposed - steps * found.compute_seconds / h))
    return Simulation(
        nodes,
        (found.compute_seconds + found.straggler_seconds + exposed) / h,
        found.compute_seconds / h,
        found.straggler_seconds / h,
        exposed / h,
        exchange / h,
        max(0.0, 1 - exposed / exchange) if exchange > 0 else 1.0,
        round(found.sent_nbytes / h),
        ranks,
    )


def _slice_work(
    method: Method, bucket: Bucket, ranks: int, nodes: int, rates: Rates
) -> list[BucketWork]:
    """Return the work on a bucket, slice by slice; what a hierarchical exchange does inside a
    node goes with the first and the last.
    """
    if bucket.between is None:
        return [BucketWork(stages) for stages in _stages(method, bucket, ranks, rates)]
    _, _, average, unpack = rates.stage_seconds(
        IDENTITY, ranks // nodes, bucket.numel, bucket.owned_numel
    )
    packed = _stages(method, bucket.between, nodes, rates)
    out = []
    for number, (measure, *middle, decode) in enumerate(packed):
        begins, ends = number == 0, number == len(packed) - 1
        out.append(
            BucketWork(
                (
                    Stage(0.0, bucket.collectives[0] if begins else None),
                    replace(measure, seconds=measure.seconds + average * begins),
                    *middle,
                    replace(decode, collective=bucket.collectives[-1] if ends else None),
                    Stage(unpack * ends, None),
                )
            )
        )
    return out


def _stages(method: Method, bucket: Bucket, ranks: int, rates: Rates) -> list[tuple[Stage, ...]]:
    """Return the stages of every slice: alike, but that the first one has the statistics and the
    round of scales, and the last one all of a second phase that goes in one piece.
    """
    count, collectives = bucket.slices, (*bucket.collectives, None)
    whole = rates.stage_seconds(method, ranks, bucket.numel, bucket.owned_numel)
    if count == 1:
        return [tuple(Stage(s, c) for s, c in zip(whole, collectives, strict=True))]
    part = rates.stage_seconds(method, ranks, bucket.numel // count, bucket.owned_numel // count)
    out = []
    for number in range(count):
        first, last = number == 0, number == count - 1
        stages = [Stage(whole[0], collectives[0]) if first else Stage(0.0, None)]
        for place, (seconds, each) in enumerate(zip(part[1:], collectives[1:], strict=True)):
            if place and bucket.whole_second:
                stages.append(Stage(whole[place + 1], each) if last else Stage(0.0, None))
            else:
                stages.append(Stage(seconds, each and each.part(count)))
        out.append(tuple(stages))
    return out


def _pieces(workload: Workload, buckets: Sequence[Bucket]) -> list[tuple[float, tuple[int, ...]]]:
    """Return backward's pieces: (its share of backward, the slices that are ready after it)."""
    ends = list(accumulate(b.slices for b in buckets))
    if not workload.overlaps:
        last = (1 / BACKWARD_PIECES, tuple(range(ends[-1] if ends else 0)))
        return [*[(1 / BACKWARD_PIECES, ())] * (BACKWARD_PIECES - 1), last]
    out: list[tuple[float, tuple[int, ...]]] = []
    for bucket, end, share in zip(buckets, ends, workload.shares(buckets), strict=True):
        count = max(1, math.ceil(share * BACKWARD_PIECES))
        out += [
            *[(share / count, ())] * (count - 1),
            (share / count, tuple(range(end - bucket.slices, end))),
        ]
    return out
