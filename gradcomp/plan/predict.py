"""Predict the seconds of a step for every method and number of nodes, find where the fastest
method changes, and recommend one.

A shorter step means a shorter time to a given loss only if each step learns as much as with fp32.
A codec whose measured loss under an optimizer exceeds the tolerance is therefore not recommended,
however short its steps are. All others are assumed to need as many steps as fp32. The number of
extra steps that would make up for a loss is not modelled: only two points of fp32's curve are
known (docs/explanation/accuracy.md), one of them from a single seed on the slope where attention
is learnt, and a line through them would only bound that number from below.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from gradcomp.comm.rounds import ring_bytes
from gradcomp.engine.rate import DIVIDES, OTHERS
from gradcomp.plan.accuracy import (
    FAMILIES,
    TABLE,
    TOLERANCES,
    Measured,
    check_optimizer,
    expected,
    family_of_names,
)
from gradcomp.plan.advice import FALLBACK
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
from gradcomp.plan.nodes import exact, optimal_nodes
from gradcomp.plan.rates import Rates, calibrate
from gradcomp.plan.step import Setting
from gradcomp.plan.workload import ALONE, EVEN, Simulation, Stragglers, Transport, Workload

FP32 = METHODS[0]
TIE = 0.01  # methods whose seconds differ by at most this share are equally fast
ENOUGH = 0.05  # smallest gain in seconds per step that is worth changing a training script for
WAITS = 2 / 3  # share of exposed exchange in a step above which local steps are mentioned
RARELY = LocalSteps(30)  # the only number of local steps whose accuracy was measured
RATE_RANGE = (1e3, 1e15)  # bits a second between which compression may stop paying
RATE_TOLERANCE = 0.01

# ---- accuracy ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tolerance:
    """Accuracy losses of methods under one optimizer, and the largest loss that is accepted.

    Attributes:
        optimizer: name of the optimizer, such as "adamw"; None if it is not known.
        limits: largest accepted loss, by unit ("nats", "points").
        by_seconds: used only if `optimizer` is None. True permits every codec that was measured
            under any optimizer. False permits only the codec that ``codec="auto"`` takes for an
            unknown optimizer.

    Raises:
        TypeError: a limit is not a number.
        ValueError: an optimizer or unit is unknown, or a limit is negative or not finite.
    """

    optimizer: str | None = None
    limits: Mapping[str, float] = field(default_factory=lambda: dict(TOLERANCES))
    by_seconds: bool = True

    def __post_init__(self) -> None:
        if self.optimizer is not None:
            check_optimizer(self.optimizer)
        for unit, limit in self.limits.items():
            if unit not in TOLERANCES:
                raise ValueError(f"tolerances are in {' and '.join(TOLERANCES)}, got {unit!r}")
            exact(f"the tolerance in {unit}", limit)
        object.__setattr__(self, "limits", {**TOLERANCES, **self.limits})

    @property
    def columns(self) -> dict[str, str | None]:
        """Optimizer families to show losses for, by display name: the optimizer's own, or all."""
        if self.optimizer is not None:
            return {self.optimizer: family_of_names([self.optimizer])}
        return {name: family for family, name in FAMILIES.items()}

    @property
    def under(self) -> str:
        """End of a sentence that names the optimizer, "" if it is not known."""
        return f" under {self.optimizer}" if self.optimizer is not None else ""

    @property
    def scales_lr(self) -> bool:
        """Whether ``precondition=True`` also scales the learning rate of this optimizer
        (`gradcomp.engine.rate`), as in rows with `Measured.scale_lr`; True without an optimizer.
        """
        name = "adam" if self.optimizer is None else self.optimizer.lower()
        others = (*OTHERS, "split")  # see `gradcomp.plan.advice.resolve_auto`
        return any(word in name for word in DIVIDES) and not any(word in name for word in others)

    def costs(self, method: Method) -> dict[str, Measured | None]:
        """Return the measured row of a method for each of `columns`; None: not measured."""
        local, codec = method.local, method.codec
        # never measured: an outer optimizer at every step, fragments, delayed averages
        late = local is not None and (local.every == 1 or local.fragments > 1 or local.delay)
        if codec is None or method.keeps_loss or late:
            return dict.fromkeys(self.columns)
        every = 1 if local is None else local.every
        table = [row for row in TABLE if not row.scale_lr or self.scales_lr]
        return {
            name: expected(family, codec, table, self.limits, every)
            for name, family in self.columns.items()
        }

    def cost(self, method: Method) -> Measured | None:
        """Return a method's row under the optimizer; None: not measured, or no optimizer."""
        return self.costs(method)[self.optimizer] if self.optimizer is not None else None

    def as_measured(self, method: Method) -> Method:
        """Return a method with ``precondition`` as in the measurement of its loss."""
        row = self.cost(method)
        return method if row is None else replace(method, precondition=row.precondition)

    def permits(self, method: Method) -> bool:
        """Return whether a method may be recommended: always without a codec. Under an unknown
        optimizer only the fallback of ``codec="auto"`` may be, unless `by_seconds` permits more.
        """
        if method.codec is None or method.keeps_loss:
            return True
        if self.optimizer is None and self.by_seconds:
            measured = {row.codec.name for row in TABLE}
            return not method.compresses or method.codec.name in measured
        if self.optimizer is None or self.columns[self.optimizer] is None:
            return method.codec.name == FALLBACK.name and method.local is None
        return self.is_within(method)

    def is_within(self, method: Method) -> bool:
        """Return whether a method's loss is within the limits under all optimizers shown."""
        return all(
            row is not None and row.counts and row.excess(self.limits) <= 1
            for row in self.costs(method).values()
        )

    def start(self, method: Method, methods: Sequence[Method]) -> tuple[float, Method | None]:
        """Return the share of warm-up steps, and the method in them (None: fp32), as measured."""
        row = self.cost(method)
        if row is None or row.warmup_codec is None:
            return (row.start if row is not None else 0.0), None
        name = row.warmup_codec.name
        alike = [m for m in methods if m.codec is not None and m.codec.name == name]
        same = [m for m in alike if m.name.split()[1:] == method.name.split()[1:]]
        return row.start, next(iter((*same, *alike)), None)

    def known(self, method: Method) -> str:
        """Return what a method costs under each optimizer that it was measured under, as text."""
        rows = [row for row in self.costs(method).values() if row is not None]
        return ", ".join(f"{row.price} under {row.training.optimizer}" for row in rows)

    def of(self, method: Method) -> str:
        """Return the sentence on the accuracy of a recommended method, "" if it loses none."""
        if method.keeps_loss:
            return ""
        if self.optimizer is not None:
            row = self.cost(method)
            if row is None:
                return f" What it costs in accuracy under {self.optimizer} was not measured."
            return f" It costs {row.price} ({row.training})."
        known = self.known(method)
        name = method.kind if method.local is None else f"{method.kind} {method.local}"
        costs = f"{name} costs {known}" if known else f"what {name} costs was not measured"
        return (
            f" This is by seconds a step alone: {costs}. Name the optimizer, and what loses too"
            " much is left out."
        )


