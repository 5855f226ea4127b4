"""Simulate one training step of N nodes and predict its seconds from the work of one rank.

A rank is a list of jobs: forward, pieces of backward, the pipeline's stages, transfers over links,
and the update. A job starts when the jobs before it have ended and its resource is free. Resources
serve jobs in the order in which they become ready (list scheduling). The resources are a main core,
cores for the codecs, the node's link, the link inside a node, the transport, and copies between an
accelerator and the host.

Buckets become ready during backward in DDP's order. Each bucket passes through the stages of the
pipeline, one thread per stage: a stage waits for the collective that the previous stage started,
computes, and starts its own. A collective is complete when its bytes have passed the link and the
latency of each of its rounds is over (`gradcomp.comm.link`).

With fewer than two cores, the stages and the transport's work on bytes share a core with backward,
which is cut into pieces for this. With c cores, the stages have c - 1 cores of their own, and the
transport works in parallel.

If all nodes are alike, only one of them is simulated. If they differ, only the slowest is, because
all others wait for it. With double buffering they wait half a step later and may have caught up by
then, so several nodes of each kind are simulated.

In large models hundreds of buckets in a row may be equal. A step with so many is extrapolated from
two steps with fewer of them.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, pairwise
from operator import itemgetter
from statistics import fmean

from gradcomp.arguments import check_integer
from gradcomp.comm.rounds import ring_bytes
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
from gradcomp.plan.nodes import exact
from gradcomp.plan.rates import FREE, Rates
from gradcomp.plan.workload import ALONE, EVEN, Simulation, Stragglers, Transport, Workload

BACKWARD_PIECES = 16
LITTLE = (64, 64)  # shape of a tensor that is compressed in negligible time
# Shortest run of equal buckets, in slices, from which longer ones are extrapolated, and the largest
# share of its exchange that does not grow with the run.
LONG, FIXED_SHARE = 512, 1 / 8
MAX_NODES = 4096
MAX_STAGES = 4  # threads of a pipeline, so it cannot use more cores than this
MAIN, CODECS, LINK, INSIDE, TRANSPORT, COPIER = range(6)  # resources


class Jobs:
    """Jobs on first-in-first-out resources; `servers` of each resource run at the same time."""

    def __init__(self, servers: Mapping[Hashable, int]) -> None:
        self._free: dict[Hashable, float] = {None: math.inf, **servers}
        self._jobs: list[tuple[Hashable, float]] = []
        self._left: list[int] = []
        self._followers: list[list[int]] = []

    def add(self, resource: Hashable, seconds: float, *after: int) -> int:
        """Add a job and return its number; without a resource or seconds it waits for none."""
        self._jobs.append((resource if seconds > 0 else None, seconds))
        self._left.append(len(after))
        self._followers.append([])
        number = len(self._jobs) - 1
        for job in after:
            self._followers[job].append(number)
        return number

    def ends(self) -> list[float]:
        """Run all jobs once; return the time in seconds at which each of them ends."""
        times, order = [0.0] * len(self._jobs), count()
        waiting: dict[Hashable, deque[int]] = {resource: deque() for resource in self._free}
        running: list[tuple[float, int, int]] = []

        def begin(job: int, now: float) -> None:
            resource, seconds = self._jobs[job]
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
    """A stage's work on a slice: seconds on a core, then of a copy, then a collective."""

    seconds: float
    collective: Collective | None
    copied_s: float = 0.0


