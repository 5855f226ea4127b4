"""Options of the entry points: common options, which are keywords, and rare ones in `Advanced`."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar

from gradcomp.arguments import check_integer
from gradcomp.codecs import Codec, resolve
from gradcomp.errors import GradcompError
from gradcomp.exchange.agree import UNSET
from gradcomp.exchange.sizing import EXCHANGES
from gradcomp.exchange.slices import UNIT_NUMEL
from gradcomp.memory.moments import Precondition, check_precondition
from gradcomp.memory.transform import Transform, check_transform
from gradcomp.payload.parameters import Exempts

MAX_TIMEOUT_S = 1e6  # eleven days
HIERARCHICAL = "hierarchical"
# old name -> new name
RENAMED = {
    "start_step": "warmup_steps",
    "start_codec": "warmup_codec",
    "transactional": "atomic_steps",
    "delay": "fragment_sync_delay",
    "alpha": "fragment_update_alpha",
}
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """Rare options, passed as ``advanced=`` to the entry points that accept them::

        state = gradcomp.ddp.register(model, "onebit", advanced=gradcomp.Advanced(quality_every=2))

    Every rank must pass the same values.

    Args:
        nodes: (``exchange="hierarchical"``) the ranks of every node; all nodes have the same number
            of ranks. Default: ranks with equal GRADCOMP_HOST_ID, or else equal host name.
        transform: changes gradients during the exchange, e.g.
            `gradcomp.onebit_sgd.AggregateAdagrad`; not during `warmup_steps`. A transform with
            place "owner" forces exchange "reduce_scatter".
        slice_numel: minimum number of elements of a slice. A bucket of at least twice as many is
            sent in slices: one is encoded while the previous one is sent. Slices change no value.
            None: 2,097,152. For experiments.
        quality_every: number of steps between two samples for `quality()` on this rank; 0: none.
        guard: time some early steps with the codec, with a faster one that "auto" names, and in
            bf16, and continue with the fastest; watch the error of the codes, and switch to a safer
            codec if it is too large. Rank 0 logs why. None: only with ``codec="auto"``. Cannot be
            used with a `transform`.
        scale_lr: during each step multiply the learning rate of Adam and similar optimizers by a
            factor (1.08 for ``EntropyCoded(2.2)``). It makes up for the noise of codes, which
            enlarges the second moments that they divide by. Weight decay does not change. None: on
            with `precondition` and such an `optimizer`, except for `OneBit`, which lost more.

    Raises:
        TypeError: `transform` is of another type, or an option is unknown.
        ValueError: an option is out of its range; the message has the value.
    """

    nodes: Sequence[Sequence[int]] | None = None
    transform: Transform | None = None
    slice_numel: int | None = None
    quality_every: int = 100
    guard: bool | None = None
    scale_lr: bool | None = None

    def __post_init__(self) -> None:
        check_integer("quality_every", self.quality_every, 0)
        if self.slice_numel is not None and (
            isinstance(self.slice_numel, bool)
            or not isinstance(self.slice_numel, int)
            or self.slice_numel < UNIT_NUMEL
        ):
            raise ValueError(
                f"slice_numel must be None or an integer of at least {UNIT_NUMEL}, got"
                f" {self.slice_numel!r}"
            )
        check_transform(self.transform)
        if self.guard not in (None, True, False):
            raise ValueError(f"guard must be None, True or False, got {self.guard!r}")
        if self.guard and self.transform is not None:
            raise ValueError(f"guard=True cannot be used with {self.transform!r}")
        if self.scale_lr not in (None, True, False):
            raise ValueError(f"scale_lr must be None, True or False, got {self.scale_lr!r}")


class _Basic(TypedDict, total=False):
    """The options of all entry points."""

    min_numel: int | None
    exclude: Exempts | Sequence[Exempts]
    timeout_s: float | None


class _Options(_Basic, total=False):
    """The common options of FSDP2, local steps and DDP."""

    warmup_steps: int
    warmup_codec: Codec | str | None


class ShardedOptions(_Options, total=False):
    """The common options of `gradcomp.fsdp.register`."""

    grad_scaler: Any


class LocalOptions(_Options, total=False):
    """The common options of `gradcomp.DiLoCo`."""

    exchange: str
    precondition: Precondition | bool | None


class SiteOptions(_Basic, total=False):
    """The common options of `gradcomp.local.ElasticDiLoCo`."""

    exchange: str
    precondition: Precondition | bool | None


class DelayedOptions(LocalOptions, total=False):
    """The common options of `gradcomp.onebit_sgd.DoubleBuffer`."""

    atomic_steps: bool | None


class CommonOptions(DelayedOptions, total=False):
    """All common options; `gradcomp.ddp.register` documents them."""

    grad_scaler: Any


@dataclass(frozen=True, kw_only=True)
class Options:
    """The checked options of an entry point: the common ones, and `Advanced`.

    `gradcomp.ddp.register` and `Advanced` document the fields.

    Raises:
        TypeError: `precondition` or `advanced` is of another type.
        ValueError: an option is out of its range; the message has the value.
    """

    min_numel: int | None = None
    exclude: Exempts | Sequence[Exempts] = ()
    exchange: str = "auto"
    warmup_steps: int = 0
    warmup_codec: Codec | str | None = None
    precondition: Precondition | bool | None = None
    grad_scaler: Any = None
    atomic_steps: bool | None = None
    timeout_s: float | None = None
    advanced: Advanced = Advanced()

    def __post_init__(self) -> None:
        if self.advanced is None:
            object.__setattr__(self, "advanced", Advanced())
        if not isinstance(self.advanced, Advanced):
            raise TypeError(
                f"advanced must be a gradcomp.Advanced, got {type(self.advanced).__name__}"
            )
        object.__setattr__(self, "exclude", _entries(self.exclude))
        check_integer("warmup_steps", self.warmup_steps, 0)
        if self.min_numel is not None:
            check_integer("min_numel", self.min_numel, 0)
        if self.warmup_codec is not None:
            object.__setattr__(self, "warmup_codec", resolve(self.warmup_codec))
            if not self.warmup_steps:
                raise ValueError(
                    f"warmup_codec={self.warmup_codec!r} requires warmup_steps > 0, got 0"
                )
        if self.exchange not in (*EXCHANGES, HIERARCHICAL):
            raise ValueError(
                f"exchange must be one of {(*EXCHANGES, HIERARCHICAL)}, got {self.exchange!r}"
            )
        if self.advanced.nodes is not None and self.exchange != HIERARCHICAL:
            raise ValueError(
                f"nodes= needs exchange='hierarchical', got exchange={self.exchange!r}"
            )
        transform = self.advanced.transform
        if transform is not None and self.exchange == HIERARCHICAL:
            raise ValueError(
                "a transform needs exchange='auto', 'all_gather' or 'reduce_scatter', got"
                " 'hierarchical'"
            )
        object.__setattr__(self, "precondition", check_precondition(self.precondition))
        if self.precondition is not None and transform is not None and transform.place == "owner":
            raise ValueError(
                f"precondition cannot be used with {transform!r}, which changes means where they"
                " are owned"
            )
        if self.advanced.scale_lr and self.precondition is None:
            raise ValueError("scale_lr=True requires precondition=True")
        self._check_scaler()
        seconds = self.timeout_s
        if seconds is not None and (
            not isinstance(seconds, (int, float)) or not 0 < seconds <= MAX_TIMEOUT_S
        ):
            raise ValueError(
                f"timeout_s must be a positive number of seconds, at most {MAX_TIMEOUT_S:g}, got"
                f" {seconds!r}"
            )

    def _check_scaler(self) -> None:
        if self.atomic_steps not in (None, True, False):
            raise ValueError(f"atomic_steps must be None, True or False, got {self.atomic_steps!r}")
        if self.grad_scaler is None:
            return
        if not hasattr(self.grad_scaler, "get_scale"):
            raise ValueError(
                f"grad_scaler must have get_scale(), got {type(self.grad_scaler).__name__}"
            )
        if self.atomic_steps is False:
            raise ValueError(
                "atomic_steps=False cannot work with a grad_scaler: a skipped step would lose"
                " residuals"
            )

    @property
    def exempts(self) -> tuple[Exempts, ...]:
        """`exclude` as a tuple."""
        return self.exclude  # type: ignore[return-value] # __post_init__ makes a tuple of it

    def is_plain(self, step: int) -> bool:
        """Return whether a step is in the warm-up, which uses fp32 or `warmup_codec`."""
        return step < self.warmup_steps

    @property
    def is_atomic(self) -> bool:
        """Whether a step commits as a whole: all of its buckets, on all ranks, or none."""
        return bool(self.atomic_steps) or self.grad_scaler is not None

    def loss_scale(self) -> float | None:
        """Return the current loss scale of the gradients; None without a scaler.

        Raises:
            GradcompError: it is not a positive finite number.
        """
        if self.grad_scaler is None:
            return None
        scale = float(self.grad_scaler.get_scale())
        if not 0 < scale < math.inf:
            raise GradcompError(
                f"the grad_scaler's scale is {scale}: it has overflowed or decayed to nothing, so"
                " gradients carry nothing; look for NaN in the loss, or take a scaler with bounds"
                " (gradcomp.amp.DynamicLossScaler)"
            )
        return scale

    def compared(self) -> dict[str, object]:
        """Return the options that ranks compare before the first exchange, by fingerprint field."""
        transform = self.advanced.transform
        return {
            "transform": UNSET if transform is None else repr(transform),
            "precondition": self.precondition or UNSET,
            "warmup_steps": (
                (self.warmup_steps, repr(self.warmup_codec))
                if self.warmup_codec
                else self.warmup_steps
            ),
            "slice_numel": self.advanced.slice_numel or UNSET,
            "guard": UNSET if self.advanced.guard is None else self.advanced.guard,
            "min_numel": self.min_numel,
            "exclude": sorted(e if isinstance(e, str) else "a function" for e in self.exempts),
            "atomic_steps": int(self.is_atomic),
        }


COMMON = tuple(field.name for field in fields(Options))
ADVANCED = tuple(field.name for field in fields(Advanced))
# how to pass options that are not keywords of an entry point
MOVED = {name: f"advanced=gradcomp.Advanced({name}=...)" for name in ADVANCED} | {
    "options": "its fields by keyword, rare ones as advanced=gradcomp.Advanced(...)"
}


def takes(
    kind: type | None = None, *, others: str = "", absent: Mapping[str, str] = MappingProxyType({})
) -> Callable[[_F], _F]:
    """Return a decorator for an entry point whose ``**options`` are the keys of a typed dictionary.

    ``help`` and ``inspect.signature`` then show each option with its default. The entry point
    raises TypeError for an unknown option, or for an option passed by position; the message says
    what to write instead.

    Args:
        kind: a class of options above, such as `CommonOptions`; None: an entry point without
            ``**options``.
        others: why the entry point does not accept the other options, for messages.
        absent: arguments of other entry points that this one does not accept, each with the reason.
    """
    names = kind.__optional_keys__ if kind is not None else ()  # type: ignore[attr-defined]
    options = [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type
        )
        for f in fields(Options)
        if f.name in names
    ]

    def decorate(function: _F) -> _F:
        declared = inspect.signature(function)
        own = [p for p in declared.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shown = sorted([*own, *options], key=lambda p: (p.kind, p.name == "advanced"))
        known = [p.name for p in shown]
        by_position = [p.name for p in shown if p.kind is not p.KEYWORD_ONLY]
        called = function.__qualname__.removesuffix(".__init__")
        if called == "register":  # several modules have one
            called = f"{function.__module__}.{called}"

        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            if len(args) > len(by_position):
                words = [f"{name}=" for name in known[len(by_position) :]]
                text = ", ".join(words).replace("advanced=", "advanced=gradcomp.Advanced(...)")
                raise TypeError(f"{called} takes keywords after {by_position[-1]!r}: {text}")
            check_names(given, known, called, others, absent)
            return function(*args, **given)

        checked.__signature__ = declared.replace(parameters=shown)  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


def check_names(
    given: Iterable[str],
    known: Sequence[str],
    called: str,
    others: str = "",
    absent: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise TypeError for the first unknown keyword of a call; the message says what to write
    instead.

    Args:
        given: the keywords of the call.
        known: the keywords that the entry point accepts.
        called: name of the entry point.
        others: why the entry point does not accept the other options.
        absent: arguments of other entry points that this one does not accept, each with the reason.
    """
    for name in given:
        if name in known:
            continue
        now = RENAMED.get(name, name)
        if now != name and (now in known or now not in COMMON):
            raise TypeError(f"there is no option {name!r}: it is called {now!r}")
        if name in MOVED and "advanced" in known:
            raise TypeError(f"there is no option {name!r}: pass {MOVED[name]}")
        if name == "options":
            raise TypeError(f"there is no option {name!r}: pass its fields by keyword")
        listed = ", ".join(option for option in known if option in COMMON or option in ADVANCED)
        if now in COMMON or name in ADVANCED or name in absent:
            old = f", earlier called {name!r}" if now != name else ""
            why = absent.get(name, others)
            why = f": {why}" if why else ""
            raise TypeError(f"{called} does not support {now!r}{old}{why} (all: {listed})")
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"there is no option {name!r}{hint} (all: {listed})")


# common options raise a TypeError here: they are not fields of `Advanced`
_checked = takes(others="pass it beside advanced=")(Advanced.__init__)
Advanced.__init__ = _checked  # type: ignore[method-assign]


def _entries(exclude: object) -> tuple[Exempts, ...]:
    """Return an `exclude` argument, one entry or a sequence of entries, as a tuple."""
    single = isinstance(exclude, str) or callable(exclude)
    entries = (exclude,) if single else tuple(exclude) if isinstance(exclude, Iterable) else (None,)
    if not all(isinstance(entry, str) or callable(entry) for entry in entries):
        raise ValueError(
            f"exclude must be a sequence of names, patterns or functions, got {exclude!r}"
        )
    return entries


def check_rotation(codec: Codec, options: Options) -> None:
    """Raise ValueError for options that cannot be used with a codec that rotates values."""
    if not codec.rotates:
        return
    if options.precondition is not None:
        raise ValueError(f"precondition=True cannot be combined with rotate=True, got {codec!r}")
    transform = options.advanced.transform
    if transform is not None and transform.place == "owner":
        raise ValueError(
            f"{transform!r}, with place='owner', cannot be combined with rotate=True, got {codec!r}"
        )
