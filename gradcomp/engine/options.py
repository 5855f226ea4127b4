"""The options beside the codec, written out once for every entry point."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from gradcomp.codecs import Codec, resolve
from gradcomp.exchange.agree import UNSET
from gradcomp.exchange.sizing import EXCHANGES
from gradcomp.exchange.slices import UNIT_NUMEL
from gradcomp.memory.moments import Precondition, check_precondition
from gradcomp.memory.transform import Transform, check_transform
from gradcomp.payload.parameters import Exempts

if TYPE_CHECKING:
    from typing_extensions import Unpack

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


class Changes(TypedDict, total=False):
    """The fields of `Options` as keyword arguments, for type checkers."""

    warmup_steps: int
    warmup_codec: Codec | str | None
    min_numel: int | None
    exclude: Exempts | Sequence[Exempts]
    exchange: str
    nodes: Sequence[Sequence[int]] | None
    transform: Transform | None
    precondition: Precondition | bool | None
    grad_scaler: Any
    atomic_steps: bool | None
    slice_numel: int | None
    quality_every: int
    timeout_s: float | None


@dataclass(frozen=True)
class Options:
    """What may be chosen beside the codec; every rank needs the same.

    Args:
        warmup_steps: the first so many steps are averaged in fp32, or packed by `warmup_codec`.
        warmup_codec: codec or name for the warm-up: `Block(4)`, say, which loses nothing and takes
            an eighth of the bytes; its groups are those of the codec.
            Also for the warm-up of `gradcomp.optim.OneBitAdam`. None: fp32.
        min_numel: tensors with fewer elements travel as fp32. None: those with fewer than 1024, and
            vectors (norms, biases) of any size.
        exclude: what else travels as fp32, one entry or a sequence: names, patterns (``"*.bias"``),
            "norm", "embedding", "head" (by what libraries call such layers), functions of name and
            shape.
        exchange: "auto" (fewer bytes), "all_gather", "reduce_scatter", or "hierarchical": fp32
            inside a node, compressed between nodes.
        nodes: (hierarchical) the ranks of every node, all of one size; by default those with equal
            GRADCOMP_HOST_ID, or else equal host name.
        transform: changes gradients on their way, such as `gradcomp.onebit_sgd.AggregateAdagrad`;
            not during `warmup_steps`. One for owners of means forces exchange "reduce_scatter".
        precondition: encode gradients in units of the root of their second moment, which all ranks
            know from the averages: for Adam and its like with codecs of 1 and 2 bits. True, or
            `Precondition` for other settings than its defaults.
        grad_scaler: a `torch.amp.GradScaler` or the like: residuals follow its scale and commit a
            whole step at a time. A step is one backward: to accumulate several, run all but the
            last under ``no_sync()``.
        atomic_steps: commit residuals only if no bucket of the step held NaN or Inf and every rank
            has ended the step (a round of 16 bytes); on by default with `grad_scaler`.
        slice_numel: elements of a slice, at least: a bucket of twice as many or more goes in
            slices, one of which is encoded while the one before it is on the wire. It changes no
            value. None: 2,097,152. For experiments.
        quality_every: steps from one sample for `quality()` to the next, on this rank; 0: none.
        timeout_s: seconds after which a silent peer is given up; by default the communicator's own,
            which is that of its process group over torch.distributed and 300 otherwise.

    Raises:
        TypeError: `transform` or `precondition` is of another type.
        ValueError: an option out of its range; the message has the value.
    """

    warmup_steps: int = 0
    warmup_codec: Codec | str | None = None
    min_numel: int | None = None
    exclude: Exempts | Sequence[Exempts] = ()
    exchange: str = "auto"
    nodes: Sequence[Sequence[int]] | None = None
    transform: Transform | None = None
    precondition: Precondition | bool | None = None
    grad_scaler: Any = None
    atomic_steps: bool | None = None
    slice_numel: int | None = None
    quality_every: int = 100
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "exclude", _entries(self.exclude))
        for name in ("warmup_steps", "min_numel", "quality_every"):
            value = getattr(self, name)
            if value is None and name == "min_numel":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
        if self.slice_numel is not None and (
            isinstance(self.slice_numel, bool)
            or not isinstance(self.slice_numel, int)
            or self.slice_numel < UNIT_NUMEL
        ):
            raise ValueError(
                f"slice_numel must be None or an integer of at least {UNIT_NUMEL}, got"
                f" {self.slice_numel!r}"
            )
        if self.warmup_codec is not None:
            object.__setattr__(self, "warmup_codec", resolve(self.warmup_codec))
        if self.exchange not in (*EXCHANGES, HIERARCHICAL):
            raise ValueError(
                f"exchange must be one of {(*EXCHANGES, HIERARCHICAL)}, got {self.exchange!r}"
            )
        if self.nodes is not None and self.exchange != HIERARCHICAL:
            raise ValueError(
                f"nodes= needs exchange='hierarchical', got exchange={self.exchange!r}"
            )
        if check_transform(self.transform) is not None and self.exchange == HIERARCHICAL:
            raise ValueError(
                "a transform needs exchange='auto', 'all_gather' or 'reduce_scatter', got"
                " 'hierarchical'"
            )
        object.__setattr__(self, "precondition", check_precondition(self.precondition))
        if (
            self.precondition is not None
            and self.transform is not None
            and self.transform.place == "owner"
        ):
            raise ValueError(
                f"precondition does not go with {self.transform!r}, which changes means where they"
                " are owned"
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

    @classmethod
    def of(cls, options: Options | None, **changes: Unpack[Changes]) -> Options:
        """Return `options`, or the defaults for None, with `changes` made to them.

        Raises:
            TypeError: `options` is not a `gradcomp.Options`, or an unknown option.
            ValueError: as `Options`.
        """
        if options is not None and not isinstance(options, Options):
            raise TypeError(f"options must be a gradcomp.Options, got {type(options).__name__}")
        _refuse_renamed(changes)
        known = [field.name for field in fields(cls)]
        for name in changes.keys() - set(known):
            near = difflib.get_close_matches(name, known, 1, 0.0)[0]
            raise TypeError(
                f"there is no option {name!r}; did you mean {near!r}? (all: {', '.join(known)})"
            )
        return replace(options or cls(), **changes)

    def under(self, optimizer: Any) -> Options:
        """Return the options under an optimizer: one whose momentum travels
        (`gradcomp.optim.OneBitAdam`) brings its transform.

        Raises:
            TypeError: no optimizer.
            ValueError: a `transform` or `warmup_steps` beside it; a `warmup_codec` without a step
                to pack.
        """
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise TypeError(
                "optimizer must be an optimizer, such as torch.optim.AdamW(...), got"
                f" {type(optimizer).__name__}"
            )
        brought = getattr(optimizer, "transform", None)
        mine = self
        if isinstance(brought, Transform) and brought is not self.transform:
            for name, value in (("transform", self.transform), ("warmup_steps", self.warmup_steps)):
                if value:
                    raise ValueError(
                        f"{name}={value!r} does not go with {type(optimizer).__name__}, which"
                        " changes gradients on their way and has a warm-up of its own"
                    )
            mine = replace(self, transform=brought)
        own = mine.transform
        if (
            mine.warmup_codec is not None
            and not mine.warmup_steps
            and not (own is not None and own.packs_warm_up)
        ):
            why = "packs the first warmup_steps steps, and warmup_steps is 0"
            if isinstance(brought, Transform):
                why = (
                    f"does not go with {type(optimizer).__name__}: gradients and momenta take turns"
                    " there, and residuals of one are none of the other"
                )
            raise ValueError(f"warmup_codec={mine.warmup_codec!r} {why}")
        return mine

    @property
    def exempts(self) -> tuple[Exempts, ...]:
        """`exclude` as a tuple."""
        return _entries(self.exclude)

    def is_plain(self, step: int) -> bool:
        """Whether this exchange belongs to the warm-up: in fp32, or packed by `warmup_codec`."""
        return step < self.warmup_steps or (
            self.transform is not None and self.transform.pauses(step)
        )

    def begins_transform(self, step: int) -> bool:
        """Whether this exchange is the first after the warm-up of a transform's own that
        `warmup_codec` packs.
        """
        own = self.transform
        return (
            own is not None
            and self.warmup_codec is not None
            and step > 0
            and own.pauses(step - 1)
            and not own.pauses(step)
        )

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
        return {
            "transform": self.transform.compared() if self.transform is not None else UNSET,
            "precondition": self.precondition or UNSET,
            "warmup_steps": (
                (self.warmup_steps, repr(self.warmup_codec))
                if self.warmup_codec
                else self.warmup_steps
            ),
            "slice_numel": self.slice_numel or UNSET,
            "min_numel": self.min_numel,
            "exclude": sorted(e if isinstance(e, str) else "a function" for e in self.exempts),
            "atomic_steps": int(self.whole_steps),
        }


def _refuse_renamed(given: Iterable[str]) -> None:
    """Raise TypeError for a name of earlier versions."""
    for name in given:
        if name in RENAMED:
            raise TypeError(f"there is no option {name!r}: it is called {RENAMED[name]!r}")


def _with_renamed_refused(init: _F) -> _F:
    @functools.wraps(init)
    def checked(self: Options, *args: Any, **given: Any) -> None:
        _refuse_renamed(given)
        init(self, *args, **given)

    return checked  # type: ignore[return-value]


Options.__init__ = _with_renamed_refused(Options.__init__)  # type: ignore[method-assign]


def spell_out(function: _F) -> _F:
    """Let ``help`` and ``inspect.signature`` of a function show the options where it says
    ``**changes``.
    """
    shown = inspect.signature(function)
    own = [p for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
    kind = inspect.Parameter.KEYWORD_ONLY
    extra = [
        inspect.Parameter(f.name, kind, default=f.default, annotation=f.type)
        for f in fields(Options)
    ]
    function.__signature__ = shown.replace(parameters=[*own, *extra])  # type: ignore[attr-defined]
    return function


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
    """Raise ValueError for options that do not go with a codec of rotated values."""
    if not codec.rotates:
        return
    if options.precondition is not None:
        raise ValueError(
            "precondition=True keeps values apart that rotate=True mixes: one of them, got both"
            f" with {codec!r}"
        )
    if options.transform is not None and options.transform.place == "owner":
        raise ValueError(
            f"{options.transform!r} needs means as they are, and owners of {codec!r} have rotated"
            " ones: leave rotate=True out"
        )
