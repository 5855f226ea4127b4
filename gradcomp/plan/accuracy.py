"""Measured accuracy losses of compression: the one table that ``codec="auto"``, warnings and the
planner read.

No other code contains these figures. `Training.source` names the documentation page that repeats
them, and a test compares the two. To measure again, run ``python -m gradcomp.bench accuracy`` and
``demo``, then change `Training.fp32` and the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from gradcomp.arguments import suggestion
from gradcomp.codecs import Block, Codec, EntropyCoded, Identity, OneBit, Ternary, TernGrad
from gradcomp.codecs.feedback import FeedbackCodec
from gradcomp.engine.optimizers import unwrapped

ENOUGH_SEEDS = 3  # figures from fewer seeds are shown but not used for recommendations
TOLERANCES: Mapping[str, float] = {"nats": 0.02, "points": 0.3}  # deviations over three seeds
# families whose losses the planner shows if no optimizer is named
FAMILIES: Mapping[str, str] = {"adam": "Adam and its relatives", "sgd": "SGD"}
MUON = "muon"  # the family of Muon, which trains matrices, and of Muon and AdamW together
# `residual_decay` (`FeedbackCodec`) by family, where a decay below 1 loses less accuracy:
# docs/explanation/accuracy.md.
DECAYS: Mapping[str, float] = {"adam": 0.25, MUON: 0.25}
# Parts of class names: of optimizers that divide by second moments, and of optimizers that contain
# such a name but treat most gradients differently.
SECOND_MOMENTS = ("adam", "lamb", "rmsprop", "adagrad", "adadelta", "adafactor")
OTHERS = ("onebit", "zeroone")
# Accepted names, in any case; "other" stands for every optimizer that is not listed.
_NAMES = """
adam adamw adamax nadam radam sparseadam adafactor adadelta adagrad rmsprop rprop lamb adabelief
adan sgd asgd lars lbfgs lion muon shampoo soap sophia splitadamw splitadagrad splitlamb splitsgd
other
"""
OPTIMIZERS = tuple(_NAMES.split())


@dataclass(frozen=True)
class Training:
    """Training that was run with fp32 exchanges and with codecs."""

    family: str  # optimizer family, a key of `FAMILIES` or `MUON`
    optimizer: str  # class name
    who: str  # the model
    what: str  # its size or data set
    world_size: int
    steps: int
    seeds: int
    fp32: float  # result with fp32: held-out loss in nats, or test accuracy in percent
    unit: str  # of a loss: "nats", or "points" of test accuracy
    source: str  # documentation page with the results

    def __str__(self) -> str:
        seeds = f"{self.seeds} seeds" if self.seeds > 1 else "one seed"
        return (
            f"{self.who}{self.what} under {self.optimizer}, N = {self.world_size}, {self.steps:,}"
            f" steps, {seeds}"
        )


@dataclass(frozen=True)
class Measured:
    """Result of one training with one codec and its options."""

    training: Training
    codec: Codec
    bits: float  # per value and phase after the warm-up, scales included
    got: float  # result, in the unit of `Training.fp32`
    precondition: bool = False
    scale_lr: bool = False  # the learning rate kept the length of steps (`gradcomp.engine.rate`)
    start: float = 0.0  # share of the steps that were warm-up steps (``warmup_steps``)
    warmup_codec: Codec | None = None  # of the warm-up steps; None: fp32
    every: int = 1  # inner steps per exchange (`gradcomp.DiLoCo`)
    doubt: str = ""  # why the row is not used for recommendations despite enough seeds

    @property
    def loss(self) -> float:
        """Loss of accuracy against fp32, in `Training.unit`; positive is worse."""
        more = self.got - self.training.fp32
        return more if self.training.unit == "nats" else -more

    @property
    def figure(self) -> str:
        """The loss as text, without its unit."""
        return f"{self.loss:+.3f}" if self.training.unit == "nats" else f"{self.loss:+.2f}"

    @property
    def cost(self) -> str:
        """The loss as text, with its unit; positive is worse."""
        return f"{self.figure} {'nats' if self.training.unit == 'nats' else 'points of test error'}"

    @property
    def price(self) -> str:
        """The loss as text, with its unit and the options with which it was measured."""
        return f"{self.cost} with {self.given()}" if self.given() else self.cost

    @property
    def counts(self) -> bool:
        """Whether the row is used for recommendations: it has enough seeds and no `doubt`."""
        return self.training.seeds >= ENOUGH_SEEDS and not self.doubt

    def phase_of(self, codec: Codec) -> str:
        """Return the second phase that a codec uses on the number of ranks of the training."""
        return codec.resolved_second_phase(self.training.world_size)

    def is_of(self, family: str | None, codec: Codec, phase: str, every: int = 1) -> bool:
        """Return whether the row was measured with this family, codec, second phase and `every`."""
        own = self.codec
        mine = self.training.family, self.every, own.name, own.form, own.rotates
        wanted = family, every, codec.name, codec.form, codec.rotates
        return mine == wanted and self.phase_of(own) == phase

    def excess(self, tolerances: Mapping[str, float] = TOLERANCES) -> float:
        """Return the loss divided by the tolerance in its unit; at most 1 is tolerated."""
        limit = tolerances[self.training.unit]
        if limit:
            return self.loss / limit
        return math.copysign(math.inf, self.loss) if self.loss else 0.0

    def given(self, *, start: bool = True) -> str:
        """Return the options as written in code, "" for none; `start` includes the warm-up's."""
        words = ["precondition=True"] if self.precondition else []
        if self.every > 1:
            words.append(f"sync_every={self.every}")
        if self.start and start:
            share = Fraction(self.start).limit_denominator(20)
            times = f" * {share.numerator}" if share.numerator > 1 else ""
            words.append(f"warmup_steps=steps{times} // {share.denominator}")
            if self.warmup_codec is not None:
                words.append(f"warmup_codec={written(self.warmup_codec)}")
        return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


