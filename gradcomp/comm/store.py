"""Meetings and notes of ranks in a store (`torch.distributed.Store`, or any object with its methods
`add`, `set`, `get` and `check`).

A meeting is a small all_gather that polls the store. It therefore times out if any rank is missing,
names the missing ranks, and leaves no pending collective for a late rank. A note tells peers that a
rank has given up or has closed its communicator.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradcomp.comm.base import (
    CLOSED,
    first_line,
    gave_up,
    given_up_on,
    log_wait,
    lost_in_setup,
    lost_rank,
    name_ranks,
)
from gradcomp.comm.peers import this_process
from gradcomp.comm.torch_private import leave_store, limit_store, store_is_gone
from gradcomp.waits import waiting

SETUP_VARIABLE = "GRADCOMP_SETUP_TIMEOUT_S"
# longest wait for the other ranks to create their communicators; the variable overrides it
SETUP_S = 60.0
LONGEST_PAUSE_S = 0.05
LOOK_EVERY_S = 1.0
WRITE_S = 2.0  # longest wait until a note is written to the store
ANSWER_S = 1.5  # time in which ranks that wait answer `Notes.find_silent`; they look every second
LATE_S = 1.0  # after this time without an answer, a store is considered not to respond
REASON_LENGTH = 500
_LEFT = 1 << 32  # added to the counter by a rank that gives up; lower bits count the arrivals

# rank and description of a peer that has given up or closed, or was lost; rank None: not known, and
# the description is a whole sentence
Lost = tuple[int | None, str]
Look = Callable[[float], Lost | None]  # takes the seconds to wait


def setup_timeout_s(timeout_s: float) -> float:
    """Return the timeout of the first meeting, in seconds: at most `timeout_s`."""
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
    numbers: Sequence[int],
    mine: bytes,
    timeout_s: float,
    what: str,
    look: Look = lambda patience_s: None,
) -> list[bytes]:
    """Return the `mine` of every rank, in rank order. Collective over the ranks of `store`.

    Either all ranks return the result, or all raise: a rank that arrives after another has given up
    fails immediately. A rank that exits because of the result must call `wait_until_read` first.

    Args:
        store: a store used for this meeting only.
        rank: of this process among those of the store.
        numbers: of all of them in the job, by which errors name them.
        what: what a missing rank has not done, for the error ("called register").
        look: called every second while ranks are missing; if it returns a lost rank, this rank
            raises ConnectionError.

    Raises:
        PeerLost: phase "setup"; a rank is missing, or the store does not answer.
        ConnectionError: see `look`; RankGone, if the lost rank is known.
    """
    begun = looked = time.monotonic()
    keys = {number: f"rank{r}" for r, number in enumerate(numbers)}
    own, world_size = numbers[rank], len(numbers)
    try:
        store.set(keys[own], mine)
        if store.add("count", 1) == world_size:
            store.set("end", b"all")
        pause = 0.0005
        while not store.check(["end"]):
            if time.monotonic() - begun > timeout_s:
                count = store.add("count", _LEFT)
                if count % _LEFT < world_size:  # otherwise the last rank has just arrived
                    store.set("end", str(own).encode())
                    break
            if time.monotonic() - looked > LOOK_EVERY_S:
                looked = time.monotonic()
                if gone := look(0.0):
                    raise lost_rank(*gone)
                log_wait(own, lambda: f"{name_ranks(absent(store, keys))} to have {what}")
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_S)
        end = bytes(store.get("end"))
        if end == b"all":
            found = [bytes(store.get(key)) for key in keys.values()]
            if store.add("read", 1) == world_size:
                for key in ("count", "end", *keys.values(), "read"):
                    store.delete_key(key)
            return found
        missing = absent(store, keys)
    except RuntimeError as error:
        why = (
            "the ranks' store does not answer: the process that hosts it (rank 0, or the launcher)"
            f" has ended; read its output [{first_line(error)}]"
        )
        raise lost_in_setup(begun, why) from error
    if int(end) != own and not missing:
        why = f"rank {end.decode()} gave up waiting before this rank came"
    else:
        why = f"{name_ranks(missing)} {'have' if len(missing) > 1 else 'has'} not {what}"
    raise lost_in_setup(begun, why, missing[0] if len(missing) == 1 else None)


def absent(store: Any, keys: Mapping[int, str]) -> list[int]:
    """Return the ranks whose keys are not in the store."""
    return [rank for rank, key in keys.items() if not store.check([key])]


def wait_until_read(store: Any) -> None:
    """Wait up to WRITE_S until all ranks have a meeting's result: the store ends with its host."""
    deadline = time.monotonic() + WRITE_S
    with contextlib.suppress(RuntimeError):  # the store is gone
        while store.check(["read"]) and time.monotonic() < deadline:
            time.sleep(0.005)


