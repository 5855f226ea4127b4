"""Guard of ``codec="auto"``: switches a run to a faster codec of the accuracy table or to bf16 if
that makes steps shorter, and to a safer one if the error of the codes is larger than in any
training of the table.

**Time**: early steps are timed with the codec, with a faster one that sends more bytes, if the
table has one, and in bf16, from the end of one exchange to the end of the next. The run continues
with what took the shortest, if nearly all of its steps were shorter; in bf16 after steps in 8 bits
that send what the residuals hold.

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
# of the first steps after the decision for bf16, if the chosen codec has residuals; one suffices,
# unless it is discarded
SENDS_RESIDUALS, SENDING = Block(8, residual_decay=1.0), 3
UNTIMED = 3  # first steps, not timed: buckets are rebuilt and buffers allocated
# timed steps with each codec and in bf16; the first with another than the chosen codec allocates
# buffers and is not counted
COMPRESSED, PLAIN = 5, 3
SHORTER = 0.95  # a faster codec's steps take less than this of the chosen one's
EVERY = 100  # steps between two comparisons of errors
IN_A_ROW = 3
# Limits of the relative error (norm of the encoding error / norm of the encoded values): absolute,
# and as a multiple of the error with normally distributed values. All trainings of the accuracy
# table have smaller errors.
LIMIT, TIMES_NORMAL = 0.5, 1.25

_FASTER = -1  # level of the faster codec
_REPORT = struct.Struct("<dddd")  # seconds with the codec, a faster one and in bf16; error
_KEYS = ("level", "first", "bad")


class Guard:
    """The guard of one engine.

    Args:
        codec: the codec that ``"auto"`` has chosen.
        first: number of the first step after the warm-up.
        probe: samples the error of the codes.
        faster: a codec with residuals like those of `codec`, which may take less time; None: none.

    Attributes:
        level: 0 for the chosen codec, -1 for the faster one, n for ``LADDER[n - 1]``.
    """

    _ended: float  # `perf_counter` at the end of the latest step
    _seconds: dict[Codec, list[float]]  # of the timed steps

    def __init__(self, codec: Codec, first: int, probe: Probe, faster: Codec | None = None) -> None:
        self._codec, self._first, self._probe, self._faster = codec, first, probe, faster
        # what is timed: codec, number of steps
        self._timings = [(codec, COMPRESSED), (LADDER[-1], PLAIN)]
        if faster is not None:
            self._timings.insert(1, (faster, COMPRESSED + 1))
        self.level, self._bad = 0, 0
        self._forget_times()

    @property
    def codec(self) -> Codec:
        """The codec that the run continues with, from the latest decision."""
        if self.level == _FASTER and self._faster is not None:
            return self._faster
        return LADDER[self.level - 1] if self.level > 0 else self._codec

    def fallback(self, step: int) -> Codec | None:
        """Return the codec that replaces the chosen one in a step; None if none does."""
        timed = sum(count for _, count in self._timings)
        sending = 0 <= step - self._first - UNTIMED - timed < SENDING
        if sending and self.level == len(LADDER) and self._codec.error_feedback:
            return SENDS_RESIDUALS
        codec = self.codec if self.level else self._timed_codec(step)
        return None if codec is self._codec else codec

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
        number, codec = step - self._first, self._timed_codec(step)
        measured = not math.isnan(seconds)  # the first step after a resume is not
        if measured and codec is not None and codec in (self._codec, self._timed_codec(step - 1)):
            self._seconds[codec].append(seconds)
        timed = codec is not None and self._timed_codec(step + 1) is None
        if self.level == len(LADDER) or not (timed or (number > 0 and number % EVERY == 0)):
            return None
        reports = self._gather(comm, timeout_s)
        if timed:
            return self._judge_time(reports)
        return self._judge_error(max((r[-1] for r in reports if not math.isnan(r[-1])), default=0))

    def state(self) -> dict[str, int]:
        """Return the state to save, which is equal on all ranks."""
        return {"level": self.level, "first": self._first, "bad": self._bad}

    def describe(self) -> str:
        """Return `state` in words."""
        bad = f", {self._bad} errors in a row above the limit" if self._bad else ""
        return f"{self.codec!r} (level {self.level}), steps counted from {self._first}{bad}"

    def load(self, state: dict[str, int] | None, step: int) -> None:
        """Resume at `step` from `state`; None: start watching there, as in a new run."""
        self._forget_times()
        state = {"level": 0, "first": max(step, self._first), "bad": 0} if state is None else state
        self.level, self._first, self._bad = (state[key] for key in _KEYS)
        if self.level == _FASTER and self._faster is None:
            self.level = 0

    # ---- parts -----------------------------------------------------------------------------------

    @property
    def _limit(self) -> float:
        """The largest error that is tolerated."""
        return LIMIT if self.level > 0 else max(LIMIT, TIMES_NORMAL * of_normal(self.codec).error)

    def _timed_codec(self, step: int) -> Codec | None:
        """Return the codec that is timed in a step; None if none is."""
        number = step - self._first - UNTIMED
        for codec, count in self._timings:
            if 0 <= number < count:
                return codec
            number -= count
        return None

    def _forget_times(self) -> None:
        self._ended, self._seconds = math.nan, {codec: [] for codec, _ in self._timings}

    def _gather(self, comm: Communicator, timeout_s: float) -> list[tuple[float, ...]]:
        # a run that was resumed in between has too few timed steps
        complete = all(
            len(self._seconds[codec]) >= count - (codec is not self._codec)
            for codec, count in self._timings
        )
        times = [math.nan] * 3
        if complete:
            # NaN, which is less than nothing, unless nearly all steps are shorter: a busy machine
            # makes some steps longer, of whichever codec
            chosen, plain = sorted(self._seconds[self._codec]), sorted(self._seconds[LADDER[-1]])
            times[0], coded = statistics.median(chosen), chosen[1]
            if self._faster is not None:
                other = sorted(self._seconds[self._faster])
                times[1] = statistics.median(other) if other[-2] < chosen[1] else math.nan
                coded = min(coded, other[1])
            times[2] = plain[0] if plain[-1] < coded else math.nan
        report = _REPORT.pack(*times, self._probe.error())
        reports = gather(
            comm, report, "guard", timeout_s, Channel.SCALE, called='the guard of codec="auto"'
        )
        return [_REPORT.unpack(data) for data in reports]

    def _judge_time(self, reports: Sequence[tuple[float, ...]]) -> str | None:
        packed, faster, plain = (statistics.fmean(r[n] for r in reports) for n in range(3))
        if self.level:
            return None
        # NaN, which is not less than anything: not timed, or no clear difference on some rank
        wins = faster < SHORTER * packed
        best = min(packed, faster)
        text = f"a step takes {packed * 1e3:.1f} ms with {self._codec!r}"
        if not math.isnan(faster):
            text += f", {faster * 1e3:.1f} ms with {self._faster!r}"
        if not math.isnan(plain):
            text += f" and {plain * 1e3:.1f} ms in bf16"
        if plain < best:
            self.level = len(LADDER)
            return f"{text}: the network is not what limits this run"
        if not wins:
            return None
        self.level = _FASTER
        self._probe.forget()
        return text

    def _judge_error(self, error: float) -> str | None:
        old = self.codec
        self._bad = self._bad + 1 if error > self._limit else 0
        if self._bad < IN_A_ROW and not math.isinf(error):
            return None
        self.level, self._bad = max(self.level, 0) + 1, 0
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
    levels = range(_FASTER, len(LADDER) + 1)
    if not all(type(given[key]) is int for key in _KEYS) or not (
        given["level"] in levels and given["first"] >= 0 and given["bad"] >= 0
    ):
        raise ValueError(f"this state has a guard {given!r}, which no run has saved")
    return dict(given)
