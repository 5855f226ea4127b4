"""Run one command and everything below it: pass signals on, give a grace time, leave no process
and no shared memory behind.
"""

from __future__ import annotations

import contextlib
import ctypes
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
    """Run `command` to its end; once a rank has failed or a signal has come, that end is near.

    A first SIGINT, SIGTERM or SIGHUP goes to the command's process group, a second kills at once.
    After `has_failed` the command has `grace_s` to end by itself and as long again after SIGTERM.
    Whatever is left then is killed, and the shared memory of its MPI is removed.

    Returns:
        The command's status (128 + n after signal n), and the first signal this process was sent,
        or 0.
    """
    # inherit orphans, so that no process can leave this one's tree
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Where SIGCHLD is ignored, the system keeps no status of a process that has ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The command reads a pipe or a file that was given; it has no terminal of its own.
    stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
    # A signal that is ignored, as by nohup, stays ignored. The others are blocked and waited for.
    stopping = {number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN}
    before, signals = sweep.segments(), list[int]()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    process = subprocess.Popen(
        command,
        env=environ,
        start_new_session=True,
        stdin=stdin,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),  # noqa: PLW1509 - no threads here
    )
    deadline, signalled, failed = float("inf"), False, False
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
            elif not signalled and not failed and has_failed():
                deadline, failed = now + grace_s, True
    finally:
        if process.poll() != 0 or signals or has_failed():
            _kill_descendants(process)
            sweep.remove(before)
        if not signals:  # after one, another Ctrl-C must not disturb the exit
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    status = process.wait()
    return (status if status >= 0 else 128 - status), (signals[0] if signals else 0)


def _kill_descendants(process: subprocess.Popen[bytes]) -> None:
    """Kill every process below this one and wait until all are gone; the status of the command
    itself is left to its Popen.
    """
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


def descendants(root: int) -> set[int]:
    """Return the processes below `root`, zombies included; none where there is no /proc."""
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