# A warm-up with another codec sends more over a run: 1 bit after a sixth of the steps with 4 bits
# is 1.9 bits per value over the whole run. SGD has momentum 0.9. Not in the table: 1 bit after a
# tenth of the steps in fp32 (docs/explanation/onebit-sgd.md), which lost nothing on MNIST, where
# 1 bit loses little without a warm-up, and was not measured elsewhere; one epoch at a constant
# learning rate (docs/howto/benchmarks.md), in which ternary lost 0.8 points under SGD, with a
# deviation of 0.6 over seeds, and 0.9 under SplitSGD, which is therefore in no family.
ACCURACY, BENCHMARKS = "docs/explanation/accuracy.md", "docs/howto/benchmarks.md"
PROSE, CODE = (f" of 0.87 M parameters on {text}" for text in ("prose", "source code"))
_GPT = Training("adam", "AdamW", "a byte GPT", PROSE, 4, 2000, 3, 1.3428, "nats", ACCURACY)
_GPT_SKETCH = replace(_GPT, seeds=1, fp32=1.344)
_GPT_SHORT = replace(_GPT, steps=600, seeds=1, fp32=2.055)
# short runs of 8 sequences per worker at AdamW's usual learning rate, which end on the slope where
# attention is learnt
_GPT_600 = replace(_GPT, steps=600, fp32=1.7746)
_GPT_CODE = replace(_GPT_600, what=CODE, fp32=1.7840)
_GPT_CODE_2 = replace(_GPT_CODE, fp32=1.6862)  # its files in another order
_GPT_SEED_0 = replace(_GPT, seeds=1, fp32=1.3438)
# at 0.1, the largest of three learning rates at which fp32 does not diverge
_MLP = Training("sgd", "SGD", "an MLP", " 128-256-10", 2, 200, 3, 0.9473, "nats", ACCURACY)
_MLP_4 = replace(_MLP, world_size=4, fp32=0.3469)  # fp32's best rate of five
FASHION = " on Fashion-MNIST"
_FASHION = Training("sgd", "SGD", "LeNet", FASHION, 2, 600, 3, 88.12, "points", BENCHMARKS)
_MNIST = replace(_FASHION, what=" on MNIST", fp32=98.79)
_FASHION_NOW = replace(_FASHION, seeds=9)
_FASHION_5 = replace(_FASHION, seeds=5, fp32=88.18, source=ACCURACY)
_FASHION_3 = replace(_FASHION_5, seeds=3, fp32=88.15)
_FASHION_COSINE = replace(_FASHION_5, seeds=3, what=f"{FASHION}, a falling rate", fp32=86.84)
_FASHION_8 = replace(
    _FASHION_5, seeds=3, what=f"{FASHION}, 8 ranks", fp32=89.46, world_size=8, steps=1000
)
_CIFAR = replace(
    _FASHION_5, seeds=3, who="a small ResNet", what=" on CIFAR-10", fp32=57.76, steps=1000
)
_CIFAR_300 = replace(_CIFAR, fp32=40.04, steps=300)
_DIGITS = replace(
    _MNIST,
    what=" on scikit-learn's digits",
    fp32=97.85,
    steps=180,
    source="docs/explanation/codecs.md",
)
_LARGE_RATES = "an MLP diverges with it at a learning rate at which fp32 trains"
_SHORT_RUNS = "runs of 600 steps lose more with it than with Block(4) (one seed)"
_USUAL_RATE = "runs of 600 steps lose more with it at AdamW's usual rate"
_GPT_MUON = replace(_GPT_600, family=MUON, optimizer="Muon and AdamW", fp32=1.2558)
_SCALED: dict[str, Any] = {"precondition": True, "scale_lr": True}
_SIXTH: dict[str, Any] = {"precondition": True, "start": 1 / 6, "warmup_codec": Block(4)}
_RARE: dict[str, Any] = {"start": 1 / 10, "every": 30}
TABLE = (
    Measured(_GPT, Block(8), 8.2, 1.3424),
    Measured(_GPT, Block(4), 4.2, 1.3440),
    Measured(_GPT_600, Block(4), 4.4, 1.8116),
    Measured(_GPT_CODE, Block(4), 4.4, 1.7900),
    Measured(_GPT, TernGrad(), 3.0, 1.3490, doubt=_SHORT_RUNS),  # second phase: sums of 4 ranks
    Measured(_GPT, TernGrad(), 3.0, 1.3228, precondition=True, doubt=_SHORT_RUNS),
    # second phase: means, the default from 8 ranks on
    Measured(_GPT, TernGrad(second_phase="block4"), 3.0, 1.3620, doubt=_SHORT_RUNS),
    Measured(_GPT, Ternary(), 2.4, 1.3246, precondition=True),
    Measured(_GPT_600, Ternary(), 2.4, 1.8233, precondition=True),
    Measured(_GPT_CODE, Ternary(), 2.4, 1.8360, precondition=True),
    Measured(_GPT, Ternary(), 2.4, 1.2893, **_SCALED),
    Measured(_GPT_600, Ternary(), 2.4, 1.7539, **_SCALED),
    Measured(_GPT_CODE_2, Ternary(), 2.4, 1.6475, **_SCALED),
    Measured(_GPT, EntropyCoded(2.2), 2.4, 1.3348, precondition=True, doubt=_USUAL_RATE),
    Measured(_GPT, EntropyCoded(1.25), 1.5, 1.3256, precondition=True, doubt=_USUAL_RATE),
    Measured(_GPT, EntropyCoded(1.25), 1.5, 1.2759, **_SCALED),
    Measured(_GPT_600, EntropyCoded(1.25), 1.5, 1.7335, **_SCALED),
    Measured(_GPT_CODE, EntropyCoded(1.25), 1.5, 1.7577, **_SCALED),
    Measured(_GPT, Block(2), 2.2, 1.3700, precondition=True),
    Measured(_GPT, OneBit(), 1.4, 1.4153, **_SIXTH),
    Measured(_GPT_SKETCH, Block(2), 2.0, 1.437),
    Measured(_GPT_SHORT, OneBit(), 1.0, 2.468),
    Measured(_GPT, Identity(), 32.0, 1.3925, **_RARE),
    Measured(_GPT, TernGrad(), 2.0, 1.3719, **_RARE),
    Measured(_GPT, OneBit(rotate=True), 1.6, 1.3719, **_RARE),
    Measured(_GPT_SEED_0, OneBit(), 1.0, 1.5896, **_RARE),
    Measured(_GPT_MUON, EntropyCoded(3.2), 3.4, 1.2610),
    Measured(_MLP, Ternary(), 2.1, 0.9660),
    Measured(_MLP_4, Ternary(), 2.1, 0.3488),
    Measured(_MLP, TernGrad(), 2.0, 8.4572),
    Measured(_MLP, OneBit(), 1.3, 1.0193),
    Measured(_MLP, Block(4), 4.2, 0.9207),
    Measured(_FASHION, TernGrad(), 2.0, 88.16),
    Measured(_MNIST, TernGrad(), 2.0, 98.66),
    Measured(_DIGITS, Ternary(), 2.1, 97.85),
    Measured(_CIFAR, TernGrad(), 2.0, 59.13),
    # "block4": see `Codec.resolved_second_phase`
    Measured(_FASHION_8, TernGrad(), 3.0, 89.44, doubt=_LARGE_RATES),
    Measured(_FASHION_COSINE, Ternary(), 2.1, 86.80),
    Measured(_FASHION_NOW, Ternary(), 2.1, 87.60),
    Measured(_FASHION_5, Block(4), 4.2, 88.02),
    Measured(_FASHION_5, Block(2), 2.1, 87.67),
    Measured(_FASHION_3, EntropyCoded(2.2), 2.2, 88.08),
    Measured(_FASHION_3, EntropyCoded(1.25), 1.3, 88.09),
    Measured(_FASHION_COSINE, EntropyCoded(2.2), 2.2, 86.83),
    Measured(_FASHION_COSINE, EntropyCoded(1.25), 1.3, 86.80),
    Measured(_CIFAR_300, EntropyCoded(2.2), 2.3, 39.87),
    Measured(_CIFAR_300, EntropyCoded(1.25), 1.4, 40.45),
    Measured(_FASHION_NOW, OneBit(), 1.1, 86.17),
    Measured(_MNIST, OneBit(), 1.1, 98.60),
    Measured(_DIGITS, OneBit(), 1.1, 97.26),
)
# FSDP2 takes no optimizer, so "auto" is the codec without residuals that sends the fewest bits.
SHARDED = Measured(
    replace(_GPT_600, world_size=2, fp32=2.351, source="docs/howto/fsdp.md"),
    Ternary(error_feedback=False),
    2.1,
    2.331,
)


