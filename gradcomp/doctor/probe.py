"""What a lost peer does: a small group of its own in which one member falls silent and is then
killed, while the others wait for it.

Over gloo the members are helpers, one a rank, forked before anything was started: ending one harms
nobody. Over MPI a killed process ends the whole job, as its launcher has it, so there a rank is
silent for a while, in a communicator of a few ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from gradcomp.comm.base import Channel, Communicator, Work
from gradcomp.comm.notices import Notices
from gradcomp.comm.torch_private import store_below
from gradcomp.comm.torchdist import TorchCommunicator, open_group, open_store
from gradcomp.errors import GradcompError, PeerLost, peers_answer

PATIENCE_S = 1.0  # of those that wait for a silent member
KILLED_PATIENCE_S = (
    10.0  # of the group that waits for one that is killed: no time-out, it has to hear of the end
)
KILL_AFTER_S = 0.3
LATE_S = 3.0  # after which an error is none in time
SETUP_S = 6.0  # longest wait for the members to meet
PR_SET_PDEATHSIG = 1
GAVE_UP = "gave up"
ENDED = {"failed": "it ended without a word"}  # as the one that is lost does


class Helper:
    """A fork of this process, as it is now, that takes part in a probe when it is told to, and
    ends with this process.
    """

    def __init__(self) -> None:
        (commands, self._commands), (self._answers, answers) = os.pipe(), os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._commands)
            os.close(self._answers)
            _help(parent, commands, answers)
        os.close(commands)
        os.close(answers)

    def connect(self, host: str, port: int, timeout_s: float) -> None:
        """Have it connect to the store at an address meanwhile: a slow name server holds up
        every process that does.
        """
        self._say(host, port, timeout_s)

    def start(self, prefix: str, member: int, members: int) -> None:
        """Have it take part, as one of so many members; the last of them is lost."""
        self._say(prefix, member, members)

    def _say(self, *words: str | float) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has gone, and its answer says why
            os.write(self._commands, json.dumps(words).encode() + b"\n")

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return what it has to tell; where it tells nothing, why."""
        ready, _, _ = select.select([self._answers], [], [], timeout_s)
        data = os.read(self._answers, 1 << 16) if ready else b""
        if data:
            found: dict[str, Any] = json.loads(data)
            return found
        return ENDED if ready else {"failed": f"it hangs: no answer for {timeout_s:.1f} s"}

    def end(self) -> None:
        """End it, if it has not ended by itself."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


def members_of(hosts: Sequence[str]) -> list[int]:
    """Return the ranks whose helpers make a group: of two or three hosts one each, or of one host
    up to three; the last is lost.

    Args:
        hosts: of every rank, what tells it from others.
    """
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    others = [rank for rank in range(len(hosts)) if rank not in firsts]
    return sorted((firsts + (others if len(firsts) == 1 else []))[:3])


def probe_here(comm: Communicator, ranks: Sequence[int], notices: Notices) -> dict[str, Any]:
    """Take part in a probe of `ranks`, this one among them, of which the last is silent until
    the others say that they gave up.
    """
    inner = comm.subset(ranks, SETUP_S)
    try:
        is_lost = inner.rank == inner.world_size - 1
        inner.all_gather_bytes(b"ready", SETUP_S, Channel.FIRST)
        if not is_lost:
            seen, work = _wait(inner, PATIENCE_S)
            notices.post(ranks[-1], GAVE_UP, b"")
            late = time.monotonic() + SETUP_S
            while work is not None and not work.is_done() and time.monotonic() < late:
                time.sleep(0.01)  # an MPI does not come to its end with a collective under way
            return {"silent": seen}
        notices.collect(ranks[:-1], GAVE_UP, PATIENCE_S + LATE_S)
        with contextlib.suppress(
            ConnectionError, TimeoutError
        ):  # so that nothing is left that the others began
            inner.all_gather_bytes(bytes(8), SETUP_S, Channel.FIRST)
        return {"lost": True}
    finally:
        inner.close()


def _wait(comm: Communicator, timeout_s: float) -> tuple[dict[str, Any], Work | None]:
    """Wait for all members, one of which is lost; return the error and the seconds that it took,
    and what was waited for.
    """
    begun, work = time.perf_counter(), None
    send, recv = (
        torch.zeros(8, dtype=torch.uint8),
        torch.empty(8 * comm.world_size, dtype=torch.uint8),
    )
    try:
        with peers_answer("probe"):
            work = comm.start_all_gather(send, recv, Channel.FIRST)
            work.wait(timeout_s)
    except GradcompError as error:
        return {
            "error": type(error).__name__,
            "seconds": time.perf_counter() - begun,
            "text": str(error),
        }, work
    return {
        "error": "",
        "seconds": time.perf_counter() - begun,
        "text": "it came to its end without that member",
    }, work


def _help(parent: int, commands: int, answers: int) -> None:
    """Be a helper: never returns."""
    status = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno() if sys.__stderr__ else 2
        )  # what torch says of its sockets
        with os.fdopen(commands) as lines:
            where = lines.readline()
            if not where:  # this process is not needed
                os._exit(0)
            torch.set_num_threads(1)
            try:
                host, port, timeout_s = json.loads(where)
                store = open_store(host, port, serves=False, timeout_s=timeout_s)
                line = lines.readline()
                if not line:
                    os._exit(0)
                found = _take_part(store, *json.loads(line))
            except Exception as error:  # noqa: BLE001 - told to the one that reports
                found = {"failed": f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"}
        os.write(answers, json.dumps(found).encode())
        status = 0
    finally:
        os._exit(status)


def _take_part(store: Any, prefix: str, member: int, members: int) -> dict[str, Any]:
    open_group(store_below(store, prefix), member, members, SETUP_S)
    silent, killed = (
        TorchCommunicator(timeout_s=SETUP_S),
        TorchCommunicator(timeout_s=KILLED_PATIENCE_S),
    )
    killed.all_gather_bytes(b"ready", SETUP_S, Channel.FIRST)
    if member == members - 1:
        time.sleep(PATIENCE_S + KILL_AFTER_S)
        killed.all_gather_bytes(b"again", SETUP_S, Channel.FIRST)
        time.sleep(KILL_AFTER_S)
        os.kill(os.getpid(), signal.SIGKILL)
    found = {"silent": _wait(silent, PATIENCE_S)[0]}
    killed.all_gather_bytes(b"again", SETUP_S, Channel.FIRST)
    found["killed"] = _wait(killed, KILLED_PATIENCE_S)[0]
    found["killed"]["seconds"] = max(0.0, found["killed"]["seconds"] - KILL_AFTER_S)
    return found


def in_time(seen: dict[str, Any]) -> bool:
    """Whether what a member has seen is an error by name, soon enough."""
    limits = {"silent": PATIENCE_S + LATE_S, "killed": LATE_S}
    return all(
        seen[how]["error"] == PeerLost.__name__ and seen[how]["seconds"] <= limit
        for how, limit in limits.items()
        if how in seen
    )
