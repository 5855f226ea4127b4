"""The event loop beneath `gradcomp.plan.simulate`: jobs on cores, stages in order, links that
send one thing at a time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradcomp.plan.costs import Collective
from gradcomp.plan.links import Link

Action = Callable[[], None]
Key = tuple[int, int]  # half, bucket
NO_LINK = Link(math.inf)
MAX_STAGES = 4  # threads of a pipeline, so more cores than this have nothing to do for it


@dataclass(frozen=True)
class Stage:
    """One stage's work on one bucket: seconds of a core, and the collective that it then starts."""

    seconds: float
    collective: Collective | None


@dataclass(frozen=True)
class BucketWork:
    """The stages of one bucket."""

    stages: tuple[Stage, ...]


class Run:
    """A simulation of some halves of steps.

    Args:
        nodes: simulated one by one.
        buckets: in the order in which backward makes them ready; none where nothing is exchanged.
        pieces: of backward: (share, buckets ready after it).
        forward_share: of computing.
        compute: seconds of forward and backward: ``[half][node]``.
        update: seconds of a model update.
        link: of every node.
        inside: what each rank of a node sends over to ranks of its own node.
        cores: of every rank.
        double_buffering: compute a half while the one before is exchanged.
        transport: (waiting, working) seconds of a (kind, nbytes): after the link, but with fewer
            than two cores working is done by backward's, while the link passes the bytes; None:
            nothing.
        progress: called with the share that is done.

    Attributes:
        started: sum over nodes of the time when a half began, one entry a half and the end.
        exchange: seconds from the first bucket handed over to the last one decoded, by half, on the
            first node.
    """

    def __init__(
        self,
        *,
        nodes: int,
        buckets: Sequence[BucketWork],
        pieces: Sequence[tuple[float, tuple[int, ...]]],
        forward_share: float,
        compute: Sequence[Sequence[float]],
        update: float,
        link: Link,
        cores: float,
        double_buffering: bool,
        inside: Link = NO_LINK,
        transport: Callable[[str, int], tuple[float, float]] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.buckets, self.pieces, self.forward_share = buckets, pieces, forward_share
        self.compute, self.update, self.link, self.inside = compute, update, link, inside
        self.double_buffering, self.transport = double_buffering, transport
        self.halves = len(compute)
        self.started = [0.0] * (self.halves + 1)
        self.exchange = [0.0] * self.halves
        self.now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._order = itertools.count()
        self._arrivals: dict[tuple[Key, int], tuple[int, float]] = {}
        self._transport_free, self.one_core = 0.0, cores < 2 and transport is not None
        self._progress, self._left = progress, nodes * self.halves
        self._total = self._left
        self.nodes = [_Node(self, number, cores) for number in range(nodes)]

    def run(self) -> None:
        """Run until every node has done its last update."""
        for node in self.nodes:
            node.begin(0)
        events = self._events
        while events:
            self.now, _, action = heapq.heappop(events)
            action()

    def at(self, time: float, action: Action) -> None:
        """Have `action` called at `time`."""
        heapq.heappush(self._events, (time, next(self._order), action))

    def note_half(self) -> None:
        """Tell how far the run is."""
        self._left -= 1
        if self._progress is not None and self._left % 64 == 0:
            self._progress(1 - self._left / self._total)

    def arrive(self, key: Key, stage: int, collective: Collective, due: float) -> None:
        """Note when one rank's collective starts; when all are known, the last one's start
        completes it.
        """
        count, latest = self._arrivals.get((key, stage), (0, 0.0))
        count, latest = count + 1, max(latest, due)
        if count < len(self.nodes):
            self._arrivals[key, stage] = count, latest
            return
        self._arrivals.pop((key, stage), None)
        if self.transport is None:
            self.at(latest, lambda: self._complete(key, stage))
        else:
            self.at(latest, lambda: self._transport(key, stage, collective))

    def _transport(self, key: Key, stage: int, collective: Collective) -> None:
        assert self.transport is not None
        waiting, working = self.transport(collective.kind, collective.nbytes)
        if self.one_core:  # whose work has begun with the first byte (`_Node.move`)
            self.at(self.now + waiting, lambda: self._complete(key, stage))
        else:
            self._transport_free = max(self.now, self._transport_free) + waiting + working
            self.at(self._transport_free, lambda: self._complete(key, stage))

    def _complete(self, key: Key, stage: int) -> None:
        for node in self.nodes:
            node.arrived(key, stage)


@dataclass
class _Cores:
    """Jobs on some cores: first in, first out, no core idle while a job waits."""

    run: Run
    free: int
    waiting: deque[tuple[float, Action]] = field(default_factory=deque)

    def work(self, seconds: float, done: Action) -> None:
        """Queue a job of so many seconds."""
        if seconds <= 0:
            self.run.at(self.run.now, done)
        elif self.free:
            self.free -= 1
            self._start(seconds, done)
        else:
            self.waiting.append((seconds, done))

    def _start(self, seconds: float, done: Action) -> None:
        def end() -> None:
            if self.waiting:
                self._start(*self.waiting.popleft())
            else:
                self.free += 1
            done()

        self.run.at(self.run.now + seconds, end)


class _Node:
    """One node: what its training loop, its stages and its link are doing."""

    def __init__(self, run: Run, number: int, cores: float) -> None:
        self.run, self.number = run, number
        self.main = _Cores(run, 1)
        self.codecs = self.main if cores < 2 else _Cores(run, min(MAX_STAGES, int(cores) - 1))
        self.link_free = self.inside_free = 0.0
        count = len(run.buckets[0].stages) if run.buckets else 0
        self.queues: list[deque[Key]] = [deque() for _ in range(count)]
        self.busy: list[Key | None] = [None] * count
        self.received: set[tuple[Key, int]] = set()
        self.halfway: set[tuple[Key, int]] = set()
        self.left: dict[int, int] = {}  # buckets of a half that are not decoded
        self.handed: dict[int, float] = {}
        self.due: int | None = None  # the half whose exchange the training loop waits for
        self.next = 0

    # ---- training loop
    # ---------------------------------------------------------------------------------------------

    def begin(self, half: int) -> None:
        """Begin to compute a half."""
        run = self.run
        run.started[half] += run.now
        if half == run.halves:
            return
        self.left[half] = len(run.buckets)
        seconds = run.compute[half][self.number]
        backward = seconds * (1 - run.forward_share)
        self.main.work(seconds * run.forward_share, lambda: self._piece(half, 0, backward))

    def _piece(self, half: int, number: int, backward: float) -> None:
        if number == len(self.run.pieces):
            self._computed(half)
            return
        share, ready = self.run.pieces[number]

        def done() -> None:
            if self.run.buckets:
                for bucket in ready:
                    self.handed.setdefault(half, self.run.now)
                    self._give(0, (half, bucket))
            self._piece(half, number + 1, backward)

        self.main.work(share * backward, done)

    def _computed(self, half: int) -> None:
        """Wait for the exchange of this half, or with double buffering of the one before, then
        update.
        """
        self.next = half + 1
        self.due = half - 1 if self.run.double_buffering else half
        self._go_on()

    def _go_on(self) -> None:
        if self.due is not None and self.left.get(self.due, 0) == 0:
            self.due = None

            def updated() -> None:
                self.run.note_half()
                self.begin(self.next)

            self.main.work(self.run.update, updated)

    # ---- pipeline
    # ----------------------------------------------------------------------------------------------

    def _give(self, stage: int, key: Key) -> None:
        self.queues[stage].append(key)
        if self.busy[stage] is None:
            self._take(stage)

    def _take(self, stage: int) -> None:
        """Take the next bucket of a stage, and work on it once the collective that it waits for
        is complete.
        """
        if not self.queues[stage]:
            return
        key = self.busy[stage] = self.queues[stage].popleft()
        before = self.run.buckets[key[1]].stages[stage - 1].collective if stage else None
        if before is None or (key, stage - 1) in self.received:
            self.received.discard((key, stage - 1))
            self._work(stage, key)

    def receive(self, key: Key, stage: int) -> None:
        """Take note that the collective that `stage` started is complete."""
        if self.busy[stage + 1] == key:
            self._work(stage + 1, key)
        else:
            self.received.add((key, stage))

    def move(self, key: Key, stage: int, collective: Collective) -> None:
        """Have the only core move and add the bytes of a collective, while the link passes them."""
        assert self.run.transport is not None
        _, seconds = self.run.transport(collective.kind, collective.nbytes)
        self.main.work(seconds, lambda: self.arrived(key, stage))

    def arrived(self, key: Key, stage: int) -> None:
        """Take note that a collective's bytes have come, or on an only core that they are moved:
        of the two the later completes it.
        """
        if not self.run.one_core or (key, stage) in self.halfway:
            self.halfway.discard((key, stage))
            self.receive(key, stage)
        else:
            self.halfway.add((key, stage))

    def _work(self, stage: int, key: Key) -> None:
        self.codecs.work(
            self.run.buckets[key[1]].stages[stage].seconds, lambda: self._worked(stage, key)
        )

    def _worked(self, stage: int, key: Key) -> None:
        collective = self.run.buckets[key[1]].stages[stage].collective
        if collective is not None:
            self.run.arrive(key, stage, collective, self._sent(collective))
            if self.run.one_core:
                self.move(key, stage, collective)
        self.busy[stage] = None
        if stage + 1 < len(self.busy):
            self._give(stage + 1, key)
        else:
            self._decoded(key[0])
        self._take(stage)

    def _sent(self, collective: Collective) -> float:
        """Return when the bytes that now begin to leave have been under way for the latency of
        every round.
        """
        link, inside, due = self.run.link, self.run.inside, self.run.now
        if collective.leaving_nbytes:
            self.link_free = (
                max(self.run.now, self.link_free) + 8 * collective.leaving_nbytes / link.bits_per_s
            )
            due = self.link_free + collective.rounds * link.latency_s
        if collective.staying_nbytes:
            self.inside_free = (
                max(self.run.now, self.inside_free)
                + 8 * collective.staying_nbytes / inside.bits_per_s
            )
            due = max(due, self.inside_free + collective.rounds * inside.latency_s)
        return due

    def _decoded(self, half: int) -> None:
        self.left[half] -= 1
        if self.left[half] == 0:
            if self.number == 0:
                self.run.exchange[half] = self.run.now - self.handed[half]
            if self.due == half:
                self._go_on()
