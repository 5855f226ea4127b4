"""Remove the shared memory that a killed job leaves in /dev/shm of this host.

MPICH and Open MPI store shared memory there in files, which outlive every process. A file is
removed if it has an MPI's name, belongs to this user, was created after the job started, and no
process has it open or mapped: an MPI keeps its files open or mapped from their creation on. Nothing
is removed if processes that could use a file may be invisible here.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

FOLDER, PROC = Path("/dev/shm"), Path("/proc")  # noqa: S108 - where MPIs leave files
NAMES = re.compile(r"(mpich_shm_|sm_segment\.|vader_segment\.).+")  # MPICH; Open MPI 5; 4
# The host's own namespaces (include/linux/proc_ns.h). A container with the host's IPC namespace
# shares its /dev/shm; with another PID namespace it does not see the host's processes.
HOST_IPC, HOST_PID = 0xEFFFFFFF, 0xEFFFFFFC


def segments() -> set[tuple[str, int]]:
    """Return name and inode of every file in /dev/shm with an MPI's name that this user owns."""
    found = set()
    for path in FOLDER.glob("*"):
        with contextlib.suppress(OSError):
            state = path.lstat()
            if NAMES.fullmatch(path.name) and state.st_uid == os.geteuid():
                found.add((path.name, state.st_ino))
    return found


def remove(before: set[tuple[str, int]]) -> None:
    """Remove the segments that are not in `before` and that no process uses."""
    new = segments() - before
    try:
        unused = {name for name, _ in new} - (_used() if new else set())
    except OSError:  # the files in use cannot be determined
        return
    for name in unused:
        with contextlib.suppress(OSError):
            (FOLDER / name).unlink()


def _used() -> set[str]:
    """Return the names of all files that are open or mapped; an OSError if some may be hidden."""
    ipc, pid = (os.stat(PROC / "self/ns" / kind).st_ino for kind in ("ipc", "pid"))
    if ipc == HOST_IPC and pid != HOST_PID:
        raise OSError("the processes of the host are out of sight")
    paths: list[str] = []
    for process in PROC.glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            try:  # read open files first: an MPI maps a file before it closes it
                for descriptor in os.listdir(process / "fd"):
                    with contextlib.suppress(FileNotFoundError):
                        paths.append(os.readlink(process / "fd" / descriptor))
                paths += (process / "maps").read_bytes().decode(errors="replace").splitlines()
            except PermissionError:  # allowed for a container's init, which may have more rights
                if process.name != "1" and process.stat().st_uid == os.geteuid():
                    raise
    return {path.rpartition("/")[2].removesuffix(" (deleted)") for path in paths}
