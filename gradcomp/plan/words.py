"""The planner's recommendation in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gradcomp.plan.costs import FP32_NBYTES, LocalSteps, Method, between, find_method
from gradcomp.plan.links import Node, format_rates, format_seconds
from gradcomp.plan.tolerance import OMITS, Tolerance
from gradcomp.plan.workload import Simulation

ENOUGH = 0.05  # a difference in seconds a step that nobody would change a training script for
WAITS = 2 / 3  # share of a step in exposed exchange from which local steps are mentioned
RARELY = LocalSteps(30)  # what was measured


def sentence(
    weak: bool,
    where: str,
    method: Method,
    n: int,
    speedup: float,
    evens: tuple[float, float] | None,
    optimum: float,
    result: Simulation,
    plain: Method | None,
    counts: Sequence[int],
) -> str:
    """Return the recommendation; `evens` is the range of rates at which compression stops
    paying, None if there is none.
    """
    took = format_seconds(result.seconds)
    if n == 1:
        return (
            f"Do not compress and do not distribute: {where} no more nodes are faster than one"
            f" ({took} a step)."
        )
    place = f"on {n} nodes ({took} a step)" + (
        ", the largest number asked for," if n == counts[-1] and len(counts) > 1 else ""
    )
    if method.compresses or method.local is not None:
        verb = "Compress" if method.local is None else "Exchange rarely"
        gain = f", {speedup:.2g} times as fast as fp32" if plain is not None else ""
        text = f"{verb}: {where}, train {place} with {method.name}{gain}."
        if evens is not None:
            what = "compression" if method.compresses else "exchanging rarely"
            text += f" Above {format_rates(*evens)} {what} stops paying there."
    elif method.value_nbytes < FP32_NBYTES:
        gain = f"{speedup:.2g} times as fast as fp32" if plain is not None else "without a codec"
        text = (
            f"Do not compress: {where}, train {place} with {method.name}, {gain}; codecs gain less"
            " than 5 % more."
        )
    else:
        text = f"Do not compress: {where}, train {place} in {method.name}; nothing else gains 5 %."
        if evens is not None:
            text += f" Below {format_rates(*evens)} compression would pay there."
    if weak or method.local is not None:
        return text
    bound = (
        "sets no bound"
        if math.isinf(optimum)
        else f"gives {optimum} node{'s' if optimum > 1 else ''}"
    )
    return f"{text} With double buffering the formula of Seide et al. {bound} for {method.name}."


def accuracy(
    tolerance: Tolerance,
    method: Method,
    left_out: Sequence[Method],
    n: int,
    counts: Sequence[int],
    seconds: Callable[[Method, int], float],
) -> str:
    """Return what is said of accuracy: of the method recommended, and of the fastest way of every
    codec that is left out.

    A codec is compared on the `n` nodes that are recommended; where that is one node, on the best
    of `counts`.
    """
    if tolerance.optimizer is None and not tolerance.by_seconds:
        return f" {OMITS}" if left_out else ""
    text, said = tolerance.of(method) if n > 1 else "", set()
    took = {
        other: min(seconds(other, k) for k in (counts if n == 1 else [n])) for other in left_out
    }
    for other in sorted(left_out, key=took.__getitem__):
        name = other.name.split()[0]
        if name not in said and took[other] * (1 + ENOUGH) < seconds(method, n):
            said.add(name)
            text += tolerance.against(other, seconds(method, n) / took[other])
    return text


def rare(n: int, node: Node) -> Method:
    """Return what is mentioned where the network takes two thirds of every step: ternary as it
    comes, after H local steps.
    """
    method = find_method("terngrad hierarchical")
    return (method if node.ranks > 1 else between(method, n)).after(RARELY)


def rarely(
    tolerance: Tolerance, method: Method, result: Simulation, seconds: float, instead_s: float
) -> str:
    """Return what local steps would do, where a step waits for the network for most of its time; ""
    where it does not.

    Args:
        tolerance: what methods cost in accuracy.
        method: `rare`.
        result: of what is recommended.
        seconds, instead_s: a step of that and of `method`, over a whole run.
    """
    if result.exposed_seconds <= WAITS * result.seconds or instead_s * (1 + ENOUGH) >= seconds:
        return ""
    ratio = seconds / instead_s
    named = dict.fromkeys(
        f"{row.cost} with {row.given()} ({row.training})"
        for row in tolerance.costs(method).values()
        if row is not None
    )
    costs = f"cost {', '.join(named)}" if named else "cost an accuracy that was not measured"
    return (
        f" The network takes {result.exposed_seconds / result.seconds:.0%} of that step: local"
        f" steps (--every {RARELY.every}, gradcomp.DiLoCo) with terngrad would take"
        f" {format_seconds(instead_s)} a step, {ratio:.2g} times as fast, and {costs}."
    )