@dataclass(frozen=True)
class Setting:
    """Input of a simulation; attributes and errors are those of `simulate`."""

    workload: Workload
    link: Link
    node: Node = ALONE
    rates: Rates = FREE
    cores: float = 2
    double_buffering: bool = False
    stragglers: Stragglers = EVEN
    transport: Transport | None = None

    def __post_init__(self) -> None:
        exact("cores", self.cores, positive=True)

    @property
    def as_measured(self) -> bool:
        """Whether the measured transport replaces the link, which is infinitely fast."""
        return self.transport is not None and math.isinf(self.link.bits_per_s)

    def ratio(self, result: Simulation) -> float:
        """Return the compression ratio of a step: bytes of fp32 ring all_reduces / bytes sent."""
        rings = ring_bytes(self.workload.numel, result.ranks) * (1 + self.double_buffering)
        return rings / result.sent_nbytes if result.sent_nbytes else 1.0

    def simulate(self, method: Method, nodes: int) -> Simulation:
        """Return the simulation of a step with a method on a number of nodes."""
        check_integer("nodes", nodes, 1, MAX_NODES)
        if method.local is not None:
            return self._local_steps(method.each_step, method.local, nodes)
        work, halves, ranks = self.workload, 1 + self.double_buffering, nodes * self.node.ranks
        cap = work.bucket_cap_mb
        buckets = plan_buckets(method, work.parameters, ranks, cap, self.node.ranks)
        compute = work.samples(ranks) * work.t_frame / halves
        update = work.t_update + work.t_post / ranks
        travels = between(method, nodes)
        slices = {b: slice_work(travels, b, ranks, nodes, self.rates) for b in set(buckets)}
        factors, counts = self.stragglers.factors(nodes, double_buffering=self.double_buffering)
        start, length = longest_run([*zip(buckets, work.shares(buckets), strict=True)])

        def schedule(run: int) -> tuple[list[float], list[float]]:
            """Schedule a step in which the longest run has this number of buckets."""
            some = buckets[: start + run] + buckets[start + length :]
            return self.schedule(
                [one for b in some for one in slices[b]] if ranks > 1 else [],
                backward_pieces(work, some),
                [[factor * compute for factor in half] for half in factors],
                update,
                counts,
            )

        kept = length if self.double_buffering else math.ceil(LONG / buckets[start].slices)
        begun, exchanges = extrapolated(schedule, length, kept)
        # with double buffering no computation hides the first exchange: leave its step out
        first = halves if self.double_buffering else 0
        steps = (len(factors) - first) / halves
        seconds, exchange = (begun[-1] - begun[first]) / steps, sum(exchanges[first:]) / steps
        mean, slowest = self.stragglers.mean(nodes), fmean(max(half) for half in factors[first:])
        computing = halves * (mean * compute + update)
        waiting = min(halves * (slowest - mean) * compute, max(0.0, seconds - computing))
        exposed = max(0.0, seconds - computing - waiting)
        sent = sum(b.leaving_nbytes for b in buckets) * halves if nodes > 1 else 0
        parts = seconds, computing, waiting, exposed, exchange
        return Simulation(nodes, *parts, _hidden(exposed, exchange), sent, ranks)

    def _local_steps(self, method: Method, local: LocalSteps, nodes: int) -> Simulation:
        """Return the mean of H local steps and the exchange after them, per step.

        The exchange is hidden only by the `delay` steps, and with fewer than two cores these hide
        neither codecs nor the transport's work. H steps have the jitter of one over sqrt(H).
        """
        if self.double_buffering:
            raise ValueError(
                "double_buffering exchanges halves of a minibatch; with local steps none is"
                " exchanged"
            )
        if local.fragments > (tensors := len(self.workload.parameters)):
            raise ValueError(
                f"{local.fragments} fragments of {tensors} tensors: a fragment has at least one"
            )
        h, work, ranks = local.every, self.workload, nodes * self.node.ranks
        # every rank updates all parameters and does the whole post-processing
        update = h * (work.t_update + work.t_post)
        update += self.rates.outer_seconds(work.numel) if ranks > 1 else 0.0
        whole = replace(work, t_frame=h * work.t_frame, t_post=0.0, t_update=update, overlaps=False)
        calmer = replace(self.stragglers, jitter=self.stragglers.jitter / math.sqrt(h))
        rounds = replace(self, workload=whole, stragglers=calmer)
        found = rounds.simulate(method, nodes)
        exposed, exchange = found.exposed_seconds, found.exchange_seconds
        # add the fixed time of an exchange for each additional fragment
        if local.fragments > 1 and ranks > 1:
            tiny = replace(whole, parameters=(("", LITTLE),), flops=None)
            each = replace(rounds, workload=tiny).simulate(method, nodes).exposed_seconds
            more = (local.fragments - 1) * each
            exposed, exchange = exposed + more, exchange + more
        if local.delay:
            busy = 0.0
            if self.cores < 2:
                no_link = replace(rounds, link=Link(math.inf))
                busy = no_link.simulate(method, nodes).exposed_seconds
            steps = min(h, local.fragments * local.delay)
            exposed = min(exposed, max(busy, exposed - steps * found.compute_seconds / h))
        step, wait = found.compute_seconds, found.straggler_seconds
        took, sent = step + wait + exposed, round(found.sent_nbytes / h)
        hidden = _hidden(exposed, exchange)
        return Simulation(
            nodes, took / h, step / h, wait / h, exposed / h, exchange / h, hidden, sent, ranks
        )

    def schedule(
        self,
        slices: Sequence[tuple[Stage, ...]],
        pieces: Sequence[tuple[float, tuple[int, ...]]],
        compute: Sequence[Sequence[float]],
        update: float,
        counts: Sequence[int] = (1,),
    ) -> tuple[list[float], list[float]]:
        """Schedule all jobs of a run. Half steps are whole steps without double buffering.

        Args:
            slices: stages of each slice, in the order of readiness; empty: no exchange.
            pieces: pieces of backward, from `backward_pieces`.
            compute: seconds of forward and backward, ``[half step][node]``.
            update: seconds of a model update.
            counts: number of nodes that each simulated node stands for.

        Returns:
            The start of each half step, then the end of the last, in seconds as means over nodes;
            and the seconds of each exchange on the first simulated node.
        """
        nodes, forward_share = range(len(compute[0])), self.workload.forward_share
        threads = min(MAX_STAGES, max(1, int(self.cores) - 1))
        servers = {CODECS: threads, MAIN: 1, LINK: 1, INSIDE: 1, COPIER: 1}
        jobs = Jobs({(kind, n): k for kind, k in servers.items() for n in nodes} | {TRANSPORT: 1})
        codecs = MAIN if self.cores < 2 else CODECS
        start = jobs.add(None, 0.0)
        worked = [[start for _ in nodes] for _ in (slices[0] if slices else [()])]  # [stage][node]
        updated = [[start for _ in nodes]]  # [half][node]
        exchanges: list[tuple[int, list[int]]] = []
        for half in compute:
            forward = [forward_share * seconds for seconds in half]
            at = [jobs.add((MAIN, n), forward[n], updated[-1][n]) for n in nodes]
            first = None
            for share, ready in pieces:
                at = [jobs.add((MAIN, n), share * (half[n] - forward[n]), at[n]) for n in nodes]
                for stages in (slices[number] for number in ready if slices):
                    first = at[0] if first is None else first
                    arrived = [[job] for job in at]
                    for place, stage in enumerate(stages):
                        worked[place] = [
                            jobs.add((codecs, n), stage.seconds, *arrived[n], worked[place][n])
                            for n in nodes
                        ]
                        done = worked[place]
                        if stage.copied_s:
                            done = [jobs.add((COPIER, n), stage.copied_s, done[n]) for n in nodes]
                        arrived = self._exchange(jobs, done, stage.collective)
            if first is not None:
                exchanges.append((first, worked[-1]))
            # with double buffering an update applies the exchange of the previous half
            due = exchanges[-2:-1] if self.double_buffering else exchanges[-1:]
            last = [[at[n], *(exchange[n] for _, exchange in due)] for n in nodes]
            updated.append([jobs.add((MAIN, n), update, *last[n]) for n in nodes])
        ends = jobs.ends()
        begun = [
            sum(k * ends[job] for k, job in zip(counts, half, strict=True)) / sum(counts)
            for half in updated
        ]
        return begun, [ends[last[0]] - ends[first] for first, last in exchanges]

    def _exchange(
        self, jobs: Jobs, worked: Sequence[int], collective: Collective | None
    ) -> list[list[int]]:
        """Add a collective that starts after `worked`; return, by node, the jobs to wait for."""
        out = [[job] for job in worked]
        if collective is None:
            return out
        sent = []
        for kind, nbytes, link in (
            (LINK, collective.leaving_nbytes, self.link),
            (INSIDE, collective.staying_nbytes, self.node.inside),
        ):
            for n, job in enumerate(worked if nbytes else ()):
                left = jobs.add((kind, n), 8 * nbytes / link.bits_per_s, job)
                sent.append(jobs.add(None, collective.rounds * link.latency_s, left))
        seconds, working, resource = 0.0, 0.0, None
        if self.transport is not None:
            seconds, working = self.transport.parts(collective.kind, collective.nbytes)
            if self.cores >= 2:
                seconds, working, resource = seconds + working, 0.0, TRANSPORT
        moved = jobs.add(resource, seconds, *(sent or worked))
        for n, one in enumerate(out):
            one += [moved, *([jobs.add((MAIN, n), working, *one)] if working else [])]
        return out


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
    """Return the simulated time of a training step.

    Args:
        workload: model, minibatch and computing times.
        method: method of exchange, or its name (`gradcomp.plan.METHODS`).
        nodes: number of nodes, 1 to 4096.
        link: network link of every node.
        node: number of ranks on a node and the link between them; one rank by default.
        rates: CPU seconds of the codecs; zero by default.
        cores: cores of a rank; the seconds of computing and codecs are those on these cores.
        double_buffering: a step is computed in two halves, each exchanged while the next one is
            computed; an update follows every half.
        stragglers: differences between nodes; None: all are alike.
        transport: seconds that the transport adds to the link's; None: none.

    Raises:
        TypeError: `cores` is not a number.
        ValueError: an argument is out of its range, or the method is unknown.
    """
    if isinstance(method, str):
        method = find_method(method)
    setting = Setting(
        workload, link, node, rates, cores, double_buffering, stragglers or EVEN, transport
    )
    return setting.simulate(method, nodes)


