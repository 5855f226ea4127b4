"""What the planner's command line asks, understood."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradcomp.plan.costs import Method
from gradcomp.plan.links import Link, Node
from gradcomp.plan.models import Model
from gradcomp.plan.rates import Rates
from gradcomp.plan.tolerance import Tolerance
from gradcomp.plan.workload import ALONE, Stragglers, Transport, Workload


@dataclass(frozen=True)
class Question:
    """A command line, understood."""

    model: Model
    workload: Workload
    link: Link
    nodes: list[int]
    methods: list[Method]
    stragglers: Stragglers
    rates: Rates | None
    cores: float
    double_buffering: bool
    transport: Transport | None = None
    tolerance: Tolerance = field(default_factory=Tolerance)
    node: Node = ALONE
    by_seconds: bool = False


def parse_stragglers(text: str | None) -> tuple[float, float]:
    """Return (share, factor) of "0.1:2".

    Raises:
        ValueError: not understood.
    """
    if text is None:
        return 0.0, 1.0
    try:
        share, factor = (float(part) for part in text.split(":"))
    except ValueError:
        raise ValueError(
            f"--stragglers {text!r} is not understood; SHARE:FACTOR as in 0.1:2 is"
        ) from None
    return share, factor
