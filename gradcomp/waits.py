"""A table of this process's waits for other ranks, for log lines about long waits and for
``python -m gradcomp.doctor --attach PID``.

The table is a memory page with a name in /proc/PID/fd (Linux). Other processes can read it without
a thread or a signal in this process, even if all its threads are blocked.
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
WATCH_S = 10.0  # seconds; shorter waits are never long
USUAL = 3.0  # a long wait takes more than this times the longest successful one of its kind
_SLOT = struct.Struct("<d120s")  # start by time.monotonic() in seconds, 0: free; text
_SLOTS = mmap.PAGESIZE // _SLOT.size
_RANK = re.compile(rb"\0(?:RANK|OMPI_COMM_WORLD_RANK|PMI_RANK|SLURM_PROCID)=(\d+)")


class Wait:
    """A wait in progress.

    Attributes:
        kind: kind of the wait, such as "first_phase".
        what: text, such as "first_phase of bucket 2".
        outer: the wait of this thread that contains this one, or None.
        noted: whether it was published to the other ranks.
        logged: whether it was logged.
    """

    def __init__(self, kind: str, what: str, outer: Wait | None) -> None:
        self.kind, self.what, self.outer = kind, what, outer
        self.noted = self.logged = False
        self._begun, self._table = time.monotonic(), _table()
        self._slot = self._table.take(self._begun, what)

    def seconds(self) -> float:
        """Return the seconds since it started."""
        return time.monotonic() - self._begun

    def is_long(self) -> bool:
        """Return whether it takes much longer than usual (`WATCH_S`, `USUAL`)."""
        return self.seconds() > max(WATCH_S, USUAL * _longest.get(self.kind, 0.0))

    def is_for(self, whom: str) -> None:
        """Add to the text in the table whom the wait is for."""
        self._table.put(self._slot, self._begun, f"{self.what} for {whom}")

    def end(self, *, well: bool) -> None:
        """Remove it from the table. If it ended `well`, its duration counts as usual."""
        self._table.give_back(self._slot)
        if well and self.seconds() > WATCH_S:
            _longest[self.kind] = max(self.seconds(), _longest.get(self.kind, 0.0))


class Seen(NamedTuple):
    """The waits of another process.

    Attributes:
        rank: its rank, or None if it is unknown.
        waits: (text, seconds) of each wait, longest first.
    """

    rank: int | None
    waits: list[tuple[str, float]]


@contextlib.contextmanager
def waiting(kind: str, what: str) -> Iterator[Wait]:
    """Context manager that puts a wait of this thread for other ranks into the table.

    Args:
        kind: waits of the same kind usually take a similar time, such as those for one phase.
        what: text of the wait.
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
    """Return the waits of a process on this machine; None if it has not exchanged anything yet, or
    does not run gradcomp.

    Raises:
        OSError: there is no such process, or it belongs to another user.
    """
    folder, seen = Path("/proc", str(pid)), None
    for file in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if NAME in os.readlink(file):
                match = _RANK.search(b"\0" + (folder / "environ").read_bytes())
                seen = Seen(int(match[1]) if match else None, _read(file.read_bytes()))
    return seen


def _read(page: bytes) -> list[tuple[str, float]]:
    now = time.monotonic()
    slots = _SLOT.iter_unpack(page[: _SLOTS * _SLOT.size])
    waits = [(text.rstrip(b"\0").decode(errors="replace"), now - at) for at, text in slots if at]
    return sorted(waits, key=lambda one: -one[1])


class _Table:
    """The memory page with the table. It does nothing if the system has no memfd, or no file
    descriptor left.
    """

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
        except IndexError:  # table is full
            return None
        self.put(slot, begun, what)
        return slot

    def put(self, slot: int | None, begun: float, what: str) -> None:
        if slot is not None and self._page is not None:
            _SLOT.pack_into(self._page, slot * _SLOT.size, begun, what.encode()[:120])

    def give_back(self, slot: int | None) -> None:
        if slot is not None and self._page is not None:
            self.put(slot, 0.0, "")
            self._free.append(slot)

    def close(self) -> None:
        if self._page is not None:
            self._page.close()
            os.close(self._file)
            self._page = None


_mine = threading.local()
_longest: dict[str, float] = {}  # seconds of the longest successful wait, by kind
_made: list[_Table] = []  # the table of this process, once it has waited
_making = threading.Lock()


def _table() -> _Table:
    if not _made:
        with _making:
            if not _made:
                _made.append(_Table())
    return _made[0]


def _forget() -> None:
    """In a forked child, close the parent's table and start without one."""
    global _making
    _making = threading.Lock()
    for table in _made:
        table.close()
    _made.clear()
    _mine.__dict__.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
