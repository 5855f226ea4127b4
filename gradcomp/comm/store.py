"""Meetings and notes of ranks in a store (`torch.distributed.Store`, or anything with its add, set,
get and check).

A meeting is a small all_gather that waits by asking again and again, so that it ends in time
whoever is missing, says who that is, and leaves no collective behind that a late rank could run
into. A note says that a rank has given up or closed its communicator.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from gradcomp.comm.base import (
    CLOSED,
    RankGone,
    first_line,
    gave_up,
    log_wait,
    lost_in_setup,
    name_ranks,
)
from gradcomp.comm.torch_private import leave_store, limit_store, store_is_gone
from gradcomp.waits import waiting

SETUP_VARIABLE = "GRADCOMP_SETUP_TIMEOUT_S"
# longest wait for the other ranks to make their communicators, unless the variable says otherwise
SETUP_S = 60.0
LONGEST_PAUSE_S = 0.05
LOOK_EVERY_S = 1.0
WRITE_S = 2.0  # longest wait until a note stands in the store
LATE_S = 0.2  # a store that takes longer is not waited for again
REASON_LENGTH = 500
_LEFT = 1 << 32  # counted for a rank that has given up; arrivals are counted below it

# of seconds to wait; returns (rank, what it did) of a peer that takes part no more
Look = Callable[[float], tuple[int, str] | None]


def setup_timeout_s(timeout_s: float) -> float:
    """Return how long to wait for the other ranks at the first meeting, at most `timeout_s`."""
    text = os.environ.get(SETUP_VARIABLE)
    try:
        seconds = SETUP_S if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{SETUP_VARIABLE} must be a number of seconds above 0, got {text!r}")
    return min(timeout_s, seconds)


@waiting("setup", "setup")
def meet(
    store: Any,
    rank: int,
    world_size: int,
    mine: bytes,
    timeout_s: float,
    what: str,
    look: Look = lambda patience_s: None,
) -> list[bytes]:
    """Return every rank's `mine`. Collective over the ranks of `store`, which serves one meeting.

    All ranks get the answer, or all get an error: who comes after a rank has given up fails at
    once. Who leaves because of the answer calls `wait_until_read` before.

    Args:
        what: what a rank that is missing has not done ("called register").
        look: called every second while ranks are missing; a rank that it returns ends the meeting
            for this rank in RankGone.

    Raises:
        PeerLost: phase "setup"; a rank is missing, or the store does not answer.
    """
    begun = looked = time.monotonic()
    keys = [f"rank{r}" for r in range(world_size)]
    try:
        store.set(keys[rank], mine)
        if store.add("count", 1) == world_size:
            store.set("end", b"all")
        pause = 0.0005
        while not store.check(["end"]):
            if time.monotonic() - begun > timeout_s:
                count = store.add("count", _LEFT)
                if count % _LEFT < world_size:  # else the last one has just come, and says so
                    store.set("end", str(rank).encode())
                    break
            if time.monotonic() - looked > LOOK_EVERY_S:
                looked = time.monotonic()
                if gone := look(0.0):
                    raise RankGone(gone[0], what=gone[1])
                log_wait(rank, lambda: f"{name_ranks(absent(store, keys))} to have {what}")
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_S)
        end = bytes(store.get("end"))
        if end == b"all":
            found = [bytes(store.get(key)) for key in keys]
            if store.add("read", 1) == world_size:
                for key in ("count", "end", *keys, "read"):
                    store.delete_key(key)
            return found
        missing = absent(store, keys)
    except RuntimeError as error:
        why = (
            "the ranks' store does not answer: the process that hosts it (rank 0, or the launcher)"
            f" has ended; read its output [{first_line(error)}]"
        )
        raise lost_in_setup(begun, why) from error
    if int(end) != rank and not missing:
        why = f"rank {end.decode()} gave up waiting before this rank came"
    else:
        why = f"{name_ranks(missing)} {'have' if len(missing) > 1 else 'has'} not {what}"
    raise lost_in_setup(begun, why, missing[0] if len(missing) == 1 else None)


def absent(store: Any, keys: list[str]) -> list[int]:
    """Return the ranks whose keys are not there."""
    return [rank for rank, key in enumerate(keys) if not store.check([key])]


def wait_until_read(store: Any) -> None:
    """Wait, for WRITE_S at most, until all ranks have read: the store may end with its host."""
    deadline = time.monotonic() + WRITE_S
    with contextlib.suppress(RuntimeError):  # it has gone
        while store.check(["read"]) and time.monotonic() < deadline:
            time.sleep(0.005)


class Notes:
    """Why a rank takes part no more, for its peers to find in a store.

    A store whose host is frozen blocks whoever asks it, so threads of their own ask, and nobody
    waits for them for long. No such thread outlives the interpreter (`_end_calls`).
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        # a garbage collector may close a communicator in the middle of anything
        self._lock = threading.RLock()
        self._reading: _Call | None = None
        self._found: dict[str, tuple[int, str]] = {}  # by "note" and "closed"
        self._written = False

    def give_up(self, reason: str, rank: int | None = None) -> None:
        """Leave a note that this rank has given up, unless it or another rank has left one.

        Args:
            reason: why; with `rank`, what is known of that rank.
            rank: the one that was lost, in whose name the note is.
        """
        if rank is None:
            self._leave("note", self._rank, gave_up(reason[:REASON_LENGTH]))
        else:
            self._leave("note", rank, reason)

    def close(self) -> None:
        """Leave a note that this rank has closed, unless it or another rank has left one."""
        self._leave("closed", self._rank, CLOSED)

    def wait_for(self, what: str) -> None:
        """Leave a note of what this rank waits for; "" for nothing any more."""
        if not _is_silent():
            _Call(self._store, lambda: self._store.set(f"wait {self._rank}", what.encode()))

    def who_waits(self, world_size: int, patience_s: float) -> dict[int, str] | None:
        """Return what every rank that has left such a note waits for; None: the store does not
        answer.
        """
        found: dict[int, str] = {}

        def read() -> None:
            for rank in range(world_size):
                if self._store.check([f"wait {rank}"]):
                    found[rank] = bytes(self._store.get(f"wait {rank}")).decode()

        if _is_silent():
            return None
        call = _Call(self._store, read)
        call.join(patience_s)
        return {rank: what for rank, what in found.items() if what} if call.ended else None

    def look(self, patience_s: float) -> tuple[int, str] | None:
        """Return (rank, what it did) of a peer that has given up; None if unknown in time."""
        return self._found.get("note") or self._read(patience_s).get("note")

    def look_for_cause(self, patience_s: float) -> tuple[int, str] | None:
        """As `look`, after a connection broke: a peer that has closed comes first, since others
        gave up because of it.
        """
        found = self._read(patience_s)
        return found.get("closed") or found.get("note")

    def _leave(self, key: str, rank: int, what: str) -> None:
        with self._lock:
            left, self._written = self._written, True
        # torch logs a page for each write to one that is
        if not left and not store_is_gone(self._store):
            call = _Call(self._store, lambda: self._write(key, rank, what))
            call.join(0.0 if _is_silent() else WRITE_S)

    def _read(self, patience_s: float) -> dict[str, tuple[int, str]]:
        """Return what is known of peers after a look at the store, if it answers in time."""
        with self._lock:
            reading = self._reading
            if reading is None or reading.ended:
                if reading is None and _is_silent():
                    return self._found
                reading = self._reading = _Call(self._store, self._find)
        reading.join(0.0 if reading.is_late() else patience_s)
        return self._found

    def _write(self, key: str, rank: int, what: str) -> None:
        if self._store.add(f"count of {key}", 1) == 1:
            self._store.set(key, json.dumps([rank, what]).encode())

    def _find(self) -> None:
        for key in ("note", "closed"):  # a rank has closed before others give up because of it
            if key not in self._found and self._store.check([key]):
                rank, what = json.loads(bytes(self._store.get(key)))
                if rank != self._rank:
                    self._found[key] = int(rank), str(what)


