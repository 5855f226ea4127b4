"""Seconds a step over node counts and methods, where one becomes faster than another, and what
to do about it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from gradcomp.comm.rounds import ring_bytes
from gradcomp.plan.costs import FP32_NBYTES, HIERARCHICAL, IDENTITY, METHODS, Method, between
from gradcomp.plan.links import Link, Node, format_seconds
from gradcomp.plan.nodes import optimal_nodes
from gradcomp.plan.rates import Rates, calibrate
from gradcomp.plan.step import simulate
from gradcomp.plan.tolerance import Tolerance
from gradcomp.plan.words import ENOUGH, accuracy, rare, rarely, sentence
from gradcomp.plan.workload import ALONE, Simulation, Stragglers, Transport, Workload

FP32 = METHODS[0]
TIE = 0.01  # methods this close are equally fast
RATE_RANGE = (1e3, 1e15)  # bits a second between which compression may stop paying
RATE_TOLERANCE = 0.01


@dataclass(frozen=True)
class Row:
    """One method on some nodes.

    Attributes:
        method, result: as they say.
        seconds: a step, over a whole run: with those of the warm start in fp32 that its loss was
            measured with.
    """

    method: Method
    result: Simulation
    seconds: float


@dataclass(frozen=True)
class Crossing:
    """Where another method becomes the fastest: on `nodes`, not on one node fewer. Of methods
    within 1 % the first counts.
    """

    nodes: int
    before: str
    after: str


@dataclass(frozen=True)
class Prediction:
    """What `predict` found.

    Attributes:
        rows: one a node count and method, in this order.
        crossings: where the fastest method changes, by number of nodes; of those that are
            permitted.
        method: the one recommended.
        nodes: the number of nodes recommended: the fewest within 5 % of the shortest step (most
            samples a second in weak scaling).
        speedup: seconds a step of fp32 over those of `method`, on `nodes`; 1 if fp32 was not asked
            for.
        break_even_bits_per_s: link rate above which nothing here is more than 5 % faster than fp32
            on `nodes`; inf where that is so at no rate, 0 at every rate, None if fp32 or codecs
            were not asked for.
        break_even_range: the lowest and the highest such rate with each of `repeated`; None where
            there is no such rate.
        optimal_nodes: of the seed's formula with the method's compression ratio and double
            buffering; inf as it says.
        sentence: the recommendation.
        rates: that the simulations used.
        tolerance: what methods cost in accuracy.
        permitted: names of the methods that may be recommended: those that `tolerance` permits, or
            all where that is none.
        repeated: the rates as they were measured one time after the other.
    """

    rows: tuple[Row, ...]
    crossings: tuple[Crossing, ...]
    method: Method
    nodes: int
    speedup: float
    break_even_bits_per_s: float | None
    optimal_nodes: int | float
    sentence: str
    rates: Rates
    tolerance: Tolerance = field(default_factory=Tolerance)
    permitted: tuple[str, ...] = ()
    repeated: tuple[Rates, ...] = ()
    break_even_range: tuple[float, float] | None = None

    def result(self, method: str, nodes: int) -> Simulation:
        """Return one method's simulation on so many nodes.

        Raises:
            KeyError: that was not predicted.
        """
        for row in self.rows:
            if row.method.name == method and row.result.nodes == nodes:
                return row.result
        raise KeyError((method, nodes))


def predict(
    workload: Workload,
    link: Link,
    nodes: Sequence[int],
    *,
    node: Node = ALONE,
    methods: Sequence[Method] | None = None,
    rates: Rates | None = None,
    cores: float = 2,
    double_buffering: bool = False,
    stragglers: Stragglers | None = None,
    transport: Transport | None = None,
    optimizer: str | None = None,
    tolerances: Mapping[str, float] | None = None,
    by_seconds: bool | None = None,
    repeated: Sequence[Rates] = (),
) -> Prediction:
    """Simulate every method on every number of nodes and say what pays.

    Args:
        workload: what is trained; its minibatch is shared out over the nodes (strong scaling)
            unless `weak`.
        link: of every node.
        nodes: node counts, 1 to 4096.
        node: how many ranks share it, and what joins them; one by default.
        methods: to choose from; None: all, for nodes of several ranks the hierarchical ones, too.
        rates: CPU seconds of the codecs; None: measured here (`gradcomp.plan.calibrate`).
        cores, double_buffering, stragglers, transport: as of `gradcomp.plan.simulate`.
        optimizer: name of the optimizer, such as "adamw" or "sgd": codecs that were measured to
            lose more under it than is tolerated, or were not measured, are not recommended
            (`gradcomp.plan.tolerance`).
        tolerances: the most that may be lost, by unit: "nats" (0.01 unless given), "points" of
            accuracy (0.3).
        by_seconds: without an optimizer, let seconds alone decide; False: recommend only what loses
            nothing under any optimizer. None: True where `methods` are given.
        repeated: `rates` as they were measured several times, for `break_even_range`.

    Raises:
        ValueError: no nodes, no methods, an unknown optimizer, a tolerance that is negative or not
            finite, or as of `gradcomp.plan.simulate`.
    """
    tolerance = Tolerance(
        optimizer,
        tolerances or {},
        by_seconds=methods is not None if by_seconds is None else by_seconds,
    )
    counts, chosen = sorted(set(nodes)), list(ways(node) if methods is None else methods)
    if not counts:
        raise ValueError(f"nodes must name at least one number of nodes, got {nodes!r}")
    if not chosen:
        raise ValueError(f"methods must name at least one, got {methods!r}")
    found = calibrate(to_calibrate(chosen, counts, node)) if rates is None else rates
    cache: dict[tuple[str, int], Simulation] = {}

    def run(method: Method, n: int, over: Link = link, rates: Rates = found) -> Simulation:
        return simulate(
            workload,
            method,
            n,
            over,
            node=node,
            rates=rates,
            cores=cores,
            double_buffering=double_buffering,
            stragglers=stragglers,
            transport=transport,
        )

    def seconds(method: Method, n: int) -> float:
        if (method.name, n) not in cache:
            cache[method.name, n] = run(method, n)
        return cache[method.name, n].seconds

    for n in counts:
        for method in chosen:
            cache[method.name, n] = run(method, n)
    permitted = [m for m in chosen if tolerance.permits(m)] or chosen

    def over_run(method: Method, n: int) -> float:
        """Seconds a step over a whole run, its warm start included."""
        start, first = tolerance.start(method, chosen)
        return (
            (1 - start) * seconds(method, n) + start * seconds(first or FP32, n)
            if start
            else seconds(method, n)
        )

    rows = tuple(Row(m, cache[m.name, n], over_run(m, n)) for n in counts for m in chosen)
    crossings = _crossings(permitted, [n for n in counts if n > 1], over_run)
    best = _best_nodes(workload, counts, permitted, over_run)
    method = _choose(permitted, best, over_run)
    plain = next((m for m in chosen if m.codec is None and not m.value_nbytes < FP32_NBYTES), None)
    took = over_run(method, best)
    speedup = seconds(plain, best) / took if plain and took else 1.0
    others = [m for m in permitted if m is not plain]

    def at_rate(method: Method, rate: float, rates: Rates = found) -> float:
        return run(method, best, Link(rate, link.latency_s), rates=rates).seconds

    even = _break_even(others, plain, best, at_rate)
    evens = None
    if even is not None and 0 < even < math.inf:
        likely = sorted(others, key=lambda m: at_rate(m, even))
        again = [_break_even(likely, plain, best, partial(at_rate, rates=one)) for one in repeated]
        found_rates = [even, *(rate for rate in again if rate)]
        evens = min(found_rates), max(found_rates)
    ratio = _ratio(workload, cache[method.name, best], double_buffering)
    optimum = _formula(
        workload,
        link,
        ratio,
        (
            transport.seconds("all_reduce", ring_bytes(workload.numel, best * node.ranks))
            if transport
            else 0
        ),
    )
    where = (
        "over these ranks"
        if transport is not None and math.isinf(link.bits_per_s)
        else f"over {link}"
    )
    text = sentence(
        workload.weak,
        where,
        method,
        best,
        speedup,
        evens,
        optimum,
        cache[method.name, best],
        plain,
        counts,
    )
    text += accuracy(
        tolerance, method, [m for m in chosen if m not in permitted], best, counts, over_run
    )
    if best > 1 and not double_buffering and not any(m.local is not None for m in chosen):
        late = rare(best, node)
        cache[late.name, best] = run(late, best)
        text += rarely(tolerance, late, cache[method.name, best], took, over_run(late, best))
    if not any(tolerance.permits(m) for m in chosen):
        under = f" under {optimizer}" if optimizer is not None else ""
        text = f"Nothing here is known to keep the accuracy{under}; by seconds alone: {text}"
    if best > 1 and not workload.weak and (alone := seconds(method, 1)) <= seconds(method, best):
        text = (
            f"Do not distribute: one node alone takes {format_seconds(alone)} a step. Else: {text}"
        )
    names = tuple(m.name for m in permitted)
    return Prediction(
        rows,
        crossings,
        method,
        best,
        speedup,
        even,
        optimum,
        text,
        found,
        tolerance,
        names,
        tuple(repeated),
        evens,
    )


def ways(node: Node) -> tuple[Method, ...]:
    """Return the methods to choose from on such nodes."""
    return METHODS if node.ranks == 1 else (*METHODS, *HIERARCHICAL)


def to_calibrate(
    methods: Sequence[Method], counts: Sequence[int], node: Node = ALONE
) -> list[Method]:
    """Return the methods whose rates simulations of `methods` on so many nodes need, and of what
    may be mentioned beside them.
    """
    everything = (*methods, *(rare(n, node) for n in counts))
    flat = [m for m in everything if m.exchange != "hierarchical"]
    mixed = [
        (m, between(m.each_step, n))
        for m in everything
        if m.exchange == "hierarchical"
        for n in counts
    ]
    others = [flat_one.after(m.local) if m.local is not None else flat_one for m, flat_one in mixed]
    return list({m.name: m for m in (*flat, *others, *([IDENTITY] if others else []))}.values())


def fastest(methods: Sequence[Method], n: int, seconds: Callable[[Method, int], float]) -> Method:
    """Return the fastest method; of equally fast ones the first."""
    limit = (1 + TIE) * min(seconds(m, n) for m in methods)
    return next(m for m in methods if seconds(m, n) <= limit)


def _choose(methods: Sequence[Method], n: int, seconds: Callable[[Method, int], float]) -> Method:
    """Return the fastest method, or the first one that is hardly slower: methods stand in order
    of what they change.
    """
    limit = (1 + ENOUGH) * seconds(fastest(methods, n, seconds), n)
    lossless = [m for m in methods if m.keeps_loss]
    for method in lossless:
        if seconds(method, n) <= limit:
            return method
    return fastest(methods, n, seconds)


def _best_nodes(
    workload: Workload,
    counts: Sequence[int],
    methods: Sequence[Method],
    seconds: Callable[[Method, int], float],
) -> int:
    """Return the fewest nodes that train, with the best method, nearly as fast as any number."""

    def pace(n: int) -> float:
        return min(seconds(m, n) for m in methods) / (n if workload.weak else 1)

    shortest = min(pace(n) for n in counts)
    return next(n for n in counts if pace(n) <= (1 + ENOUGH) * shortest)


def _crossings(
    methods: Sequence[Method], counts: Sequence[int], seconds: Callable[[Method, int], float]
) -> tuple[Crossing, ...]:
    """Return where the fastest method changes; between two counts by halving, as if none came
    back there.
    """
    out = []
    for start, end in itertools.pairwise(counts):
        low, last = start, fastest(methods, end, seconds)
        while (before := fastest(methods, low, seconds)) is not last:
            high = end
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (
                    (middle, high) if fastest(methods, middle, seconds) is before else (low, middle)
                )
            out.append(Crossing(high, before.name, fastest(methods, high, seconds).name))
            low = high
    return tuple(out)


def _break_even(
    others: Sequence[Method],
    plain: Method | None,
    n: int,
    seconds: Callable[[Method, float], float],
) -> float | None:
    """Return the link rate above which no other method saves more than 5 % of the seconds of a
    step with fp32.
    """
    if plain is None or not others or n == 1:
        return None

    def pays(rate: float) -> bool:
        limit = seconds(plain, rate) / (1 + ENOUGH)
        return any(seconds(m, rate) < limit for m in others)

    low, high = RATE_RANGE
    if pays(high):
        return math.inf
    if not pays(low):
        return 0.0
    while high / low > 1 + RATE_TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return math.sqrt(low * high)


def _ratio(workload: Workload, result: Simulation, double_buffering: bool) -> float:
    """Return the compression ratio of a method: bytes of an fp32 ring over bytes sent."""
    if result.sent_nbytes == 0:
        return 1.0
    return (
        ring_bytes(workload.numel, result.ranks)
        * (2 if double_buffering else 1)
        / result.sent_nbytes
    )


def _formula(workload: Workload, link: Link, ratio: float, t_transport: float) -> int | float:
    if workload.weak:
        return math.inf  # a step computes as much on any number of nodes
    if workload.t_frame == 0:
        return 1
    return optimal_nodes(
        minibatch=workload.minibatch,
        t_frame=workload.t_frame,
        t_post=workload.t_post,
        t_comm_fp32=8 * FP32_NBYTES * workload.numel / link.bits_per_s + t_transport,
        t_update=workload.t_update,
        compression_ratio=ratio,
        parallel_post=workload.parallel_post,
    )
