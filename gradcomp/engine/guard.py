"""Guard of ``codec="auto"``: switches a run to a safer codec if compression does not make steps
faster, or if the error of the codes is larger than in any training of the accuracy table.

**Time**: `COMPRESSED` early steps are timed with the codec and `PLAIN` in bf16, from the end of one
exchange to the end of the next. If the codec's steps take longer, the run continues in bf16, after
one step in 8 bits that sends what the residuals hold.

**Error**: every `EVERY` steps, ranks gather their latest samples of `gradcomp.exchange.quality`.
After `IN_A_ROW` errors above the limit, or once residuals grow without bound, the run continues
with the next codec of `LADDER`.

All ranks decide from the same gathered numbers, after the same step. The step number alone decides
which steps are timed, and the decision is part of the saved state.
"""

from __future__ import annotations

import logging
import math
import statistics
import struct
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from gradcomp.codecs import Block, Codec, Identity
from gradcomp.comm.base import Channel, Communicator
from gradcomp.engine.rate import of_normal
from gradcomp.exchange.agree import gather
from gradcomp.exchange.quality import Probe
from gradcomp.memory.saved import check_mapping

logger = logging.getLogger("gradcomp")

# without error feedback, because not every codec has residual planes
LADDER: tuple[Codec, ...] = (Block(8, error_feedback=False), Identity("bf16"))
# of the step before bf16, if the chosen codec has residuals
SENDS_RESIDUALS = Block(8, residual_decay=1.0)
UNTIMED = 3  # first steps, not timed: buckets are rebuilt and buffers allocated
COMPRESSED, PLAIN = 5, 3  # timed steps; the first in bf16 allocates buffers and is not counted
EVERY = 100  # steps between two comparisons of errors
IN_A_ROW = 3
# Limits of the relative error (norm of the encoding error / norm of the encoded values): absolute,
# and as a multiple of the error with normally distributed values. All trainings of the accuracy
# table have smaller errors.
LIMIT, TIMES_NORMAL = 0.5, 1.25

_REPORT = struct.Struct("<ddd")  # seconds with the codec and in bf16, error
_KEYS = ("level", "first", "bad")


class Guard:
    """The guard of one engine.

    Args:
        codec: the codec that ``"auto"`` has chosen.
        first: number of the first step after the warm-up.
        probe: samples the error of the codes.

    Attributes:
        level: 0 for the chosen codec, n for ``LADDER[n - 1]``.
    """

    def __init__(self, codec: Codec, first: int, probe: Probe) -> None:
        self._codec, self._first, self._probe = codec, first, probe
        self._limit = max(LIMIT, TIMES_NORMAL * of_normal(codec).error)
        self.level, self._bad = 0, 0
        self._last = -1  # number of the step that sends the residuals
        self._timed: dict[bool, list[float]] = {True: [], False: []}  # seconds; True: in bf16
        self._ended = math.nan

    def fallback(self, step: int) -> Codec | None:
        """Return the codec that replaces the chosen one in a step; None if none does."""
        if self.level:
            return SENDS_RESIDUALS if step == self._last else LADDER[self.level - 1]
        return LADDER[-1] if self._is_plain(step) else None

    def look(self, step: int, comm: Communicator, timeout_s: float) -> str | None:
        """Record the end of a step. Collective in steps that all ranks derive from `step` alone.

        Returns:
            The reason why the run continues with another codec; None if it does not.

        Raises:
            PeerLost: a rank did not answer.
            PeerMismatch: "call"; a rank is in another collective call.
        """
        now = perf_counter()
        seconds, self._ended = now - self._ended, now
        number = step - self._first
        if UNTIMED <= number < UNTIMED + COMPRESSED + PLAIN and number != UNTIMED + COMPRESSED:
            self._timed[self._is_plain(step)].append(seconds)
        timed = number == UNTIMED + COMPRESSED + PLAIN - 1
        if self.level == len(LADDER) or not (timed or (number > 0 and number % EVERY == 0)):
            return None
        reports = self._gather(comm, timeout_s)
        if timed:
            reason = self._judge_time(reports)
            if reason is not None and self._codec.error_feedback:
                self._last = step + 1
            return reason
        return self._judge_error(max((e for _, _, e in reports if not math.isnan(e)), default=0.0))

    def state(self) -> dict[str, int]:
        """Return the state to save."""
        return {"level": self.level, "first": self._first, "bad": self._bad}

    def load(self, state: dict[str, int] | None, step: int) -> None:
        """Resume at `step` from `state`; None: start watching there, as in a new run."""
        self._timed = {True: [], False: []}
        self._ended = math.nan
        state = {"level": 0, "first": max(step, self._first), "bad": 0} if state is None else state
        self.level, self._first, self._bad = (state[key] for key in _KEYS)

    # ---- parts -----------------------------------------------------------------------------------

    def _is_plain(self, step: int) -> bool:
        return 0 <= step - self._first - UNTIMED - COMPRESSED < PLAIN

    def _gather(self, comm: Communicator, timeout_s: float) -> list[tuple[float, ...]]:
        packed, plain = self._timed[False], self._timed[True]
        # a run that was resumed in between has too few timed steps
        complete = len(packed) == COMPRESSED and len(plain) == PLAIN - 1
        report = _REPORT.pack(
            statistics.median(packed) if complete else math.nan,
            min(plain) if complete else math.nan,
            self._probe.error(),
        )
        reports = gather(
            comm, report, "guard", timeout_s, Channel.SCALE, called='the guard of codec="auto"'
        )
        return [_REPORT.unpack(data) for data in reports]

    def _judge_time(self, reports: Sequence[tuple[float, ...]]) -> str | None:
        packed, plain = (statistics.fmean(report[n] for report in reports) for n in (0, 1))
        if self.level or not packed > plain:  # NaN: not timed
            return None
        self.level = len(LADDER)
        return (
            f"a step takes {packed * 1e3:.1f} ms with {self._codec!r} and {plain * 1e3:.1f} ms in"
            " bf16: the network is not what limits this run"
        )

    def _judge_error(self, error: float) -> str | None:
        limit = LIMIT if self.level else self._limit
        self._bad = self._bad + 1 if error > limit else 0
        if self._bad < IN_A_ROW and not math.isinf(error):
            return None
        old = self._codec if not self.level else LADDER[self.level - 1]
        self.level, self._bad = self.level + 1, 0
        self._probe.forget()
        if math.isinf(error):
            return f"residuals of {old!r} grow without bound"
        return (
            f"{old!r} leaves out {error:.0%} of what it encodes, more than in any training that it"
            " was chosen by"
        )


def check_state(given: Any) -> dict[str, int] | None:
    """Return a copy of a saved guard state; None for None.

    Raises:
        ValueError: `given` is no state of a guard.
    """
    if given is None:
        return None
    check_mapping(given, "'guard' of this state", _KEYS)
    levels = range(len(LADDER) + 1)
    if not all(type(given[key]) is int and given[key] >= 0 for key in _KEYS) or (
        given["level"] not in levels
    ):
        raise ValueError(f"this state has a guard {given!r}, which no run has saved")
    return dict(given)