class _Call:
    """A call of a store in a thread of its own.

    The thread is one of `_thread`: starting one of `threading` takes a lock, which a garbage
    collector that closes a communicator may find taken by the very thread that it runs in.
    """

    def __init__(self, store: Any, call: Callable[[], None]) -> None:
        self.store, self._call = store, call
        self._begun = time.monotonic()
        self.ended = False
        self._end = _thread.allocate_lock()
        self._end.acquire()
        _calls.add(self)
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # the interpreter ends: from Python 3.12 on it starts no thread then
            if not _is_silent():
                limit_store(self.store, WRITE_S)
                self._run()

    def _run(self) -> None:
        try:
            self._call()
        except RuntimeError:  # the store has gone: whoever waits for a peer hears of it otherwise
            pass
        finally:
            self.ended = True
            _calls.discard(self)
            self._end.release()

    def is_late(self) -> bool:
        """Whether the store has not answered for so long that it is not worth waiting for."""
        return not self.ended and time.monotonic() - self._begun > LATE_S

    def join(self, seconds: float) -> None:
        """Wait for the end of the call."""
        if self._end.acquire(timeout=seconds):
            self._end.release()


_calls: set[_Call] = set()  # under way


def _is_silent() -> bool:
    """Whether a store does not answer."""
    return any(call.is_late() for call in list(_calls))


def _end_calls() -> None:
    """Let no thread be in a call of a store when the interpreter ends.

    One that came back from it while the interpreter finalizes would end the process by SIGABRT
    (before Python 3.14): it is stopped in the middle of C++ that lets no exception out.
    """
    deadline = time.monotonic() + WRITE_S
    for call in list(_calls):
        call.join(max(0.0, deadline - time.monotonic()))
    for call in list(_calls):
        leave_store(call.store)
        call.join(WRITE_S)


os.register_at_fork(after_in_child=_calls.clear)  # their threads are the parent's
weakref.finalize(Notes, _end_calls)  # made first, so called after those of all communicators
