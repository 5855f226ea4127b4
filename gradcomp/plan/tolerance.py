"""Which ways of exchanging gradients keep the accuracy: those whose measured loss under an
optimizer is tolerated.

Seconds a step are seconds to a loss only where steps do as much as fp32's. The rule is therefore
one of tolerance: a codec that loses more than is tolerated is not recommended, however fast its
steps are, and all others are taken to need as many steps as fp32. How many steps more a loss takes
back is not modelled: of fp32's curve there are two points (docs/explanation/accuracy.md), one of
them a single seed on the slope where attention is learnt, and a line through them would only bound
those steps from below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradcomp.arguments import suggestion
from gradcomp.plan.accuracy import (
    FAMILIES,
    OWN_WARM_UP,
    TABLE,
    TOLERANCES,
    Measured,
    expected,
    family_of_name,
)
from gradcomp.plan.advice import FALLBACK
from gradcomp.plan.costs import Method

OMITS = (
    "Codecs that may lose accuracy under some optimizer are left out: name yours with --optimizer."
)
# Names that are understood, in any case; "other" stands for all that are not here.
OPTIMIZERS = (
    "adam",
    "adamw",
    "adamax",
    "nadam",
    "radam",
    "sparseadam",
    "adafactor",
    "adadelta",
    "adagrad",
    "rmsprop",
    "rprop",
    "lamb",
    "adabelief",
    "adan",
    "sgd",
    "asgd",
    "lars",
    "lbfgs",
    "lion",
    "muon",
    "shampoo",
    "soap",
    "sophia",
    "splitadamw",
    "splitadagrad",
    "splitlamb",
    "splitsgd",
    "onebitadam",
    "onebitlamb",
    "zerooneadam",
    "other",
)


def check_optimizer(name: str) -> str:
    """Return the name of an optimizer.

    Raises:
        ValueError: it is not one of `OPTIMIZERS`.
    """
    family_of_name(name)
    if name.lower() not in OPTIMIZERS:
        raise ValueError(
            f"optimizer {name!r} is unknown{suggestion(name, OPTIMIZERS) or ';'} "
            f"choose one of {', '.join(OPTIMIZERS)}"
        )
    return name


@dataclass(frozen=True)
class Tolerance:
    """What methods cost in accuracy, and what of it is tolerated.

    Attributes:
        optimizer: its name, such as "adamw"; None: not known.
        limits: the most that may be lost, by unit ("nats", "points").
        table: of what was measured.
        by_seconds: without an optimizer, permit every codec that was measured under one; False:
            only those that are within the limits under all of them, and the one that
            ``codec="auto"`` takes where it knows no optimizer.

    Raises:
        ValueError: an unknown optimizer; an unknown unit; a limit that is negative or not finite.
    """

    optimizer: str | None = None
    limits: Mapping[str, float] = field(default_factory=lambda: dict(TOLERANCES))
    table: Sequence[Measured] = TABLE
    by_seconds: bool = True

    def __post_init__(self) -> None:
        if self.optimizer is not None:
            check_optimizer(self.optimizer)
        for unit, limit in self.limits.items():
            if unit not in TOLERANCES:
                raise ValueError(f"tolerances are in {' and '.join(TOLERANCES)}, got {unit!r}")
            if (
                isinstance(limit, bool)
                or not isinstance(limit, (int, float))
                or not 0 <= limit < math.inf
            ):
                raise ValueError(
                    f"the tolerance in {unit} must be at least 0 and finite, got {limit!r}"
                )
        object.__setattr__(self, "limits", {**TOLERANCES, **self.limits})

    @property
    def columns(self) -> dict[str, str | None]:
        """Families to show losses of, by what they are called: that of the optimizer, or all."""
        if self.optimizer is not None:
            return {self.optimizer: family_of_name(self.optimizer)}
        return {name: family for family, name in FAMILIES.items() if family not in OWN_WARM_UP}

    def costs(self, method: Method) -> dict[str, Measured | None]:
        """Return what a method costs, by column; None: not measured."""
        if method.codec is None or method.keeps_loss:
            return dict.fromkeys(self.columns)
        every, local = 1, method.local
        if local is not None:
            if local.every == 1 or local.fragments > 1 or local.delay:
                # not measured: an outer optimizer every step, late averages
                return dict.fromkeys(self.columns)
            every = local.every
        return {
            name: expected(family, method.codec, self.table, self.limits, every)
            for name, family in self.columns.items()
        }

    def cost(self, method: Method) -> Measured | None:
        """Return what a method costs under the optimizer; None: not measured, or no optimizer
        was said.
        """
        return self.costs(method)[self.optimizer] if self.optimizer is not None else None

    def permits(self, method: Method) -> bool:
        """Whether a method may be recommended.

        What is no codec may always, and with an optimizer that is not in the table what
        ``codec="auto"`` takes for it; without an optimizer what `by_seconds` says.
        """
        if method.codec is None or method.keeps_loss:
            return True
        if self.optimizer is None and self.by_seconds:
            return not method.compresses or method.codec.name in {
                row.codec.name for row in self.table
            }
        if self.optimizer is None:
            safe = method.codec.name == FALLBACK.name and method.local is None
            return safe or all(self._within(row) for row in self.costs(method).values())
        if self.columns[self.optimizer] is None:
            return method.codec.name == FALLBACK.name and method.local is None
        return self._within(self.cost(method))

    def _within(self, row: Measured | None) -> bool:
        return row is not None and row.counts and row.excess(self.limits) <= 1

    def start(self, method: Method, methods: Sequence[Method]) -> tuple[float, Method | None]:
        """Return the share of the steps that a method begins with otherwise, as its loss was
        measured, and which of `methods` they are then averaged by; None: by fp32.
        """
        row = self.cost(method)
        if row is None or row.start_codec is None:
            return (row.start if row is not None else 0.0), None
        alike = [m for m in methods if m.codec is not None and m.codec.name == row.start_codec.name]
        return row.start, next(
            (m for m in alike if m.name.split()[1:] == method.name.split()[1:]), (*alike, None)[0]
        )

    def of(self, method: Method) -> str:
        """Return what is said of a method's accuracy after the recommendation, "" for nothing."""
        if method.keeps_loss:
            return ""
        if self.optimizer is not None:
            row = self.cost(method)
            if row is None:
                return f" What it costs in accuracy under {self.optimizer} was not measured."
            return f" It costs {_cost(row)} ({row.training})."
        known = [
            f"{_cost(row)} under {row.training.optimizer}"
            for row in self.costs(method).values()
            if row is not None
        ]
        costs = (
            f"{_called(method)} costs {', '.join(known)}"
            if known
            else f"what {_called(method)} costs was not measured"
        )
        return (
            f" This is by seconds a step alone: {costs}. Name the optimizer, and what loses too"
            " much is left out."
        )

    def against(self, method: Method, ratio: float) -> str:
        """Return why a faster method is not recommended.

        Args:
            method: one that is not permitted.
            ratio: seconds a step of what is recommended over its own.
        """
        row = self.cost(method)
        under = f" under {self.optimizer}" if self.optimizer is not None else ""
        costs = f"costs {_cost(row)}" if row is not None else f"was not measured{under}"
        but = "" if row is None or row.counts else f" ({row.doubt or 'too few seeds'})"
        return (
            f" {method.name} would be {ratio:.2g} times as fast a step and {costs}{but}; not"
            " recommended."
        )


def _called(method: Method) -> str:
    return " ".join(filter(None, [method.name.split()[0], str(method.local or "")]))


def _cost(row: Measured) -> str:
    return f"{row.cost} with {row.given()}" if row.given() else row.cost
