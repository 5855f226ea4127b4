"""Predict the seconds of one training step of N nodes, from the work of one rank.

A rank is a list of jobs: forward, pieces of backward, the pipeline's stages, what links pass, the
update. A job begins when the jobs that it follows have ended and its resource is free; resources
serve jobs in the order in which they become ready (list scheduling). There are a main core, cores
for the codecs, the node's link, the link inside a node, and what moves bytes behind the links.

Backward makes buckets ready in DDP's order. Each bucket goes through the stages of the pipeline,
a stage a thread: a stage waits for the collective that the stage before started, works, and starts
its own. A collective is complete when its bytes have left the link and been under way for the
latency of each of its rounds (`gradcomp.comm.link`).

With fewer than two cores the stages' work and the moving of bytes (while the link passes them)
share backward's core; backward is cut into pieces for that. With c cores the stages have c - 1 of
their own, and bytes move beside them.

All nodes do the same, so one stands for all, and where they differ the slowest one: all others wait
for it. With double buffering they wait for it half a step later, and may have made up for the time
by then; so some of each kind of node are looked at.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from statistics import fmean
from typing import Any

from gradcomp.plan.costs import (
    IDENTITY,
    Bucket,
    Collective,
    LocalSteps,
    Method,
    between,
    find_method,
    plan_buckets,
)
from gradcomp.plan.links import Link, Node
from gradcomp.plan.rates import FREE, Rates
from gradcomp.plan.workload import ALONE, Simulation, Stragglers, Transport, Workload

BACKWARD_PIECES = 16
LITTLE = (64, 64)  # a tensor that is compressed and takes no time
MAX_NODES = 4096
MAX_STAGES = 4  # threads of a pipeline, so more cores than this have nothing to do for it
NO_LINK = Link(math.inf)
MAIN, CODECS, LINK, INSIDE, TRANSPORT = range(5)  # resources


class Jobs:
    """Jobs that follow each other, on resources that serve them first in, first out.

    Args:
        servers: how many jobs a resource serves at once.
    """

    def __init__(self, servers: Mapping[Hashable, int]) -> None:
        self._free = dict(servers)
        self._jobs: list[tuple[Hashable, float]] = []
        self._left: list[int] = []
        self._followers: list[list[int]] = []

    def add(self, resource: Hashable, seconds: float, *after: int) -> int:
        """Return the number of a new job that follows the jobs `after`.

        Without a resource, or seconds, it waits for nothing else.
        """
        number = len(self._jobs)
        self._jobs.append((resource if seconds > 0 else None, seconds))
        self._left.append(len(after))
        self._followers.append([])
        for job in after:
            self._followers[job].append(number)
        return number

    def ends(self) -> list[float]:
        """Run all jobs once; return when each of them ends."""
        times, order = [0.0] * len(self._jobs), count()
        waiting: dict[Hashable, deque[int]] = {resource: deque() for resource in self._free}
        running: list[tuple[float, int, int]] = []

        def begin(job: int, now: float) -> None:
            resource, seconds = self._jobs[job]
            if resource is not None:
                if not self._free[resource]:
                    waiting[resource].append(job)
                    return
                self._free[resource] -= 1
            heapq.heappush(running, (now + seconds, next(order), job))

        for job in [job for job, left in enumerate(self._left) if left == 0]:
            begin(job, 0.0)
        while running:
            now, _, job = heapq.heappop(running)
            times[job] = now
            resource, _ = self._jobs[job]
            if resource is not None:
                self._free[resource] += 1
                if waiting[resource]:
                    begin(waiting[resource].popleft(), now)
            for follower in self._followers[job]:
                self._left[follower] -= 1
                if not self._left[follower]:
                    begin(follower, now)
        return times


@dataclass(frozen=True)
class Stage:
    """One stage's work on one slice: seconds of a core, and the collective that it then starts."""

    seconds: float
    collective: Collective | None


