"""Which exchanges keep the accuracy: those whose measured loss under an optimizer is tolerated.

Seconds a step are seconds to a loss only where steps do as much as fp32's. The rule is therefore
one of tolerance: a codec that loses more than is tolerated is not recommended, however fast its
steps are, and all others are taken to need as many steps as fp32. How many steps more a loss takes
back is not modelled: of fp32's curve there are two points (docs/explanation/accuracy.md), one of
them a single seed on the slope where attention is learnt, and a line through them would only bound
those steps from below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradcomp.arguments import suggestion
from gradcomp.engine.rate import DIVIDES, OTHERS
from gradcomp.plan.accuracy import (
    FAMILIES,
    OWN_WARM_UP,
    TABLE,
    TOLERANCES,
    Measured,
    expected,
    family_of_names,
)
from gradcomp.plan.advice import FALLBACK
from gradcomp.plan.costs import Method
from gradcomp.plan.nodes import exact

OMITS = (
    "Codecs that may lose accuracy under some optimizer are left out: name yours with --optimizer."
)
# Names that are understood, in any case; "other" stands for all that are not here.
_NAMES = """
adam adamw adamax nadam radam sparseadam adafactor adadelta adagrad rmsprop rprop lamb adabelief
adan sgd asgd lars lbfgs lion muon shampoo soap sophia splitadamw splitadagrad splitlamb splitsgd
onebitadam onebitlamb zerooneadam other
"""
OPTIMIZERS = tuple(_NAMES.split())


def check_optimizer(name: str) -> str:
    """Return the name of an optimizer; one that is not in `OPTIMIZERS` is a ValueError."""
    if not name.isidentifier():
        raise ValueError(f"optimizer must be a name such as adamw, sgd or lamb, got {name!r}")
    if name.lower() not in OPTIMIZERS:
        raise ValueError(
            f"optimizer {name!r} is unknown{suggestion(name, OPTIMIZERS) or ';'} "
            f"choose one of {', '.join(OPTIMIZERS)}"
        )
    return name


@dataclass(frozen=True)
class Tolerance:
    """What methods cost in accuracy, and how much of it is tolerated.

    Attributes:
        optimizer: its name, such as "adamw"; None: not known.
        limits: the most that may be lost, by unit ("nats", "points").
        by_seconds: without an optimizer, permit every codec that was measured under one; False:
            only those that are within the limits under all of them, and the one that
            ``codec="auto"`` takes where it knows no optimizer.

    Raises:
        TypeError: a limit that is not a number.
        ValueError: an unknown optimizer; an unknown unit; a limit that is negative or not finite.
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
        """Families to show losses of, by their names: that of the optimizer, or all."""
        if self.optimizer is not None:
            return {self.optimizer: family_of_names([self.optimizer])}
        return {name: family for family, name in FAMILIES.items() if family not in OWN_WARM_UP}

    @property
    def scales_lr(self) -> bool:
        """Whether ``precondition=True`` comes with a larger learning rate (`gradcomp.engine.rate`)
        under the optimizer, as in the rows of the table that need it; True without an optimizer.
        """
        name = "adam" if self.optimizer is None else self.optimizer.lower()
        others = (*OTHERS, "split")  # see `gradcomp.plan.advice.resolve_auto`
        return any(word in name for word in DIVIDES) and not any(word in name for word in others)

    def costs(self, method: Method) -> dict[str, Measured | None]:
        """Return what a method costs, by column; None: not measured."""
        local, codec = method.local, method.codec
        # not measured: an outer optimizer every step, late averages
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
        """Return what a method costs under the optimizer; None: not measured, or no optimizer."""
        return self.costs(method)[self.optimizer] if self.optimizer is not None else None

    def as_measured(self, method: Method) -> Method:
        """Return a method with the options that take time and that its loss was measured with."""
        row = self.cost(method)
        return method if row is None else replace(method, precondition=row.precondition)

    def permits(self, method: Method) -> bool:
        """Whether a method may be recommended.

        Without a codec it always may. With an optimizer that is not in the table only the codec
        may that ``codec="auto"`` takes for it; without an optimizer `by_seconds` decides.
        """
        if method.codec is None or method.keeps_loss:
            return True
        if self.optimizer is None and self.by_seconds:
            measured = {row.codec.name for row in TABLE}
            return not method.compresses or method.codec.name in measured
        safe = method.codec.name == FALLBACK.name and method.local is None
        if self.optimizer is not None and self.columns[self.optimizer] is None:
            return safe
        within = all(
            row is not None and row.counts and row.excess(self.limits) <= 1
            for row in self.costs(method).values()
        )
        return within or (safe and self.optimizer is None)

    def start(self, method: Method, methods: Sequence[Method]) -> tuple[float, Method | None]:
        """Return the share of the steps that a method begins with otherwise, as its loss was
        measured, and which of `methods` they are then averaged by; None: by fp32.
        """
        row = self.cost(method)
        if row is None or row.warmup_codec is None:
            return (row.start if row is not None else 0.0), None
        name = row.warmup_codec.name
        alike = [m for m in methods if m.codec is not None and m.codec.name == name]
        same = [m for m in alike if m.name.split()[1:] == method.name.split()[1:]]
        return row.start, next(iter((*same, *alike)), None)

    def of(self, method: Method) -> str:
        """Return the sentence on the accuracy of a recommended method, "" for none."""
        if method.keeps_loss:
            return ""
        rows = [row for row in self.costs(method).values() if row is not None]
        if self.optimizer is not None:
            if not rows:
                return f" What it costs in accuracy under {self.optimizer} was not measured."
            return f" It costs {rows[0].price} ({rows[0].training})."
        name = method.kind if method.local is None else f"{method.kind} {method.local}"
        known = ", ".join(f"{row.price} under {row.training.optimizer}" for row in rows)
        costs = f"{name} costs {known}" if known else f"what {name} costs was not measured"
        return (
            f" This is by seconds a step alone: {costs}. Name the optimizer, and what loses too"
            " much is left out."
        )

    def against(self, method: Method, ratio: float) -> str:
        """Return the sentence that says why a method that is `ratio` times as fast is left out."""
        row = self.cost(method)
        under = f" under {self.optimizer}" if self.optimizer is not None else ""
        costs = f"costs {row.price}" if row is not None else f"was not measured{under}"
        but = "" if row is None or row.counts else f" ({row.doubt or 'too few seeds'})"
        return (
            f" {method.name} would be {ratio:.2g} times as fast a step and {costs}{but}; not"
            " recommended."
        )
