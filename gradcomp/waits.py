"""What this process waits for from other ranks, for a log line when it takes long, and for
``python -m gradcomp.doctor --attach PID``.

The waits of a process stand in a page of memory that has a name in /proc/PID/fd (Linux). Who looks
from outside needs no thread and no signal of the process, whatever its threads are stuck in.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NAME = "gradcomp-waits"
WATCH_S = 10.0  # a shorter wait is no news
USUAL = 3.0  # nor is one of up to so many times the longest of its kind that ended well
_SLOT = struct.Struct("<d120s")  # when it began on time.monotonic's clock, 0 for none; for what
_SLOTS = mmap.PAGESIZE // _SLOT.size
_RANK = re.compile(rb"\0(?:RANK|OMPI_COMM_WORLD_RANK|PMI_RANK|SLURM_PROCID)=(\d+)")


class Wait:
    """A wait under way.

    Attributes:
        what: is waited for, such as "first_phase of bucket 2".
        noted: the other ranks can read of it.
        told: it has been logged.
    """

    def __init__(self, kind: str, what: str, outer: Wait | None) -> None:
        self.kind, self.what, self.outer = kind, what, outer
        self.noted = self.told = False
        self._begun, self._table = time.monotonic(), _table()
        self._slot = self._table.take(self._begun, what)

    def seconds(self) -> float:
        """Return how long it has taken until now."""
        return time.monotonic() - self._begun

    def is_long(self) -> bool:
        """Return whether it takes much longer than usual."""
        return self.seconds() > max(WATCH_S, USUAL * _longest.get(self.kind, 0.0))

    def end(self, *, well: bool) -> None:
        """Take it out of the table; one that ended well says what is usual."""
        self._table.give_back(self._slot)
        if well and self.seconds() > WATCH_S:
            _longest[self.kind] = max(self.seconds(), _longest.get(self.kind, 0.0))


class Seen(NamedTuple):
    """What a process waits for, seen from outside: (what, seconds) of each wait."""

    rank: int | None
    waits: list[tuple[str, float]]


@contextlib.contextmanager
def waiting(kind: str, what: str) -> Iterator[Wait]:
    """Within it, this thread waits for other ranks.

    Args:
        kind: waits of one kind usually take as long, such as those for one phase.
    """
    _mine.wait = wait = Wait(kind, what, current())
    well = False
    try:
        yield wait
        well = True
    finally:
        _mine.wait = wait.outer
        wait.end(well=well)


def current() -> Wait | None:
    """Return the innermost wait of this thread."""
    return getattr(_mine, "wait", None)


def look(pid: int) -> Seen | None:
    """Return what a process of this machine waits for; None: it has not exchanged anything yet, or
    does not run gradcomp.

    Raises:
        OSError: there is no such process, or it is another user's.
    """
    folder, seen = Path("/proc", str(pid)), None
    for file in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if NAME in os.readlink(file):
                found = _RANK.search(b"\0" + (folder / "environ").read_bytes())
                seen = Seen(int(found[1]) if found else None, _read(file.read_bytes()))
    return seen


def _read(page: bytes) -> list[tuple[str, float]]:
    now = time.monotonic()
    slots = _SLOT.iter_unpack(page[: _SLOTS * _SLOT.size])
    found = [(text.rstrip(b"\0").decode(errors="replace"), now - at) for at, text in slots if at]
    return sorted(found, key=lambda one: -one[1])


class _Table:
    """The page; without one where the system has no memory with a name, or no descriptor left."""

    def __init__(self) -> None:
        self._free = list(range(_SLOTS))
        self._page: mmap.mmap | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._file = os.memfd_create(NAME)
            os.truncate(self._file, mmap.PAGESIZE)
            self._page = mmap.mmap(self._file, mmap.PAGESIZE)

    def take(self, begun: float, what: str) -> int | None:
        if self._page is None:
            return None
        try:
            slot = self._free.pop()
        except IndexError:  # more at once than anybody would read
            return None
        _SLOT.pack_into(self._page, slot * _SLOT.size, begun, what.encode()[:120])
        return slot

    def give_back(self, slot: int | None) -> None:
        if slot is not None and self._page is not None:
            _SLOT.pack_into(self._page, slot * _SLOT.size, 0.0, b"")
            self._free.append(slot)

    def close(self) -> None:
        if self._page is not None:
            self._page.close()
            os.close(self._file)
            self._page = None


_mine = threading.local()
_longest: dict[str, float] = {}  # seconds, by kind
_made: list[_Table] = []  # this process's, at its first wait
_making = threading.Lock()


def _table() -> _Table:
    if not _made:
        with _making:
            if not _made:
                _made.append(_Table())
    return _made[0]


def _forget() -> None:
    """Leave the parent's page alone, in a child."""
    global _making
    _making = threading.Lock()
    for table in _made:
        table.close()
    _made.clear()
    _mine.__dict__.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
