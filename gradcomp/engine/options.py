"""The options beside the codec: the common ones, which entry points take by keyword, and `Advanced`
for the rare ones.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar

from gradcomp.codecs import Codec, resolve
from gradcomp.exchange.agree import UNSET
from gradcomp.exchange.sizing import EXCHANGES
from gradcomp.exchange.slices import UNIT_NUMEL
from gradcomp.memory.moments import Precondition, check_precondition
from gradcomp.memory.transform import Transform, check_transform
from gradcomp.payload.parameters import Exempts

MAX_TIMEOUT_S = 1e6  # eleven days
HIERARCHICAL = "hierarchical"
# names of earlier versions
RENAMED = {
    "start_step": "warmup_steps",
    "start_codec": "warmup_codec",
    "transactional": "atomic_steps",
    "delay": "fragment_sync_delay",
    "alpha": "fragment_update_alpha",
}
_F = TypeVar("_F", bound=Callable[..., Any])


def _check_count(name: str, value: object) -> None:
    """Raise ValueError unless an option is a count."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """Rare options, for ``advanced=`` of the entry points that take them::

        state = gradcomp.ddp.register(model, "onebit", advanced=gradcomp.Advanced(quality_every=2))

    Every rank needs the same.

    Args:
        nodes: (``exchange="hierarchical"``) the ranks of every node, all of one size; by default
            those with equal GRADCOMP_HOST_ID, or else equal host name.
        transform: changes gradients on their way, such as `gradcomp.onebit_sgd.AggregateAdagrad`;
            not during `warmup_steps`. One for owners of means forces exchange "reduce_scatter".
        slice_numel: elements of a slice, at least: a bucket of twice as many or more is sent in
            slices, one of which is encoded while the one before it is on the wire. It changes no
            value. None: 2,097,152. For experiments.
        quality_every: steps from one sample for `quality()` to the next, on this rank; 0: none.
        guard: time some early steps with and without compression, watch the error of codes, and go
            on with a safer codec, bf16 in the end, where compression does not pay or loses too
            much; rank 0 logs why. None: with ``codec="auto"``. Not together with a `transform`.

    Raises:
        TypeError: `transform` is of another type; an unknown option.
        ValueError: an option out of its range; the message has the value.
    """

    nodes: Sequence[Sequence[int]] | None = None
    transform: Transform | None = None
    slice_numel: int | None = None
    quality_every: int = 100
    guard: bool | None = None

    def __post_init__(self) -> None:
        _check_count("quality_every", self.quality_every)
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


class ShardedOptions(TypedDict, total=False):
    """The common options of `gradcomp.fsdp.register`."""

    min_numel: int | None
    exclude: Exempts | Sequence[Exempts]
    warmup_steps: int
    warmup_codec: Codec | str | None
    timeout_s: float | None


class LocalOptions(ShardedOptions, total=False):
    """The common options of `gradcomp.DiLoCo`."""

    exchange: str
    precondition: Precondition | bool | None


class DelayedOptions(LocalOptions, total=False):
    """The common options of `gradcomp.onebit_sgd.DoubleBuffer`."""

    atomic_steps: bool | None


class CommonOptions(DelayedOptions, total=False):
    """The common options, all of them: those of `gradcomp.ddp.register`, which describes them."""

    scale_lr: bool | None
    grad_scaler: Any


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keywords of an entry point: the common options, checked, and `Advanced`.

    They are described where users pass them, at `gradcomp.ddp.register` and `Advanced`.

    Raises:
        TypeError: `precondition` or `advanced` is of another type.
        ValueError: an option out of its range; the message has the value.
    """

    min_numel: int | None = None
    exclude: Exempts | Sequence[Exempts] = ()
    exchange: str = "auto"
    warmup_steps: int = 0
    warmup_codec: Codec | str | None = None
    precondition: Precondition | bool | None = None
    scale_lr: bool | None = None
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
        _check_count("warmup_steps", self.warmup_steps)
        if self.min_numel is not None:
            _check_count("min_numel", self.min_numel)
        if self.warmup_codec is not None:
            object.__setattr__(self, "warmup_codec", resolve(self.warmup_codec))
            if not self.warmup_steps:
                raise ValueError(
                    f"warmup_codec={self.warmup_codec!r} packs the first warmup_steps steps, and"
                    " warmup_steps is 0"
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
        if self.scale_lr not in (None, True, False):
            raise ValueError(f"scale_lr must be None, True or False, got {self.scale_lr!r}")
        if self.scale_lr and self.precondition is None:
            raise ValueError(
                "scale_lr=True needs precondition=True, with which noise is alike in all elements"
            )
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
        return _entries(self.exclude)

    def is_plain(self, step: int) -> bool:
        """Whether this exchange belongs to the warm-up: in fp32, or packed by `warmup_codec`."""
        return step < self.warmup_steps

    @property
    def whole_steps(self) -> bool:
        """Whether residuals commit a whole step at a time."""
        return bool(self.atomic_steps) or self.grad_scaler is not None

    @property
    def loss_scale(self) -> Callable[[], float] | None:
        """What returns the scale that gradients carry; None without a scaler."""
        return None if self.grad_scaler is None else self.grad_scaler.get_scale

    def compared(self) -> dict[str, object]:
        """Return what ranks compare of it before they exchange anything, by field of the
        fingerprint.
        """
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
            "atomic_steps": int(self.whole_steps),
        }