def _hidden(exposed: float, exchange: float) -> float:
    return max(0.0, 1 - exposed / exchange) if exchange > 0 else 1.0


def slice_work(
    method: Method, bucket: Bucket, ranks: int, nodes: int, rates: Rates
) -> list[tuple[Stage, ...]]:
    """Return the stages of every slice of a bucket.

    Statistics and the collective of scales belong to the first slice; a second phase that is not
    sliced belongs to the last. A hierarchical exchange works inside the node before the first slice
    and after the last. Copies to the host come before the first slice, those back after the last.
    """
    packed, members = (bucket, ranks) if bucket.between is None else (bucket.between, nodes)
    count, nothing, out = packed.slices, Stage(0.0, None), []
    copies = here, back = (0.0, 0.0) if method.codec is None else rates.copy_seconds(bucket.numel)
    whole = rates.stage_seconds(method, members, packed.numel, packed.owned_numel)
    part = rates.stage_seconds(method, members, packed.numel // count, packed.owned_numel // count)
    for number in range(count):
        begins, ends = number == 0, number == count - 1
        stages = [Stage(whole[0], packed.collectives[0]) if begins else nothing]
        for place, collective in enumerate((*packed.collectives[1:], None), start=1):
            if place == 1 or not packed.whole_second:
                stages.append(Stage(part[place], collective and collective.part(count)))
            else:
                stages.append(Stage(whole[place], collective) if ends else nothing)
        if bucket.between is not None:
            _, _, average, unpack = rates.stage_seconds(
                IDENTITY, ranks // nodes, bucket.numel, bucket.owned_numel
            )
            scatters, gathers = bucket.collectives[0], bucket.collectives[-1]
            stages[0] = replace(stages[0], seconds=stages[0].seconds + average * begins)
            stages[-1] = replace(stages[-1], collective=gathers if ends else None)
            stages = [Stage(0.0, scatters if begins else None), *stages, Stage(unpack * ends, None)]
        if any(copies):
            stages[-1] = replace(stages[-1], copied_s=back * ends)
            stages = [Stage(0.0, None, here * begins), *stages, nothing]
        out.append(tuple(stages))
    return out


def extrapolated(
    schedule: Callable[[int], tuple[list[float], list[float]]], count: int, kept: int
) -> tuple[list[float], list[float]]:
    """Return ``schedule(count)`` for a run of equal buckets. A long run is extrapolated from two
    shorter ones: times are linear in long runs.
    """
    while 2 * kept < count:
        few, more = schedule(kept), schedule(2 * kept)
        fixed = 2 * sum(few[1]) - sum(more[1])
        if fixed <= FIXED_SHARE * sum(few[1]):
            begun, exchanges = (
                [a + (b - a) * (count - kept) / kept for a, b in zip(*times, strict=True)]
                for times in zip(few, more, strict=True)
            )
            return begun, exchanges
        kept *= 2
    return schedule(count)


def longest_run(items: Sequence[object]) -> tuple[int, int]:
    """Return the start and the length of the longest run of equal items."""
    starts = [k for k, one in enumerate(items) if k == 0 or one != items[k - 1]]
    return max(((a, b - a) for a, b in pairwise([*starts, len(items)])), key=itemgetter(1))


def backward_pieces(
    workload: Workload, buckets: Sequence[Bucket]
) -> list[tuple[float, tuple[int, ...]]]:
    """Return the pieces of backward: (share of backward, numbers of the slices ready after it)."""
    ends = list(accumulate(b.slices for b in buckets))
    if not workload.overlaps:
        pieces = [(1 / BACKWARD_PIECES, ())] * (BACKWARD_PIECES - 1)
        return [*pieces, (1 / BACKWARD_PIECES, tuple(range(ends[-1] if ends else 0)))]
    out: list[tuple[float, tuple[int, ...]]] = []
    for bucket, end, share in zip(buckets, ends, workload.shares(buckets), strict=True):
        count = max(1, math.ceil(share * BACKWARD_PIECES))
        out += [(share / count, ())] * (count - 1)
        out.append((share / count, tuple(range(end - bucket.slices, end))))
    return out