@dataclass(frozen=True)
class Step:
    """What a rank does in a step.

    Attributes:
        slices: the stages of each, in the order in which backward makes them ready; none where
            nothing is exchanged.
        pieces: of backward: (share, slices ready after it).
        forward_share: of computing.
        update: seconds of a model update.
        link: of a node.
        inside: of each rank to ranks of its own node.
        cores: of a rank.
        double_buffering: compute a half while the one before is exchanged.
        transport: comes after the link, one collective at a time. With fewer than two cores the
            main core does its working part while the link passes the bytes.
    """

    slices: Sequence[tuple[Stage, ...]]
    pieces: Sequence[tuple[float, tuple[int, ...]]]
    forward_share: float
    update: float
    link: Link
    inside: Link = NO_LINK
    cores: float = 2
    double_buffering: bool = False
    transport: Transport | None = None

    def run(
        self, compute: Sequence[Sequence[float]], counts: Sequence[int] = (1,)
    ) -> tuple[list[float], list[float]]:
        """Return when each half of a step begins, and the end, as means over nodes; and the
        seconds of each exchange on the first one.

        Args:
            compute: seconds of forward and backward: ``[half][node]``.
            counts: nodes that each of these stands for.
        """
        nodes = range(len(compute[0]))
        threads = min(MAX_STAGES, max(1, int(self.cores) - 1))
        servers = {CODECS: threads, MAIN: 1, LINK: 1, INSIDE: 1}
        jobs = Jobs({(kind, n): k for kind, k in servers.items() for n in nodes} | {TRANSPORT: 1})
        codecs = MAIN if self.cores < 2 else CODECS
        stage_count = len(self.slices[0]) if self.slices else 0
        before: list[list[list[int]]] = [[[] for _ in nodes] for _ in range(stage_count)]
        updated: list[list[int]] = []
        exchanges: list[tuple[int, list[list[int]]]] = []
        for half in compute:
            forward = [self.forward_share * seconds for seconds in half]
            at = [jobs.add((MAIN, n), forward[n], *(one[n] for one in updated[-1:])) for n in nodes]
            first = None
            for share, ready in self.pieces:
                at = [jobs.add((MAIN, n), share * (half[n] - forward[n]), at[n]) for n in nodes]
                for stages in (self.slices[number] for number in ready if self.slices):
                    first = at[0] if first is None else first
                    arrived = [[job] for job in at]
                    for place, stage in enumerate(stages):
                        worked = [
                            jobs.add((codecs, n), stage.seconds, *arrived[n], *before[place][n])
                            for n in nodes
                        ]
                        before[place] = [[job] for job in worked]
                        arrived = self._exchange(jobs, worked, stage.collective)
            if first is not None:
                exchanges.append((first, before[-1]))
            due = exchanges[-2:-1] if self.double_buffering else exchanges[-1:]
            updated.append(
                [
                    jobs.add((MAIN, n), self.update, at[n], *(j for _, e in due for j in e[n]))
                    for n in nodes
                ]
            )
        ends = jobs.ends()
        means = [
            sum(k * ends[job] for k, job in zip(counts, half, strict=True)) / sum(counts)
            for half in updated
        ]
        return [0.0, *means], [ends[last[0][0]] - ends[first] for first, last in exchanges]

    def _exchange(
        self, jobs: Jobs, worked: list[int], collective: Collective | None
    ) -> list[list[int]]:
        """Return for every node the jobs that end a collective, which begins on a node when its
        job of `worked` has ended.
        """
        out = [[job] for job in worked]
        if collective is None:
            return out
        sent = []
        for kind, nbytes, link in (
            (LINK, collective.leaving_nbytes, self.link),
            (INSIDE, collective.staying_nbytes, self.inside),
        ):
            if nbytes:
                for n, job in enumerate(worked):
                    left = jobs.add((kind, n), 8 * nbytes / link.bits_per_s, job)
                    sent.append(jobs.add(None, collective.rounds * link.latency_s, left))
        seconds, working, resource = 0.0, 0.0, None
        if self.transport is not None:
            seconds, working = self.transport.parts(collective.kind, collective.nbytes)
            if self.cores >= 2:
                seconds, working, resource = seconds + working, 0.0, TRANSPORT
        moved = jobs.add(resource, seconds, *(sent or worked))
        return [
            [*one, moved, *([jobs.add((MAIN, n), working, *one)] if working else [])]
            for n, one in enumerate(out)
        ]


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

    Raises:
        ValueError: an argument out of its range, or an unknown method.
    """
    if isinstance(method, str):
        method = find_method(method)
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"nodes must be an integer from 1 to {MAX_NODES}, got {nodes!r}")
    if not 0 < cores < math.inf:
        raise ValueError(f"cores must be positive and finite, got {cores!r}")
    stragglers = stragglers or Stragglers()
    if method.local is not None:
        if double_buffering:
            raise ValueError(
                "double_buffering exchanges halves of a minibatch; with local steps none is"
                " exchanged"
            )
        common: dict[str, Any] = {"node": node, "rates": rates, "cores": cores}
        return _round(
            workload, method.each_step, method.local, nodes, link, stragglers, transport, common
        )
    halves = 2 if double_buffering else 1
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
    step = Step(
        [one for b in planned for one in _slice_work(travels, b, ranks, nodes, rates)]
        if ranks > 1
        else [],
        _pieces(workload, planned),
        workload.forward_share,
        update,
        link,
        node.inside,
        cores,
        double_buffering,
        transport,
    )
    # with double buffering the first exchange has no computation before it that hides it
    first = halves if double_buffering else 0
    factors, counts = stragglers.factors(nodes, double_buffering=double_buffering)
    begun, exchanges = step.run([[one * compute for one in half] for half in factors], counts)
    steps = (len(factors) - first) / halves
    seconds, exchange = (begun[-1] - begun[first]) / steps, sum(exchanges[first:]) / steps
    mean, slowest = stragglers.mean(nodes), fmean(max(half) for half in factors[first:])
    computing = halves * (mean * compute + update)
    waiting = min(halves * (slowest - mean) * compute, max(0.0, seconds - computing))
    exposed = max(0.0, seconds - computing - waiting)
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
    # nothing is shared out
    update = h * (workload.t_update + workload.parallel_post * workload.t_post) + outer
    whole = replace(
        workload, t_frame=h * workload.t_frame, t_post=0.0, t_update=update, overlaps=False
    )
    calmer = replace(stragglers, jitter=stragglers.jitter / math.sqrt(h))
    found = simulate(whole, method, nodes, link, stragglers=calmer, transport=transport, **common)
    exposed, exchange = found.exposed_seconds, found.exchange_seconds
    # what an exchange takes however little it carries, once more for each
    if local.fragments > 1 and ranks > 1:
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
) -> list[tuple[Stage, ...]]:
    """Return the stages of a bucket, slice by slice; what a hierarchical exchange does inside a
    node goes with the first and the last.
    """
    if bucket.between is None:
        return _stages(method, bucket, ranks, rates)
    _, _, average, unpack = rates.stage_seconds(
        IDENTITY, ranks // nodes, bucket.numel, bucket.owned_numel
    )
    packed = _stages(method, bucket.between, nodes, rates)
    out = []
    for number, (measure, *middle, decode) in enumerate(packed):
        begins, ends = number == 0, number == len(packed) - 1
        out.append(
            (
                Stage(0.0, bucket.collectives[0] if begins else None),
                replace(measure, seconds=measure.seconds + average * begins),
                *middle,
                replace(decode, collective=bucket.collectives[-1] if ends else None),
                Stage(unpack * ends, None),
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
