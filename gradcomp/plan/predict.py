"""Seconds a step over node counts and methods, where one becomes faster than another, and what
to do about it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradcomp.comm.rounds import ring_bytes
from gradcomp.plan.costs import (
    FP32_NBYTES,
    HIERARCHICAL,
    IDENTITY,
    METHODS,
    LocalSteps,
    Method,
    between,
    find_method,
)
from gradcomp.plan.links import Link, Node, format_rates, format_seconds
from gradcomp.plan.nodes import optimal_nodes
from gradcomp.plan.rates import Rates, calibrate
from gradcomp.plan.step import Setting
from gradcomp.plan.tolerance import OMITS, Tolerance
from gradcomp.plan.workload import ALONE, EVEN, Simulation, Stragglers, Transport, Workload

FP32 = METHODS[0]
TIE = 0.01  # methods this close are equally fast
ENOUGH = 0.05  # a difference in seconds a step that nobody would change a training script for
WAITS = 2 / 3  # share of a step in exposed exchange from which local steps are mentioned
RARELY = LocalSteps(30)  # what was measured
RATE_RANGE = (1e3, 1e15)  # bits a second between which compression may stop paying
RATE_TOLERANCE = 0.01


@dataclass(frozen=True)
class Row:
    """One method on some nodes.

    Attributes:
        method: how gradients are exchanged.
        result: of one step.
        seconds: a step, over a whole run: with those of the warm start that its loss was measured
            with.
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
        setting: what was simulated.
        rows: one per node count and method, in this order.
        crossings: where the fastest of the permitted methods changes, by number of nodes.
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
        optimal_nodes: of the formula of Seide et al. with the method's compression ratio and double
            buffering; may be inf.
        sentence: the recommendation.
        tolerance: what methods cost in accuracy.
        permitted: names of the methods that may be recommended: those that `tolerance` permits, or
            all where it permits none.
        repeated: the rates as they were measured one time after the other.
    """

    setting: Setting
    rows: tuple[Row, ...]
    crossings: tuple[Crossing, ...]
    method: Method
    nodes: int
    speedup: float
    break_even_bits_per_s: float | None
    break_even_range: tuple[float, float] | None
    optimal_nodes: int | float
    sentence: str
    tolerance: Tolerance
    permitted: tuple[str, ...]
    repeated: tuple[Rates, ...]

    @property
    def rates(self) -> Rates:
        """The rates that the simulations used."""
        return self.setting.rates

    @property
    def by_nodes(self) -> dict[int, list[Row]]:
        """The rows of every number of nodes."""
        out: dict[int, list[Row]] = {}
        for row in self.rows:
            out.setdefault(row.result.nodes, []).append(row)
        return out

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
        tolerances: the most that may be lost, by unit: "nats" (0.02 unless given), "points" of
            accuracy (0.3).
        by_seconds: without an optimizer, let seconds alone decide; False: recommend only what loses
            nothing under any optimizer. None: True where `methods` are given.
        repeated: `rates` as they were measured several times, for `break_even_range`.

    Raises:
        TypeError: a tolerance or `cores` that is not a number.
        ValueError: no nodes, no methods, an unknown optimizer, a tolerance that is negative or not
            finite, or as of `gradcomp.plan.simulate`.
    """
    for name, given in (("nodes", nodes), ("methods", methods)):
        if given is not None and not len(given):
            raise ValueError(f"{name} must name at least one, got {given!r}")
    chosen = list(ways(node) if methods is None else methods)
    by_seconds = methods is not None if by_seconds is None else by_seconds
    tolerance = Tolerance(optimizer, tolerances or {}, by_seconds)
    found = calibrate(to_calibrate(chosen, nodes, node)) if rates is None else rates
    setting = Setting(
        workload, link, node, found, cores, double_buffering, stragglers or EVEN, transport
    )
    return recommend(setting, nodes, chosen, tolerance, repeated)


