"""Watches a run whose codec was chosen by ``"auto"``, and takes it to a safer codec where
compression does not pay, or codes leave out more than they did in any training of the table.

**Time**: `COMPRESSED` early steps are timed with the codec and `PLAIN` in bf16, from the end of one
exchange to the end of the next. If the codec's steps take longer, the run goes on in bf16.

**Error**: every `EVERY` steps ranks compare their latest samples of `gradcomp.exchange.quality`.
After `IN_A_ROW` errors beyond the limit, or once residuals grow without bound, the run goes on with
the next codec of `LADDER`.

All ranks decide from the same gathered numbers, after the same step. Which steps are timed depends
on their numbers alone, and what was decided is part of the saved state.
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

# without residuals, which not every codec has planes for
LADDER: tuple[Codec, ...] = (Block(8, error_feedback=False), Identity("bf16"))
SETTLE = 3  # first steps, in which buckets are rebuilt and buffers made: not timed
COMPRESSED, PLAIN = 5, 3  # steps; the first one in bf16 makes buffers and does not count
EVERY = 100  # steps from one look at errors to the next
IN_A_ROW = 3
# Norm of what codes leave out over the norm of what was encoded, and over what it is with normally
# distributed numbers. In the trainings of the table errors are smaller.
LIMIT, TIMES_NORMAL = 0.5, 1.25

_REPORT = struct.Struct("<ddd")  # seconds with the codec and in bf16, error
_KEYS = ("level", "first", "bad")


class Guard:
    """What one engine watches.

    Args:
        codec: what was chosen.
        first: first step after the warm-up.
        probe: takes the samples.

    Attributes:
        level: how far down the ladder the run is; 0: its own codec.
    """

    def __init__(self, codec: Codec, first: int, probe: Probe) -> None:
        self._codec, self._first, self._probe = codec, first, probe
        self._limit = max(LIMIT, TIMES_NORMAL * of_normal(codec).error)
        self.level, self._bad = 0, 0
        self._timed: dict[bool, list[float]] = {True: [], False: []}  # by whether in bf16
        self._ended = math.nan

    def fallback(self, step: int) -> Codec | None:
        """Return the codec of a step in place of the chosen one; None: the chosen one."""
        if self.level:
            return LADDER[self.level - 1]
        return LADDER[-1] if self._is_plain(step) else None

    def look(self, step: int, comm: Communicator, timeout_s: float) -> str | None:
        """Take note of the end of a step; return why the run goes on with another codec, if it
        does. Collective at the same steps on every rank.

        Raises:
            PeerLost: a rank did not answer.
            PeerMismatch: "call"; a rank is elsewhere.
        """
        now = perf_counter()
        seconds, self._ended = now - self._ended, now
        number = step - self._first
        if SETTLE <= number < SETTLE + COMPRESSED + PLAIN and number != SETTLE + COMPRESSED:
            self._timed[self._is_plain(step)].append(seconds)
        timed = number == SETTLE + COMPRESSED + PLAIN - 1
        if self.level == len(LADDER) or not (timed or (number > 0 and number % EVERY == 0)):
            return None
        reports = self._gather(comm, timeout_s)
        if timed:
            return self._judge_time(reports)
        return self._judge_error(max((e for _, _, e in reports if not math.isnan(e)), default=0.0))

    def state(self) -> dict[str, int]:
        """Return what a run goes on from."""
        return {"level": self.level, "first": self._first, "bad": self._bad}

    def load(self, state: dict[str, int] | None, step: int) -> None:
        """Go on at `step` from `state`; None: watch from there on, as at the start of a run."""
        self._timed = {True: [], False: []}
        self._ended = math.nan
        state = {"level": 0, "first": max(step, self._first), "bad": 0} if state is None else state
        self.level, self._first, self._bad = (state[key] for key in _KEYS)

    # ---- parts -----------------------------------------------------------------------------------

    def _is_plain(self, step: int) -> bool:
        return 0 <= step - self._first - SETTLE - COMPRESSED < PLAIN

    def _gather(self, comm: Communicator, timeout_s: float) -> list[tuple[float, ...]]:
        packed, plain = self._timed[False], self._timed[True]
        # a run that was resumed in between has too few
        whole = len(packed) == COMPRESSED and len(plain) == PLAIN - 1
        mine = _REPORT.pack(
            statistics.median(packed) if whole else math.nan,
            min(plain) if whole else math.nan,
            self._probe.error(),
        )
        found = gather(
            comm, mine, "guard", timeout_s, Channel.SCALE, called='the guard of codec="auto"'
        )
        return [_REPORT.unpack(one) for one in found]

    def _judge_time(self, reports: Sequence[tuple[float, ...]]) -> str | None:
        packed, plain = (statistics.fmean(one[n] for one in reports) for n in (0, 1))
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
        now = self._codec if not self.level else LADDER[self.level - 1]
        self.level, self._bad = self.level + 1, 0
        self._probe.forget()
        if math.isinf(error):
            return f"residuals of {now!r} grow without bound"
        return (
            f"{now!r} leaves out {error:.0%} of what it encodes, more than in any training that it"
            " was chosen by"
        )


def check_state(given: Any) -> dict[str, int] | None:
    """Return what a state has of a guard; None where it has nothing.

    Raises:
        ValueError: it has something else.
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
