"""What a user may choose beside the codec, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_TIMEOUT_S = 1e6  # eleven days


@dataclass(frozen=True)
class Options:
    """What a user may choose beside the codec; see `gradcomp.ddp.register`."""

    start_step: int = 0
    min_numel: int = 1024
    exclude: tuple[str, ...] = ()
    exchange: str = "auto"
    transactional: bool = False
    timeout_s: float = 300.0
    nodes: Sequence[Sequence[int]] | None = None
    transform: Any = None  # a gradcomp.Transform

    def __post_init__(self) -> None:
        for name in ("start_step", "min_numel"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
        if not isinstance(self.exclude, tuple) or not all(isinstance(e, str) for e in self.exclude):
            raise ValueError(f"exclude must be a sequence of names or patterns, got {self.exclude!r}")
        if not isinstance(self.timeout_s, (int, float)) or not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(
                f"timeout_s must be a number of seconds, at most {MAX_TIMEOUT_S:g}, got {self.timeout_s!r}"
            )


def names(exclude: object) -> tuple[str, ...]:
    """Return an `exclude` argument, one name or a sequence of them, as a tuple.

    Raises:
        ValueError: neither.
    """
    if isinstance(exclude, str):
        return (exclude,)
    if not isinstance(exclude, Iterable):
        raise ValueError(f"exclude must be a sequence of names or patterns, got {exclude!r}")  # noqa: TRY004
    return tuple(exclude)


def read_scaler(grad_scaler: Any, transactional: bool | None) -> tuple[Callable[[], float] | None, bool]:
    """Return how to read a scaler's scale (None without one), and whether residuals commit a step at a time.

    Raises:
        ValueError: a scaler without get_scale(), or one together with transactional=False.
    """
    if transactional not in (None, True, False):
        raise ValueError(f"transactional must be None, True or False, got {transactional!r}")
    if grad_scaler is None:
        return None, bool(transactional)
    get_scale: Callable[[], float] | None = getattr(grad_scaler, "get_scale", None)
    if get_scale is None:
        raise ValueError(f"grad_scaler must have get_scale(), got {type(grad_scaler).__name__}")
    if transactional is False:
        raise ValueError("transactional=False cannot work with a grad_scaler: a skipped step would lose residuals")
    return get_scale, True