class Notes:
    """Notes in a store, by which ranks tell peers that they gave up, closed, or wait.

    Calls of a store block if its host is frozen. Each call therefore runs in a thread, and waits
    for the thread are short. No such thread outlives the interpreter (`_end_calls`).

    Args:
        store: a store used by these ranks only.
        rank: of this process among them.
        numbers: of all of them in the job, by which notes name them.
    """

    def __init__(self, store: Any, rank: int, numbers: Sequence[int]) -> None:
        self._store, self._rank, self._numbers = store, rank, numbers
        self._number = numbers[rank]
        # reentrant: the garbage collector may close a communicator at any time
        self._lock = threading.RLock()
        self._reading: _Call | None = None
        self._found: dict[str, Lost] = {}  # by "note" or "closed"
        self._written = self._knows = self._answered = False

    def give_up(self, reason: str) -> None:
        """Leave a note that this rank has given up, unless this or another rank has left one."""
        what = f"{this_process()} {gave_up(reason[:REASON_LENGTH])}"
        self._leave("note", self._number, what)

    def blame(self, rank: int | None, what: str) -> None:
        """Leave a note of a lost rank, unless this or another rank has left one."""
        self._leave("note", rank, what)

    def close(self) -> None:
        """Leave a note that this rank has closed, unless this or another rank has left one."""
        self._leave("closed", self._number, f"{this_process()} {CLOSED}")

    def wait_for(self, what: str) -> None:
        """Leave a note of what this rank is waiting for; "" clears it."""
        if not _is_silent():
            _Call(self._store, lambda: self._store.set(f"wait {self._rank}", what.encode()))

    def who_waits(self, patience_s: float) -> dict[int, str] | None:
        """Return what each rank with such a note waits for; None if the store does not answer."""
        found: dict[int, str] = {}

        def read() -> None:
            for rank, number in enumerate(self._numbers):
                if self._store.check([f"wait {rank}"]):
                    found[number] = bytes(self._store.get(f"wait {rank}")).decode()

        if _is_silent():
            return None
        call = _Call(self._store, read)
        call.join(patience_s)
        return {rank: what for rank, what in found.items() if what} if call.ended else None

    def find_silent(self, meanwhile: Callable[[], None]) -> int | None:
        """Ask who waits, and return the one rank that does not answer within ANSWER_S; None if not
        exactly one, or the store does not answer.

        Ranks that wait answer with their next look for notes, and call `meanwhile` every 0.1 s
        while they ask themselves. Notes of waiting do not tell: a rank may have waited too short a
        time for one, and that of a frozen rank stays.
        """
        others = [rank for rank in range(len(self._numbers)) if rank != self._rank]
        silent: list[int] = []

        def ask() -> None:
            self._store.set(f"answer {self._rank}", b"")
            self._store.set("asked", b"")

        def read() -> None:
            silent.extend(absent(self._store, {rank: f"answer {rank}" for rank in others}))

        if _is_silent():
            return None
        _Call(self._store, ask)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            meanwhile()
            time.sleep(0.1)
        call = _Call(self._store, read)
        call.join(LATE_S)
        return silent[0] if call.ended and len(silent) == 1 else None

    def look(self, patience_s: float) -> Lost | None:
        """Return a rank that has given up or is lost, and its description; None if there is no
        note, or the store does not answer within `patience_s` seconds.
        """
        return self._found.get("note") or self._read(patience_s).get("note")

    def look_for_cause(self, patience_s: float) -> Lost | None:
        """As `look` after a broken connection; a closed peer first, since others gave up then."""
        found = self._read(patience_s)
        return found.get("closed") or found.get("note")

    def _leave(self, key: str, rank: int | None, what: str) -> None:
        with self._lock:
            left, self._written = self._written, True
        # torch logs a long stack trace for each write to a store that is gone
        if not left and not store_is_gone(self._store):
            call = _Call(self._store, lambda: self._write(key, rank, what))
            call.join(0.0 if _is_silent() else WRITE_S)

    def _read(self, patience_s: float) -> dict[str, Lost]:
        """Read the notes, if the store answers in time, and return all known ones."""
        with self._lock:
            reading = self._reading
            if reading is None or reading.ended:
                if reading is None and _is_silent():
                    return self._found
                reading = self._reading = _Call(self._store, self._find)
        reading.join(0.0 if reading.is_late() else patience_s)
        return self._found

    def _write(self, key: str, rank: int | None, what: str) -> None:
        if self._store.add(f"count of {key}", 1) == 1:
            self._store.set(key, json.dumps([rank, what]).encode())
        if key == "note":
            self._know(rank)

    def _find(self) -> None:
        # note first: a rank closes before others give up because of it, so both are found
        for key in ("note", "closed"):
            if key not in self._found and self._store.check([key]):
                rank, what = json.loads(bytes(self._store.get(key)))
                if rank != self._number:
                    self._found[key] = rank, what
                    self._know(rank)
                elif not self._written:
                    self._found[key] = given_up_on(rank, what)
        if not self._answered and self._store.check(["asked"]):
            self._answered = True
            self._store.set(f"answer {self._rank}", b"")

    def _know(self, lost: int | None) -> None:
        """Count this rank among those that know of the lost one, unless it is that one."""
        if not self._knows:
            self._knows = True
            if lost != self._number:
                self._store.add("known", 1)
            _informed.append(self)

    def wait_until_known(self) -> None:
        """Wait, at most for WRITE_S, until all ranks know of the lost one."""
        deadline, known = time.monotonic() + WRITE_S, 0

        def read() -> None:
            nonlocal known
            known = self._store.add("known", 0)

        while known < len(self._numbers) - 1 and time.monotonic() < deadline:
            if _is_silent() or store_is_gone(self._store):
                return
            _Call(self._store, read).join(WRITE_S)
            time.sleep(0.02)