COMMON = tuple(field.name for field in fields(Options))
ADVANCED = tuple(field.name for field in fields(Advanced))
# what users write for options that are not keywords of an entry point
MOVED = {name: f"advanced=gradcomp.Advanced({name}=...)" for name in ADVANCED} | {
    "options": "its fields by keyword, rare ones as advanced=gradcomp.Advanced(...)"
}


def takes(kind: type | None = None, *, others: str = "") -> Callable[[_F], _F]:
    """Return a decorator for an entry point whose ``**options`` are those of a typed dictionary.

    ``help`` and ``inspect.signature`` then show each option with its default. A call with an option
    that the entry point does not take, or with one by position, is a TypeError that says what to
    write instead.

    Args:
        kind: `CommonOptions` or a part of it; None: an entry point without ``**options``.
        others: why the entry point does not take the other options.
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

        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            if len(args) > len(by_position):
                words = [f"{name}=" for name in known[len(by_position) :]]
                text = ", ".join(words).replace("advanced=", "advanced=gradcomp.Advanced(...)")
                raise TypeError(f"{called} takes keywords after {by_position[-1]!r}: {text}")
            check_names(given, known, called, others)
            return function(*args, **given)

        checked.__signature__ = declared.replace(parameters=shown)  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


def check_names(given: Iterable[str], known: Sequence[str], called: str, others: str = "") -> None:
    """Raise TypeError for the first keyword that an entry point does not take; the message says
    what to write instead.

    Args:
        given: the keywords of a call.
        known: those that the entry point takes.
        called: its name.
        others: why it does not take the other options.
    """
    for name in given:
        if name in known:
            continue
        if name in RENAMED:
            raise TypeError(f"there is no option {name!r}: it is called {RENAMED[name]!r}")
        if name in MOVED and "advanced" in known:
            raise TypeError(f"there is no option {name!r}: pass {MOVED[name]}")
        takes = ", ".join(one for one in known if one in COMMON or one in ADVANCED)
        if name in COMMON or name in ADVANCED:
            why = f": {others}" if others else ""
            raise TypeError(f"{called} has no option {name!r}{why} (all: {takes})")
        near = difflib.get_close_matches(name, known, 1, 0.0)[0]
        raise TypeError(f"there is no option {name!r}; did you mean {near!r}? (all: {takes})")


# names that belong into `Advanced`, or beside it
Advanced.__init__ = takes(others="pass it beside advanced=")(Advanced.__init__)  # type: ignore[method-assign]


def _entries(exclude: object) -> tuple[Exempts, ...]:
    """Return an `exclude` argument, one entry or a sequence of them, as a tuple."""
    one = isinstance(exclude, str) or callable(exclude)
    found = (exclude,) if one else tuple(exclude) if isinstance(exclude, Iterable) else (None,)
    if not all(isinstance(entry, str) or callable(entry) for entry in found):
        raise ValueError(
            f"exclude must be a sequence of names, patterns or functions, got {exclude!r}"
        )
    return found


def check_rotation(codec: Codec, options: Options) -> None:
    """Raise ValueError for options that cannot be used with a codec of rotated values."""
    if not codec.rotates:
        return
    if options.precondition is not None:
        raise ValueError(
            "precondition=True keeps values apart that rotate=True mixes: one of them, got both"
            f" with {codec!r}"
        )
    transform = options.advanced.transform
    if transform is not None and transform.place == "owner":
        raise ValueError(
            f"{transform!r} needs means as they are, and owners of {codec!r} have rotated"
            " ones: leave rotate=True out"
        )
