"""What the planner's command line asks, understood."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.plan.costs import Method
from gradcomp.plan.links import Link
from gradcomp.plan.models import Model
from gradcomp.plan.rates import Rates
from gradcomp.plan.simulate import Stragglers, Transport, Workload


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