def recommend(
    setting: Setting,
    nodes: Sequence[int],
    methods: Sequence[Method],
    tolerance: Tolerance,
    repeated: Sequence[Rates] = (),
) -> Prediction:
    """Return what `predict` finds for methods and numbers of nodes, at least one of each."""
    counts, them = sorted(set(nodes)), _Comparison(setting, methods, tolerance)
    rows = tuple(Row(m, them.result(m, n), them.seconds(m, n)) for n in counts for m in methods)
    best = them.best_nodes(counts)
    method, result = them.choose(best), them.result(them.choose(best), best)
    took = them.seconds(method, best)
    speedup = them.result(them.plain, best).seconds / took if them.plain and took else 1.0
    even, span = them.break_even(best, setting.rates), None
    if even is not None and 0 < even < math.inf:
        again = (them.break_even(best, rates) for rates in repeated)
        evens = [even, *(rate for rate in again if rate)]
        span = min(evens), max(evens)
    optimum = _formula(setting, setting.ratio(result), result.ranks)
    text = _sentence(them, method, result, counts, speedup, span, optimum)
    text += _accuracy(them, method, best, counts) + _rarely(them, method, best)
    if not any(map(tolerance.permits, methods)):
        under = f" under {tolerance.optimizer}" if tolerance.optimizer is not None else ""
        text = f"Nothing here is known to keep the accuracy{under}; by seconds alone: {text}"
    if best > 1 and not setting.workload.weak:
        alone = them.result(method, 1).seconds
        if alone <= result.seconds:
            once = format_seconds(alone)
            text = f"Do not distribute: one node alone takes {once} a step. Else: {text}"
    return Prediction(
        setting,
        rows,
        them.crossings([n for n in counts if n > 1]),
        method,
        best,
        speedup,
        even,
        span,
        optimum,
        text,
        tolerance,
        tuple(m.name for m in them.permitted),
        tuple(repeated),
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
    found: dict[str, Method] = {}
    for method in (*methods, *(rare(n, node) for n in counts)):
        wanted = [method]
        if method.exchange == "hierarchical":  # inside nodes, and between so many
            flat = [between(method.each_step, n) for n in counts]
            wanted = [m if method.local is None else m.after(method.local) for m in flat]
            wanted.append(IDENTITY)
        found |= {m.name: m for m in wanted}
    return list(found.values())


def rare(n: int, node: Node) -> Method:
    """Return what is mentioned where the network takes two thirds of every step: the default
    exchange of ternary codes, after H local steps.
    """
    method = find_method("terngrad hierarchical")
    return (method if node.ranks > 1 else between(method, n)).after(RARELY)


class _Comparison:
    """Seconds a step of methods on numbers of nodes; each is simulated when first asked for.

    Attributes:
        permitted: the methods that may be recommended, in order of what they change.
        plain: DDP's own exchange of fp32; None: not among the methods.
    """

    def __init__(self, setting: Setting, methods: Sequence[Method], tolerance: Tolerance) -> None:
        self.setting, self.methods, self.tolerance = setting, methods, tolerance
        self.permitted = [m for m in methods if tolerance.permits(m)] or list(methods)
        fp32 = (m for m in methods if m.codec is None and m.value_nbytes == FP32_NBYTES)
        self.plain = next(fp32, None)
        self._results: dict[tuple[str, int], Simulation] = {}

    def result(self, method: Method, n: int) -> Simulation:
        key = method.name, n
        if key not in self._results:
            self._results[key] = self.setting.simulate(method, n)
        return self._results[key]

    def seconds(self, method: Method, n: int) -> float:
        """Return seconds a step over a whole run, its warm start included."""
        start, first = self.tolerance.start(method, self.methods)
        own = self.result(method, n).seconds
        return (1 - start) * own + start * self.result(first or FP32, n).seconds if start else own

    def fastest(self, n: int) -> Method:
        """Return the fastest permitted method; of equally fast ones the first."""
        limit = (1 + TIE) * min(self.seconds(m, n) for m in self.permitted)
        return next(m for m in self.permitted if self.seconds(m, n) <= limit)

    def choose(self, n: int) -> Method:
        """Return the fastest method, or the first one without a codec that is hardly slower."""
        fastest = self.fastest(n)
        limit = (1 + ENOUGH) * self.seconds(fastest, n)
        close = (m for m in self.permitted if m.keeps_loss and self.seconds(m, n) <= limit)
        return next(close, fastest)

    def best_nodes(self, counts: Sequence[int]) -> int:
        """Return the fewest nodes whose best method trains nearly as fast as any number."""
        weak = self.setting.workload.weak
        pace = {
            n: min(self.seconds(m, n) for m in self.permitted) / (n if weak else 1) for n in counts
        }
        return next(n for n in counts if pace[n] <= (1 + ENOUGH) * min(pace.values()))

    def crossings(self, counts: Sequence[int]) -> tuple[Crossing, ...]:
        """Return where the fastest method changes; between two counts by halving, as if none came
        back there.
        """
        out = []
        for low, end in itertools.pairwise(counts):
            while (before := self.fastest(low)) is not self.fastest(end):
                high = end
                while high - low > 1:
                    middle = (low + high) // 2
                    same = self.fastest(middle) is before
                    low, high = (middle, high) if same else (low, middle)
                out.append(Crossing(high, before.name, self.fastest(high).name))
                low = high
        return tuple(out)

    def break_even(self, n: int, rates: Rates) -> float | None:
        """Return the link rate above which no permitted method saves more than 5 % of the seconds
        of a step with fp32.
        """
        plain, others = self.plain, [m for m in self.permitted if m is not self.plain]
        if plain is None or not others or n == 1:
            return None

        def pays(rate: float) -> bool:
            link = Link(rate, self.setting.link.latency_s)
            setting = replace(self.setting, link=link, rates=rates)
            limit = setting.simulate(plain, n).seconds / (1 + ENOUGH)
            return any(setting.simulate(m, n).seconds < limit for m in others)

        low, high = RATE_RANGE
        if pays(high):
            return math.inf
        if not pays(low):
            return 0.0
        while high / low > 1 + RATE_TOLERANCE:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if pays(middle) else (low, middle)
        return math.sqrt(low * high)


def _formula(setting: Setting, ratio: float, ranks: int) -> int | float:
    """Return the number of nodes of the formula; collectives as measured count as those of fp32."""
    work, transport = setting.workload, setting.transport
    if work.weak:
        return math.inf  # a step computes as much on any number of nodes
    if work.t_frame == 0:
        return 1
    measured = transport.seconds("all_reduce", ring_bytes(work.numel, ranks)) if transport else 0
    return optimal_nodes(
        minibatch=work.minibatch,
        t_frame=work.t_frame,
        t_post=work.t_post,
        t_comm_fp32=8 * FP32_NBYTES * work.numel / setting.link.bits_per_s + measured,
        t_update=work.t_update,
        compression_ratio=ratio,
        parallel_post=work.parallel_post,
    )


# ---- the recommendation in words -----------------------------------------------------------------


def _sentence(
    them: _Comparison,
    method: Method,
    result: Simulation,
    counts: Sequence[int],
    speedup: float,
    span: tuple[float, float] | None,
    optimum: float,
) -> str:
    """Return the recommendation by seconds; `span` is the range of rates at which compression stops
    paying, None if there is none.
    """
    setting, n, took = them.setting, result.nodes, format_seconds(result.seconds)
    where = "over these ranks" if setting.as_measured else f"over {setting.link}"
    if n == 1:
        return (
            f"Do not compress and do not distribute: {where} no more nodes are faster than one"
            f" ({took} a step)."
        )
    largest = ", the largest number asked for," if n == counts[-1] and len(counts) > 1 else ""
    train = f"{where}, train on {n} nodes ({took} a step){largest}"
    times = f"{speedup:.2g} times as fast as fp32" if them.plain is not None else ""
    if method.compresses or method.local is not None:
        verb = "Compress" if method.local is None else "Exchange rarely"
        text = f"{verb}: {train} with {method.name}{times and f', {times}'}."
        if span is not None:
            what = "compression" if method.compresses else "exchanging rarely"
            text += f" Above {format_rates(*span)} {what} stops paying there."
    elif method.value_nbytes < FP32_NBYTES:
        text = (
            f"Do not compress: {train} with {method.name}, {times or 'without a codec'}; codecs"
            " gain less than 5 % more."
        )
    else:
        text = f"Do not compress: {train} in {method.name}; nothing else gains 5 %."
        if span is not None:
            text += f" Below {format_rates(*span)} compression would pay there."
    if setting.workload.weak or method.local is not None:
        return text
    bound = "sets no bound" if math.isinf(optimum) else f"gives {optimum} node{'s' * (optimum > 1)}"
    return f"{text} With double buffering the formula of Seide et al. {bound} for {method.name}."


def _accuracy(them: _Comparison, method: Method, n: int, counts: Sequence[int]) -> str:
    """Return what is said of accuracy: of the method recommended, and of the fastest way of every
    codec that is left out.

    A codec is compared on the `n` nodes that are recommended; where that is one node, on the best
    of `counts`.
    """
    tolerance, left_out = them.tolerance, [m for m in them.methods if m not in them.permitted]
    if tolerance.optimizer is None and not tolerance.by_seconds:
        return f" {OMITS}" if left_out else ""
    text, said, own = tolerance.of(method) if n > 1 else "", set(), them.seconds(method, n)
    took = {m: min(them.seconds(m, k) for k in (counts if n == 1 else [n])) for m in left_out}
    for other in sorted(left_out, key=took.__getitem__):
        if other.kind not in said and took[other] * (1 + ENOUGH) < own:
            said.add(other.kind)
            text += tolerance.against(other, own / took[other])
    return text


def _rarely(them: _Comparison, method: Method, n: int) -> str:
    """Return what local steps would do, where the recommended method waits for the network for most
    of its time; "" where it does not, or local steps were asked for.
    """
    local = any(m.local is not None for m in them.methods)
    if n == 1 or them.setting.double_buffering or local:
        return ""
    late, result = rare(n, them.setting.node), them.result(method, n)
    if result.exposed_seconds <= WAITS * result.seconds:
        return ""
    own, instead = them.seconds(method, n), them.seconds(late, n)
    if instead * (1 + ENOUGH) >= own:
        return ""
    named = dict.fromkeys(
        f"{row.price} ({row.training})" for row in them.tolerance.costs(late).values() if row
    )
    costs = f"cost {', '.join(named)}" if named else "cost an accuracy that was not measured"
    return (
        f" The network takes {result.exposed_seconds / result.seconds:.0%} of that step: local"
        f" steps (--every {RARELY.every}, gradcomp.DiLoCo) with terngrad would take"
        f" {format_seconds(instead)} a step, {own / instead:.2g} times as fast, and {costs}."
    )