class _Call:
    """A call of a store in a separate thread.

    The thread is started by `_thread`. Starting a `threading.Thread` takes a lock, which would
    deadlock if the garbage collector closes a communicator in a thread that holds the lock.
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
        except RuntimeError:  # at interpreter exit, Python 3.12 and later start no threads
            if not _is_silent():
                limit_store(self.store, WRITE_S)
                self._run()

    def _run(self) -> None:
        try:
            self._call()
        except RuntimeError:  # the store is gone; waits for peers detect that by other means
            pass
        finally:
            self.ended = True
            _calls.discard(self)
            self._end.release()

    def is_late(self) -> bool:
        """Return whether the store has not answered for longer than LATE_S."""
        return not self.ended and time.monotonic() - self._begun > LATE_S

    def join(self, seconds: float) -> None:
        """Wait for the end of the call, at most for `seconds`."""
        if self._end.acquire(timeout=seconds):
            self._end.release()


_calls: set[_Call] = set()  # in progress
_informed: list[Notes] = []  # those of this process with a lost rank


def _is_silent() -> bool:
    """Return whether any store does not answer."""
    return any(call.is_late() for call in list(_calls))


def _end_calls() -> None:
    """End all calls of stores before the interpreter exits.

    Before Python 3.14, a thread that returns from such a call while the interpreter finalizes
    aborts the process by SIGABRT: Python stops the thread inside C++ code that is noexcept.

    Before it, a rank that knows of a lost one waits for the others to know: the store may end with
    this process, and they would take it for the lost one.
    """
    for notes in _informed[:1]:  # further ones are of communicators that nobody may wait on
        notes.wait_until_known()
    deadline = time.monotonic() + WRITE_S
    for call in list(_calls):
        call.join(max(0.0, deadline - time.monotonic()))
    for call in list(_calls):
        leave_store(call.store)
        call.join(WRITE_S)


os.register_at_fork(after_in_child=_calls.clear)  # a child has no threads of its parent
os.register_at_fork(after_in_child=_informed.clear)
weakref.finalize(Notes, _end_calls)  # registered first, so it runs after those of communicators
