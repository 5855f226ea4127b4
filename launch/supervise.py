"""Run one command with all its descendants: forward signals, allow a grace time, and leave no
process and no shared memory behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import sweep

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
REAP_S = 5.0
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def supervise(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    grace_s: float,
    has_failed: Callable[[], bool],
) -> tuple[int, int]:
    """Run `command` until it ends, or until it is killed after a failure or a signal.

    A first SIGINT, SIGTERM or SIGHUP is forwarded to the command's process group; a second one
    kills at once. After `has_failed` returns True, the command has `grace_s` seconds to end by
    itself, and `grace_s` more after a SIGTERM. Remaining processes are killed then, and the shared
    memory of their MPI is removed.

    Returns:
        The command's exit status (128 + n after signal n), and the first signal that this process
        received, or 0.
    """
    # adopt orphans, so that every descendant stays in this process's tree
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # While SIGCHLD is ignored, the system discards the status of a process that has ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The command reads standard input only from a pipe or a file: it has no terminal of its own.
    stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
    # An ignored signal (nohup) stays ignored. The others are blocked and received synchronously.
    stopping = {number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN}
    before, signals = sweep.segments(), list[int]()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    process = subprocess.Popen(
        command,
        env=environ,
        start_new_session=True,
        stdin=stdin,
        # no threads here
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),  # noqa: PLW1509
    )
    deadline, signalled = math.inf, False
    try:
        while process.poll() is None and len(signals) < 2:
            if received := signal.sigtimedwait(stopping, POLL_S):
                signals.append(received.si_signo)
            now = time.monotonic()
            if now >= deadline and signalled:
                break
            if not signalled and (signals or now >= deadline):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signals[0] if signals else signal.SIGTERM)
                deadline, signalled = now + grace_s, True
            elif deadline == math.inf and has_failed():
                deadline = now + grace_s
    finally:
        if process.poll() != 0 or signals or has_failed():
            _kill_descendants(process)
            sweep.remove(before)
        if not signals:  # after one, another Ctrl-C must not disturb the exit
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    status = process.wait()
    return (status if status >= 0 else 128 - status), (signals[0] if signals else 0)


def _kill_descendants(process: subprocess.Popen[bytes]) -> None:
    """Kill all descendants and wait until they are gone; the command is left to its Popen."""
    deadline = time.monotonic() + REAP_S
    while pids := descendants(os.getpid()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        for pid in pids - {process.pid}:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            print(f"gradcomp.launch: these processes do not die: {sorted(pids)}", file=sys.stderr)
            return
        time.sleep(0.01)


def is_dead(pid: int) -> bool:
    """Return whether a process has ended, collected or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def descendants(root: int) -> set[int]:
    """Return the ids of all descendants of `root`, zombies included; none without /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, todo = set[int](), [root]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo += below
    return found