def decayed(codec: Codec, family: str | None) -> Codec:
    """Return a codec with its residual decay set, if it is None, to the measured decay for a family
    of optimizers, or to 1. Codecs without error feedback are returned unchanged.
    """
    if not isinstance(codec, FeedbackCodec) or not codec.error_feedback:
        return codec
    if codec.residual_decay is not None:
        return codec
    return codec.with_decay(DECAYS.get(family or "", 1.0))


def written(codec: Codec) -> str:
    """Return a codec as written in code, without options that have their defaults."""
    if isinstance(codec, Identity):
        return repr(codec)
    words = [f"{codec.bits:g}"] if isinstance(codec, (Block, EntropyCoded)) else []
    group = codec.options().get("group")
    words += [f"group={group}"] if isinstance(group, int) else []
    words += ["rotate=True"] if codec.rotates else []
    words += [f'second_phase="{codec.second_phase}"'] if codec.second_phase else []
    return f"{type(codec).__name__}({', '.join(words)})"


def family_of(optimizers: Sequence[Any]) -> str | None:
    """Return the family of a model's optimizers by the class names of the innermost ones and their
    bases; None: unknown, none given, or several (other than Muon with Adam).
    """
    families = {
        family_of_names([kind.__name__ for kind in type(unwrapped(one)).__mro__])
        for one in optimizers
    }
    if families == {MUON, "adam"}:
        return MUON
    return families.pop() if len(families) == 1 else None


