"""gradcomp's exceptions. Wrong arguments raise a plain ValueError or TypeError with the value."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from gradcomp.waits import waiting


class GradcompError(Exception):
    """Base class of gradcomp's exceptions."""

    _arguments: tuple[str, ...] = ()  # of a constructor that makes the message; attributes, too

    def __reduce__(self) -> Any:
        """Return what pickle and copy need: the constructor's arguments instead of the message."""
        if not self._arguments:
            return super().__reduce__()
        return type(self), tuple(getattr(self, name) for name in self._arguments)


def without_traceback(error: BaseException) -> BaseException:
    """Return an equal exception to keep and to raise again, without traceback and cause.

    A raised exception refers to the frames of its callers, so to the model. If the model refers to
    what keeps the exception (over DDP's hook, which Python's garbage collector cannot see), neither
    is ever freed, nor are the process groups.
    """
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001 - a foreign class may refuse for any reason
        return GradcompError(f"{type(error).__name__}: {error}")


class CorruptPayload(GradcompError, ValueError):
    """A payload that no encoder can have written.

    Attributes:
        check: name of the check that failed (docs/reference/wire-format.md lists all checks).
        detail: the wrong value and its place.
    """

    _arguments = ("check", "detail")

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(f"corrupt payload ({check}): {detail}")
        self.check = check
        self.detail = detail


class NotFinite(GradcompError, ArithmeticError):
    """A sync of local steps in which the weights of some rank have NaN or Inf. It was not committed
    on any rank.

    Attributes:
        names: names of this rank's non-finite parameters; empty if only other ranks have some.
    """

    _arguments = ("names",)

    def __init__(self, names: list[str]) -> None:
        whose = (
            f"here: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            if names
            else "on another rank"
        )
        super().__init__(
            f"weights that are not finite ({whose}): the sync was committed on no rank. restore()"
            " brings this rank back to what all ranks agreed on last"
        )
        self.names = names


class PeerMismatch(GradcompError):
    """Different settings, models or steps on two ranks.

    Attributes:
        field: name of the first setting that differs.
        rank: the first rank that differs from rank ``first``.
        expected: the value on rank ``first``.
        got: the value on ``rank``.
        first: rank 0, or this rank for a payload header; None: this rank, whatever its number.
    """

    _arguments = ("field", "rank", "expected", "got", "first")

    def __init__(
        self, field: str, rank: int, expected: object, got: object, first: int | None = 0
    ) -> None:
        whose = "this rank" if first is None else f"rank {first}"
        super().__init__(
            f"{field}: {whose} has {expected}, rank {rank} has {got}; "
            "give every rank the same model, codec and gradcomp options"
        )
        self.field = field
        self.rank = rank
        self.expected = expected
        self.got = got
        self.first = first


class PeerLost(GradcompError):
    """A rank that died or stayed silent longer than ``timeout_s``.

    Attributes:
        phase: the collective that was waited for ("scale_round", "first_phase", "second_phase",
            "fingerprint", ...).
        bucket: number of the bucket in its step; -1 outside of buckets.
        waited_s: seconds waited.
        detail: the reason, as far as it is known.
        rank: number of the lost rank in the job (the default process group, MPI.COMM_WORLD); None:
            unknown.
    """

    _arguments = ("phase", "bucket", "waited_s", "detail", "rank")

    def __init__(
        self, phase: str, bucket: int, waited_s: float, detail: str = "", rank: int | None = None
    ) -> None:
        text = f"lost a peer in {_place(phase, bucket)} after {waited_s:.1f} s"
        super().__init__(f"{text}: {detail}" if detail else text)
        self.phase = phase
        self.bucket = bucket
        self.waited_s = waited_s
        self.detail = detail
        self.rank = rank


def _place(phase: str, bucket: int) -> str:
    return f"{phase} of bucket {bucket}" if bucket >= 0 else phase


@contextlib.contextmanager
def peers_answer(phase: str, bucket: int = -1, *, called: str = "") -> Iterator[None]:
    """Context manager that turns timeouts and lost connections in its block into PeerLost.

    Args:
        phase, bucket: attributes of the PeerLost.
        called: the function that every rank has to call, for the message: a rank that does not
            answer has often called another one.
    """
    with waiting(phase, _place(phase, bucket)) as wait:
        try:
            yield
        except (TimeoutError, ConnectionError) as error:
            detail = str(error)
            if called and isinstance(error, TimeoutError):
                detail += (
                    f" (a rank is stuck, or does something else: every rank has to call {called})"
                )
            rank = getattr(error, "rank", None)  # of RankGone
            raise PeerLost(phase, bucket, wait.seconds(), detail, rank) from error


class UnsupportedTensor(GradcompError, TypeError):
    """A tensor with an unsupported dtype, device or layout, which the message names."""


class NativeError(GradcompError, RuntimeError):
    """An error status of a C kernel. It is a bug in gradcomp, unless memory was corrupted.

    Attributes:
        status: name of the status code, such as "GC_INVALID_ARGUMENT".
        function: name of the C function.
    """

    _arguments = ("status", "function")

    def __init__(self, status: str, function: str) -> None:
        super().__init__(f"{function} returned {status}")
        self.status = status
        self.function = function
