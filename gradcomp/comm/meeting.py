"""Meetings and notes of ranks in a store (`torch.distributed.Store`, or anything with its add, set, get and check).

A meeting is a small all_gather that waits by asking again and again, so that it ends in time whoever is missing, says who
that is, and leaves no collective behind that a late rank could run into. A note tells the peers that this rank has given up.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from gradcomp.errors import PeerLost

SETUP_VARIABLE = "GRADCOMP_SETUP_TIMEOUT_S"
SETUP_S = 60.0  # longest wait for the other ranks to make their communicators, unless the variable says otherwise
LONGEST_PAUSE_S = 0.05
LOOK_EVERY_S = 1.0
TELL_S = 2.0  # longest wait until a note stands in the store
_LEFT = 1 << 32  # counted for a rank that has given up; arrivals are counted below it


def setup_timeout_s(timeout_s: float) -> float:
    """Return how long to wait for the other ranks at the first meeting, in seconds; at most `timeout_s`.

    Raises:
        ValueError: GRADCOMP_SETUP_TIMEOUT_S is no positive number.
    """
    text = os.environ.get(SETUP_VARIABLE)
    try:
        seconds = SETUP_S if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{SETUP_VARIABLE} must be a number of seconds above 0, got {text!r}")
    return min(timeout_s, seconds)


def meet(
    store: Any,
    rank: int,
    world_size: int,
    mine: bytes,
    timeout_s: float,
    what: str,
    look: Callable[[], None] = lambda: None,
) -> list[bytes]:
    """Return every rank's `mine`. Collective over the ranks of `store`, which serves one meeting.

    All ranks get the answer, or all get an error: who comes after somebody has given up fails at once.

    Args:
        what: what a rank that is missing has not done ("called register").
        look: called every second while ranks are missing; what it raises ends the meeting for this rank.

    Raises:
        PeerLost: phase "setup"; a rank is missing, or the store does not answer.
    """
    begun = looked = time.monotonic()
    try:
        store.set(f"rank{rank}", mine)
        count = store.add("count", 1)
        if count == world_size:
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
                look()
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_S)
        end = bytes(store.get("end"))
        if end == b"all":
            found = [bytes(store.get(f"rank{r}")) for r in range(world_size)]
            if store.add("read", 1) == world_size:
                for key in ("count", "end", "read", *(f"rank{r}" for r in range(world_size))):
                    store.delete_key(key)
            return found
        missing = [r for r in range(world_size) if not store.check([f"rank{r}"])]
    except RuntimeError as error:
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise PeerLost("setup", -1, time.monotonic() - begun, f"the ranks' store does not answer: {text}") from error
    late = f"rank {end.decode()} gave up waiting before this rank came" if int(end) != rank and not missing else ""
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    verb = "have" if len(missing) > 1 else "has"
    raise PeerLost("setup", -1, time.monotonic() - begun, late or f"{who} {verb} not {what}")


class Notes:
    """Why a rank takes part no more, for its peers to find in a store.

    A store whose host is gone may block whoever asks it, so threads of their own do, and nobody waits for them for long.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._lock = threading.Lock()
        self._looking: threading.Thread | None = None
        self._found: tuple[int, str] | None = None
        self._told = False

    def tell(self, reason: str) -> None:
        """Leave a note, unless another rank has left one."""
        with self._lock:
            told, self._told = self._told, True
        if not told:
            self._run(lambda: self._write(reason)).join(TELL_S)

    def look(self, patience_s: float) -> tuple[int, str] | None:
        """Return (rank, reason) of a peer that has left a note, None if nothing is known after `patience_s`."""
        with self._lock:
            if self._found is None and (self._looking is None or not self._looking.is_alive()):
                self._looking = self._run(self._read)
            looking = self._looking
        if looking is not None:
            looking.join(patience_s)
        return self._found

    def _run(self, work: Any) -> threading.Thread:
        def quietly() -> None:
            try:
                work()
            except RuntimeError:  # the store has gone: whoever waits for a peer hears of it otherwise
                return

        thread = threading.Thread(target=quietly, name="gradcomp-notes", daemon=True)
        thread.start()
        return thread

    def _write(self, reason: str) -> None:
        if self._store.add("gone", 1) == 1:
            self._store.set("note", json.dumps([self._rank, reason[:500]]).encode())

    def _read(self) -> None:
        if self._store.check(["note"]):
            rank, reason = json.loads(bytes(self._store.get("note")))
            if rank != self._rank:
                self._found = int(rank), str(reason)