def check_optimizer(name: str) -> str:
    """Return `name`, or raise a ValueError if it is not in `OPTIMIZERS` (in any case)."""
    if not name.isidentifier():
        raise ValueError(f"optimizer must be a name such as adamw, sgd or lamb, got {name!r}")
    if name.lower() not in OPTIMIZERS:
        raise ValueError(
            f"optimizer {name!r} is unknown{suggestion(name, OPTIMIZERS) or ';'} "
            f"choose one of {', '.join(OPTIMIZERS)}"
        )
    return name


def family_of_names(names: Sequence[str]) -> str | None:
    """Return the family of an optimizer from its class names, in any case; None: no family."""
    found = [name.lower() for name in names]
    if any(word in name for name in found for word in OTHERS):
        return None
    if any(MUON in name for name in found):
        return MUON
    if any(word in name for name in found for word in SECOND_MOMENTS):
        return "adam"
    return "sgd" if "sgd" in found else None


def ways(
    family: str | None,
    table: Sequence[Measured] = TABLE,
    tolerances: Mapping[str, float] = TOLERANCES,
    every: int = 1,
) -> list[Measured]:
    """Return the row with the largest loss for every codec and its options, among rows of `family`
    with one exchange per `every` steps; rows that count are preferred to rows that do not.
    """
    found: dict[tuple[object, ...], list[Measured]] = {}
    for row in table:
        if row.training.family == family and row.every == every:
            way = row.codec.name, row.codec.form, row.phase_of(row.codec)
            found.setdefault((*way, row.precondition, row.scale_lr, row.start), []).append(row)
    return [max(rows, key=lambda r: (r.counts, r.excess(tolerances))) for rows in found.values()]


def expected(
    family: str | None,
    codec: Codec,
    table: Sequence[Measured] = TABLE,
    tolerances: Mapping[str, float] = TOLERANCES,
    every: int = 1,
) -> Measured | None:
    """Return the row of a codec with its best measured options, for an optimizer family and one
    exchange per `every` steps; None: not measured.

    Codecs that differ in their second phase are different codecs. A codec without one is compared
    as in an all_gather, which quantizes only once. Other options are assumed to make no difference.
    """
    phase = codec.resolved_second_phase(1)
    rows = ways(family, table, tolerances, every)
    found = [row for row in rows if row.is_of(family, codec, phase, every)]
    return min(found, key=lambda row: (not row.counts, row.excess(tolerances)), default=None)


def within(family: str | None, table: Sequence[Measured] = TABLE) -> list[Measured]:
    """Return the rows of `ways` that count and are tolerated, by bits, then `precondition`."""
    found = [row for row in ways(family, table) if row.counts and row.excess() <= 1]
    return sorted(found, key=lambda row: (row.bits, row.precondition))