# ---- seconds -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Prediction for one method on one number of nodes.

    Attributes:
        method: how gradients are exchanged.
        result: simulation of one step after the warm-up.
        seconds: mean seconds per step over a whole run, including the warm-up steps with which the
            method's loss was measured.
    """

    method: Method
    result: Simulation
    seconds: float


@dataclass(frozen=True)
class Crossing:
    """Number of `nodes` at which `after` replaces `before` as the fastest method; of methods within
    1 % of each other, the first counts as the fastest.
    """

    nodes: int
    before: str
    after: str


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds per step by method and number of nodes, and the recommendation; each figure
    is computed on first access.

    Attributes:
        setting: what is simulated.
        methods: methods that are compared, in this order.
        counts: numbers of nodes, ascending.
        tolerance: accuracy losses of the methods, and the accepted loss.
        repeated: codec rates of each repeated measurement; empty if there was only one.
        transports: the same for the transport of `setting`.
    """

    setting: Setting
    methods: tuple[Method, ...]
    counts: tuple[int, ...]
    tolerance: Tolerance
    repeated: tuple[Rates, ...] = ()
    transports: tuple[Transport, ...] = ()
    _simulated: dict[tuple[str, int], Simulation] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def rates(self) -> Rates:
        """CPU seconds of the codecs that the simulations use."""
        return self.setting.rates

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row for each pair of node count and method, by node count first."""
        return tuple(
            Row(m, self.simulated(m, n), self.seconds(m, n))
            for n in self.counts
            for m in self.methods
        )

    def result(self, method: str, nodes: int) -> Simulation:
        """Return the simulation of a method on a number of nodes; KeyError if there is none."""
        return {(row.method.name, row.result.nodes): row.result for row in self.rows}[method, nodes]

    @cached_property
    def candidates(self) -> list[Method]:
        """Methods that may be recommended: those that `tolerance` permits, or all if none is."""
        return [m for m in self.methods if self.tolerance.permits(m)] or list(self.methods)

    @property
    def permitted(self) -> tuple[str, ...]:
        """Names of the `candidates`."""
        return tuple(m.name for m in self.candidates)

    @cached_property
    def plain(self) -> Method | None:
        """DDP's own fp32 all_reduce; None if it is not one of the methods."""
        fp32 = (m for m in self.methods if m.codec is None and m.value_nbytes == FP32_NBYTES)
        return next(fp32, None)

    @cached_property
    def nodes(self) -> int:
        """Recommended number of nodes: the smallest within 5 % of the shortest step (in weak
        scaling, of the most samples per second).
        """
        weak = self.setting.workload.weak
        best = {n: min(self.seconds(m, n) for m in self.candidates) for n in self.counts}
        pace = {n: seconds / (n if weak else 1) for n, seconds in best.items()}
        return next(n for n in self.counts if pace[n] <= (1 + ENOUGH) * min(pace.values()))

    @cached_property
    def method(self) -> Method:
        """Recommended method: the fastest, or the first without a codec within 5 % of it."""
        fastest = self.fastest(self.nodes)
        limit = (1 + ENOUGH) * self.seconds(fastest, self.nodes)
        plain = (m for m in self.candidates if m.keeps_loss)
        return next((m for m in plain if self.seconds(m, self.nodes) <= limit), fastest)

    @cached_property
    def best(self) -> Simulation:
        """Simulation of `method` on `nodes`, as recommended."""
        return self.simulated(self.method, self.nodes)

    @property
    def speedup(self) -> float:
        """Seconds per step with fp32 divided by those with `method`, on `nodes`; 1 without fp32."""
        took = self.seconds(self.method, self.nodes)
        return self.simulated(self.plain, self.nodes).seconds / took if self.plain and took else 1.0

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """Numbers of nodes at which the fastest permitted method changes, by bisection between two
        `counts`; a method that is replaced is assumed not to become the fastest again in between.
        """
        out = []
        for low, end in itertools.pairwise(n for n in self.counts if n > 1):
            while (before := self.fastest(low)) is not self.fastest(end):
                high = end
                while high - low > 1:
                    middle = (low + high) // 2
                    same = self.fastest(middle) is before
                    low, high = (middle, high) if same else (low, middle)
                out.append(Crossing(high, before.name, self.fastest(high).name))
                low = high
        return tuple(out)

    @cached_property
    def break_even_bits_per_s(self) -> float | None:
        """Link rate, in bits per second, above which no method is over 5 % faster than fp32 on
        `nodes`: inf if some method is at every rate, 0 if none is at any. None on one node, without
        fp32, or with fp32 alone.
        """
        return self._break_even(self.setting)

    @cached_property
    def break_even_range(self) -> tuple[float, float] | None:
        """Lowest and highest `break_even_bits_per_s` over `setting` and the repeated measurements;
        None where it is None, 0 or inf.
        """
        even = self.break_even_bits_per_s
        if not even or even == math.inf:
            return None
        here, evens = self.setting, [even]
        for rates, over in itertools.zip_longest(self.repeated, self.transports):
            other = replace(here, rates=rates or here.rates, transport=over or here.transport)
            found = self._break_even(other)
            evens.append(even if found is None else found)
        return min(evens), max(evens)

    @property
    def optimal_nodes(self) -> int | float:
        """Number of nodes by the formula of Seide et al. with double buffering and the compression
        ratio of `best`, may be inf. The transport counts with its seconds of an fp32 all_reduce.
        """
        work, transport = self.setting.workload, self.setting.transport
        if work.weak:
            return math.inf  # a step computes as much on any number of nodes
        if work.t_frame == 0:
            return 1
        t_comm = 8 * FP32_NBYTES * work.numel / self.setting.link.bits_per_s
        if transport is not None:
            t_comm += sum(transport.parts("all_reduce", ring_bytes(work.numel, self.best.ranks)))
        return optimal_nodes(
            minibatch=work.minibatch,
            t_frame=work.t_frame,
            t_post=work.t_post,
            t_comm_fp32=t_comm,
            t_update=work.t_update,
            compression_ratio=self.setting.ratio(self.best),
        )

    @cached_property
    def sentence(self) -> str:
        """Recommendation as text."""
        tolerance = self.tolerance
        text = _by_seconds(self) + _accuracy(self) + _rarely(self)
        if not any(map(tolerance.permits, self.methods)):
            known = f"Nothing here is known to keep the accuracy{tolerance.under}"
            text = f"{known}; by seconds alone: {text}"
        if self.nodes > 1 and not self.setting.workload.weak:
            alone = self.simulated(self.method, 1).seconds
            if alone <= self.best.seconds:
                once = format_seconds(alone)
                text = f"Do not distribute: one node alone takes {once} a step. Else: {text}"
        return text

    def simulated(self, method: Method, n: int) -> Simulation:
        """Return the simulation of any method on `n` nodes; results are cached."""
        key = method.name, n
        if key not in self._simulated:
            self._simulated[key] = self.setting.simulate(self.tolerance.as_measured(method), n)
        return self._simulated[key]

    def seconds(self, method: Method, n: int) -> float:
        """Return the mean seconds per step over a whole run, warm-up included."""
        start, first = self.tolerance.start(method, self.methods)
        own = self.simulated(method, n).seconds
        if not start:
            return own
        return (1 - start) * own + start * self.simulated(first or FP32, n).seconds

    def fastest(self, n: int) -> Method:
        """Return the fastest permitted method on `n` nodes, the first of equally fast ones."""
        limit = (1 + TIE) * min(self.seconds(m, n) for m in self.candidates)
        return next(m for m in self.candidates if self.seconds(m, n) <= limit)

    def _break_even(self, setting: Setting) -> float | None:
        plain, n = self.plain, self.nodes
        others = [m for m in self.candidates if m is not plain]
        if plain is None or not others or n == 1:
            return None

        def pays(rate: float) -> bool:
            link = Link(rate, setting.link.latency_s)
            at = replace(self, setting=replace(setting, link=link))
            limit = at.simulated(plain, n).seconds / (1 + ENOUGH)
            return any(at.simulated(m, n).seconds < limit for m in others)

        low, high = RATE_RANGE
        if pays(high):
            return math.inf
        if not pays(low):
            return 0.0
        while high / low > 1 + RATE_TOLERANCE:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if pays(middle) else (low, middle)
        return math.sqrt(low * high)


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
    """Simulate every method on every number of nodes and recommend one.

    Args:
        workload: model, minibatch and computing times. The minibatch is split over all ranks
            (strong scaling) unless ``workload.weak``.
        link: network link of every node.
        nodes: numbers of nodes to compare, each 1 to 4096.
        node: number of ranks on a node and the link between them; one rank by default.
        methods: methods to compare; None: all, including hierarchical ones if nodes have several
            ranks.
        rates: CPU seconds of the codecs; None: measured here (`gradcomp.plan.calibrate`).
        cores, double_buffering, stragglers, transport: as in `gradcomp.plan.simulate`.
        optimizer: name of the optimizer, such as "adamw" or "sgd". Codecs whose measured loss
            under it exceeds the tolerance, or that were not measured under it, are not recommended.
        tolerances: largest accepted loss, by unit: "nats" (default 0.02), "points" of accuracy
            (default 0.3).
        by_seconds: without an optimizer, recommend by seconds alone; False: recommend only the
            codec of ``codec="auto"`` for an unknown optimizer. None: True if `methods` are given.
        repeated: results of repeated measurements of `rates`, for `break_even_range`.

    Raises:
        TypeError: a tolerance or `cores` is not a number.
        ValueError: `nodes` or `methods` are empty, the optimizer is unknown, a tolerance is
            negative or not finite, or as in `gradcomp.plan.simulate`.
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
    counts = tuple(sorted(set(nodes)))
    prediction = Prediction(setting, tuple(chosen), counts, tolerance, tuple(repeated))
    prediction.sentence  # noqa: B018  raises here for a setting that cannot be simulated
    return prediction


def ways(node: Node) -> tuple[Method, ...]:
    """Return all methods for these nodes; hierarchical ones need several ranks on a node."""
    return METHODS if node.ranks == 1 else (*METHODS, *HIERARCHICAL)


def to_calibrate(
    methods: Sequence[Method], counts: Sequence[int], node: Node = ALONE
) -> list[Method]:
    """Return the methods whose rates a prediction needs, including `rare`. A hierarchical method
    needs those of the method between nodes and of `IDENTITY` inside them.
    """
    found: dict[str, Method] = {}
    for method in (*methods, *(rare(n, node) for n in counts)):
        wanted = [method]
        if method.exchange == "hierarchical":
            flat = [between(method.each_step, n) for n in counts]
            wanted = [m if method.local is None else m.after(method.local) for m in flat]
            wanted.append(IDENTITY)
        found |= {m.name: m for m in wanted}
    return list(found.values())


def rare(n: int, node: Node) -> Method:
    """Return ``terngrad`` with its default exchange, after `RARELY` local steps."""
    method = find_method("terngrad hierarchical")
    return (method if node.ranks > 1 else between(method, n)).after(RARELY)


# ---- the recommendation in words -----------------------------------------------------------------


def _by_seconds(them: Prediction) -> str:
    setting, method, n = them.setting, them.method, them.nodes
    took, span = format_seconds(them.best.seconds), them.break_even_range
    where = "over these ranks" if setting.as_measured else f"over {setting.link}"
    if n == 1:
        return (
            f"Do not compress and do not distribute: {where} no more nodes are faster than one"
            f" ({took} a step)."
        )
    largest = ", the largest number asked for," if n == them.counts[-1] > them.counts[0] else ""
    train = f"{where}, train on {n} nodes ({took} a step){largest}"
    times = f"{them.speedup:.2g} times as fast as fp32" if them.plain is not None else ""
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
    optimum = them.optimal_nodes
    bound = "sets no bound" if math.isinf(optimum) else f"gives {optimum} node{'s' * (optimum > 1)}"
    return f"{text} With double buffering the formula of Seide et al. {bound} for {method.name}."


def _accuracy(them: Prediction) -> str:
    """Return the sentences on the accuracy of the recommended method and of the fastest method of
    every codec that is left out, on the recommended nodes; if that is one node, on the best number.
    """
    method, n = them.method, them.nodes
    counts = them.counts if n == 1 else [n]
    tolerance, left_out = them.tolerance, [m for m in them.methods if m not in them.candidates]
    own = them.seconds(method, n)
    took = {m: min(them.seconds(m, k) for k in counts) for m in left_out}
    if tolerance.optimizer is None and not tolerance.by_seconds:
        faster = [m for m in left_out if tolerance.is_within(m) and took[m] * (1 + ENOUGH) < own]
        text = " Only what is safe for every optimizer is recommended: name yours with --optimizer."
        if faster:
            best = min(faster, key=took.__getitem__)
            text += f" {best.name} would be {own / took[best]:.2g} times as fast a step"
            text += f" and costs {tolerance.known(best)}."
        return text if left_out else ""
    text, said = tolerance.of(method) if n > 1 else "", set()
    for other in sorted(left_out, key=took.__getitem__):
        if other.kind not in said and took[other] * (1 + ENOUGH) < own:
            said.add(other.kind)
            row, under = tolerance.cost(other), tolerance.under
            costs = f"costs {row.price}" if row is not None else f"was not measured{under}"
            but = "" if row is None or row.counts else f" ({row.doubt or 'too few seeds'})"
            text += f" {other.name} would be {own / took[other]:.2g} times as fast a step and"
            text += f" {costs}{but}; not recommended."
    return text


def _rarely(them: Prediction) -> str:
    """Return the sentence on local steps if most of the recommended step waits for the network."""
    method, n, result = them.method, them.nodes, them.best
    local = any(m.local is not None for m in them.methods)
    waits = result.exposed_seconds > WAITS * result.seconds
    if n == 1 or them.setting.double_buffering or local or not waits:
        return ""
    late = rare(n, them.setting.node)
    own, instead = them.seconds(method, n), them.seconds(late, n)
    if instead * (1 + ENOUGH) >= own:
        return ""
    named = dict.fromkeys(
        f"{row.price} ({row.training})" for row in them.tolerance.costs(late).values() if row
    )
    if not named:
        return ""
    return (
        f" The network takes {result.exposed_seconds / result.seconds:.0%} of that step: local"
        f" steps (--every {RARELY.every}, gradcomp.DiLoCo) with terngrad would take"
        f" {format_seconds(instead)} a step, {own / instead:.2g} times as fast, and cost"
        f" {', '.join(named)}."
    )
