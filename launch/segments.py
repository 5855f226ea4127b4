"""Remove the shared memory that a job's MPI leaves on this host when its ranks are killed.

MPICH and Open MPI back it by files in /dev/shm, which outlive every process. Only a file that a
process below the launcher had mapped, that did not exist before the job, and that belongs to this
user, is removed; all of the job's processes have ended by then. A rank writes down what it has
mapped as soon as its MPI is there, for it may end before the launcher's next look; the looks find
what comes later. Uses the standard library alone: a rank runs this file too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")
PREFIXES = ("mpich_shm_", "sm_segment.", "vader_segment.")  # MPICH; Open MPI 5; Open MPI 4
TRIES = 40  # looks at who has mapped a new file, before it is taken for another job's


class Segments:
    """The shared memory of one job.

    Args:
        pids: returns the processes of the job.
    """

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._known = {
            path: TRIES for path in _segments()
        }  # inode by inode, with the looks it has had
        self._own: set[tuple[str, int]] = set()

    def look(self) -> None:
        """Take note of segments that have come; call it often."""
        new = [
            found
            for found in _segments()
            if self._known.setdefault(found, 0) < TRIES and found not in self._own
        ]
        if not new:
            return
        for found in new:
            self._known[found] += 1
        mapped = {line for pid in self._pids() for line in _mapped(pid)}
        self._own |= {(path, inode) for path, inode in new if path in mapped}

    def remove(self, noted: Iterable[tuple[str, int]] = ()) -> None:
        """Remove what is left, path and inode `noted` by the ranks too; the job's processes must
        have ended.
        """
        for path, _ in self._own.union(noted) & _segments():
            try:
                os.unlink(path)
            except OSError:
                pass  # somebody was quicker


def mapped_by(pid: int) -> set[tuple[str, int]]:
    """Return path and inode of the segments that a process has mapped."""
    mapped = _mapped(pid)
    return {(path, inode) for path, inode in _segments() if path in mapped}


def _segments() -> set[tuple[str, int]]:
    """Return path and inode of every file of this user in the folder that may be an MPI's."""
    try:
        entries = list(os.scandir(FOLDER))
    except OSError:
        return set()
    found = set()
    for entry in entries:
        if entry.name.startswith(PREFIXES):
            try:
                state = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if state.st_uid == os.geteuid():
                found.add((entry.path, state.st_ino))
    return found


def _mapped(pid: int) -> set[str]:
    """Return the files that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return {fields[5] for line in lines if len(fields := line.split(None, 5)) == 6}
