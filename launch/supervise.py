"""Run one command and everything below it: pass signals on, give a grace time, leave no process
behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from .segments import Segments

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
    noted_segments: Callable[[], Iterable[tuple[str, int]]],
) -> tuple[int, int]:
    """Run `command` to its end; once a rank has failed or a signal has come, that end is near.

    A first SIGINT, SIGTERM or SIGHUP goes to the command's process group, a second kills at once.
    After `has_failed` the command has `grace_s` to end by itself and as long again after SIGTERM.
    Whatever is left then is killed, and its shared memory, what was seen of it and
    `noted_segments`, is removed.

    Returns:
        The command's status (128 + n after signal n), and the first signal this process was sent,
        or 0.
    """
    _become_subreaper()
    with _collected_signals() as signals:
        segments = Segments(lambda: descendants(os.getpid()))
        process = subprocess.Popen(command, env=environ, start_new_session=True, stdin=_stdin())
        try:
            _wait(process, signals, grace_s, has_failed, segments.look)
        finally:
            if process.poll() != 0 or signals or has_failed():
                _kill_descendants(process)
                segments.remove(noted_segments())
        status = process.wait()
        return (status if status >= 0 else 128 - status), (signals[0] if signals else 0)


def _wait(
    process: subprocess.Popen[bytes],
    signals: list[int],
    grace_s: float,
    has_failed: Callable[[], bool],
    look: Callable[[], None],
) -> None:
    """Return when the process has ended or its time is over; `look` at every turn."""
    deadline, told, failed = float("inf"), False, False
    while process.poll() is None and len(signals) < 2:
        now = time.monotonic()
        if signals and not told:
            _signal_group(process, signals[0])
            deadline, told = now + grace_s, True
        elif not failed and not told and has_failed():
            deadline, failed = now + grace_s, True
        elif now >= deadline:
            if told:
                return
            _signal_group(process, signal.SIGTERM)
            deadline, told = now + grace_s, True
        look()
        time.sleep(POLL_S)


def _stdin() -> int | None:
    """Return what the command reads: a pipe or file as it is, never the terminal, which is not
    its own any more.
    """
    return subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


@contextmanager
def _collected_signals() -> Iterator[list[int]]:
    """Collect the signals that stop; one that is ignored, as by nohup, stays ignored."""
    received: list[int] = []

    def collect(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.getsignal(number) for number in STOPPING}
    for number in STOPPING:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, collect)
    try:
        yield received
    finally:
        for (
            number,
            handler,
        ) in before.items():  # a second Ctrl-C must not meet a launcher that is about to exit
            signal.signal(number, signal.SIG_IGN if received else handler)


def _become_subreaper() -> None:
    """Inherit orphans, so that no descendant can leave this process's tree."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_descendants(process: subprocess.Popen[bytes]) -> None:
    """Kill every process below this one and wait until all are gone."""
    deadline = time.monotonic() + REAP_S
    while pids := descendants(os.getpid()):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.poll()
        _reap_orphans(process)
        if time.monotonic() > deadline:
            print(f"gradcomp.launch: these processes do not die: {sorted(pids)}", file=sys.stderr)
            return
        time.sleep(0.01)


def _reap_orphans(process: subprocess.Popen[bytes]) -> None:
    """Collect inherited processes that have ended; the command's own status is its Popen's to
    collect.
    """
    for pid in children().get(os.getpid(), []):
        if pid != process.pid:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass


def children() -> dict[int, list[int]]:
    """Return {parent: children} of all processes; empty where there is no /proc."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        parent = _parent(int(entry.name))
        if parent is not None:
            found.setdefault(parent, []).append(int(entry.name))
    return found


def descendants(root: int) -> set[int]:
    """Return the processes below `root`, zombies included."""
    tree, found, todo = children(), set[int](), [root]
    while todo:
        for pid in tree.get(todo.pop(), []):
            found.add(pid)
            todo.append(pid)
    return found


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
