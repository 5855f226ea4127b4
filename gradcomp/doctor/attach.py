"""``--attach PID``: what running ranks wait for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gradcomp import waits


def attach(pids: Sequence[int]) -> int:
    """Print a line for each process of this machine; return 1 if one cannot be looked at."""
    failed = False
    for pid in pids:
        try:
            seen = waits.look(pid)
        except OSError as error:
            why = "no process with that number, or another user's, or this is not Linux"
            print(f"pid {pid}: {why} ({error.strerror})", file=sys.stderr)
            failed = True
        else:
            print(describe(pid, seen))
    return int(failed)


def describe(pid: int, seen: waits.Seen | None) -> str:
    """Return what there is to say of a process."""
    if seen is None:
        return f"pid {pid}: has not waited for another rank yet, or does not run gradcomp"
    name = f"pid {pid}{'' if seen.rank is None else f', rank {seen.rank}'}"
    if not seen.waits:
        return f"{name}: waits for no other rank; py-spy dump --pid {pid} shows what it does"
    return "\n".join(
        f"{name}: has waited {seconds:.1f} s in {what}" for what, seconds in seen.waits
    )
