"""Start ranks in new processes, receive their messages, and end all of them if one fails or hangs.

`run` starts ranks in one of three places: on this machine over loopback, each on a host of its own
(`gradcomp.bench.hosts`), or under an mpiexec (`gradcomp.bench.mpi`). torch's default process group
of a rank is gloo, unless its `Place` names another backend. A message is a line of the rank's
standard output that starts with `MARK`.

Processes are forked from a server that has already imported torch and the modules that DDP imports,
because these imports take three seconds in a new process.
"""

from __future__ import annotations

import atexit
import base64
import ctypes
import gc
import importlib
import math
import multiprocessing
import os
import pickle
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist

from gradcomp.bench.hosts import INTERFACE, Hosts
from gradcomp.bench.mpi import Mpiexec

Emit = Callable[[Any], None]
IMPORTED = ["torch._dynamo", "gradcomp.ddp"]  # before ranks are forked; DDP imports the first
MARK = "@gradcomp "
MASTER_PORT = 29500  # used on hosts, where no other program listens
TIMEOUT_S = 300.0  # timeout of a collective
STARTING_S = 120.0  # longest time for ranks to start and connect, even on a busy machine
ENDING_S = 5.0  # time for ranks to end after one of them has failed, and after a signal
POLL_S = 0.1
LOST = 255  # status of a forked process whose server has ended; the process may still run
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
NAMESPACES = "/var/run/netns"  # folder in which `ip netns add` creates namespaces
_STARTING = threading.Lock()  # held while a thread that starts ranks changes the environment


class RankFailed(multiprocessing.ProcessError):
    """A rank raised an error, was killed or hung; the message has its number and the reason."""


@dataclass(frozen=True)
class Place:
    """Number of ranks, and where they run."""

    ranks: int
    hosts: Hosts | None = None  # one rank on each; None: all on this machine, over loopback
    mpi: Mpiexec | None = None  # starts the ranks; None: they are forked one by one
    # a launcher has started this process as a rank; only this rank is run, in a new process
    launched: bool = False
    shift: int = 0  # added to the port of a launched job, so that its runs use different ports
    backend: str = "gloo"  # of torch's default process group


def all_cores() -> tuple[int, ...]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cores_of(number: int, count: int) -> tuple[int, ...]:
    """Return the cores of rank `number` of `count`: its share, or one core that ranks share."""
    have = all_cores()
    if count > len(have):
        return (have[number % len(have)],)
    share = len(have) // count
    return have[number * share : (number + 1) * share]


def run(
    place: Place,
    body: Callable[..., None],
    *args: Any,
    on_message: Callable[[Any], None],
    hang_s: float = math.inf,
) -> None:
    """Run ``body(emit, *args)`` in every rank of a place and wait for all of them.

    Args:
        body: module-level function; what it emits is a message to this process.
        on_message: called in this process with every message; under an mpiexec only rank 0 emits.
        hang_s: longest time without a message from any rank, in seconds, after the first message.

    Raises:
        RankFailed: a rank failed or was killed, or all were silent; all other ranks are ended.
    """
    words = base64.b64encode(pickle.dumps((body, args, place.backend))).decode()
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    processes: list[_Process] = []
    tails: list[list[str]] = []
    listeners: list[threading.Thread] = []
    try:
        for process in _start(place, body.__module__, words):
            processes.append(process)
            tails.append([])
            for stream in (process.stdout, process.stderr):
                arguments = stream, said, tails[-1]
                listeners.append(threading.Thread(target=_listen, args=arguments, daemon=True))
                listeners[-1].start()
        _wait(processes, listeners, said, tails, hang_s, on_message)
    finally:
        _end(processes)


def _start(place: Place, module: str, words: str) -> Iterator[_Process]:
    """Start the processes and yield each: all ranks, or the mpiexec that starts them."""
    shared = dict(os.environ)
    # torchrun's store is only for the processes that torchrun started
    shared.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if place.launched:
        shared["MASTER_PORT"] = str(int(shared["MASTER_PORT"]) + place.shift)
        yield _Forked(module, words, shared)
        return
    if place.hosts is not None:
        address, port, interface = place.hosts.address(0), MASTER_PORT, INTERFACE
    else:
        free_port = importlib.import_module("gradcomp.launch.ports").free_port
        address, port, interface = "127.0.0.1", free_port(), "lo"
    shared |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = interface  # the host name may not resolve
    if place.mpi is not None:
        command = place.mpi.command(place.ranks, on_hosts=place.hosts is not None)
        yield subprocess.Popen(
            [*command, sys.executable, "-m", __name__, words],
            env=shared | place.mpi.environment(interface),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return
    for rank in range(place.ranks):
        host = "" if place.hosts is None else place.hosts.namespace(rank)
        own = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(place.ranks)}
        yield _Forked(module, words, shared | own, host)


def _wait(
    processes: Sequence[_Process],
    listeners: Sequence[threading.Thread],
    said: queue.SimpleQueue[str],
    tails: Sequence[list[str]],
    hang_s: float,
    on_message: Callable[[Any], None],
) -> None:
    begun = heard = time.monotonic()
    failed_at = math.inf
    while True:
        with suppress(queue.Empty):
            on_message(_unpack(said.get(timeout=POLL_S)))
            heard = time.monotonic()
            continue
        now, statuses = time.monotonic(), [process.poll() for process in processes]
        over, bad = None not in statuses, [rank for rank, status in enumerate(statuses) if status]
        failed_at = min(failed_at, now) if bad else math.inf
        if over:  # the ranks' last messages may not be read yet
            for listener in listeners:
                listener.join(ENDING_S)
            while not said.empty():
                on_message(_unpack(said.get()))
        if bad and (over or now - failed_at > ENDING_S):
            raise RankFailed(_why({rank: _last(tails[rank], statuses[rank]) for rank in bad}))
        if over:
            return
        if now - heard > (hang_s if heard > begun else max(hang_s, STARTING_S)):
            raise RankFailed(f"hung after {now - begun:.0f} s")


def _why(said: Mapping[int, str]) -> str:
    """Return the error that ended the ranks: the first that is not caused by another rank's end."""
    lost = r"PeerLost|[Cc]onnection (closed|reset|refused)"
    own = [rank for rank, text in said.items() if not re.search(lost, text)]
    rank = (own or list(said))[0]
    return f"rank {rank}: {said[rank]}"


def _last(tail: list[str], status: int | None) -> str:
    """Return the most informative line on why a process ended."""
    if status is not None and status < 0:
        return f"ended by signal {signal.Signals(-status).name}"
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in tail]  # torch's prefix
    kinds = r"[\w.]*(Error|Exception|Lost|Mismatch|Payload)\b"
    errors = [line for line in lines if re.match(kinds, line)]
    last = (errors or lines or [f"ended with status {status}"])[-1]
    # torch repeats the error for every callback of a hook
    return last.rpartition("the callback: ")[2][:300]


def _listen(stream: TextIO, said: queue.SimpleQueue[str], tail: list[str]) -> None:
    for line in stream:
        if line.startswith(MARK):
            said.put(line[len(MARK) :])
        elif line.strip():
            tail.append(line.rstrip())
            del tail[:-50]


def _end(processes: Sequence[_Process]) -> None:
    """End all running processes and their children: each process is the leader of a session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() in (None, LOST):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        deadline = time.monotonic() + ENDING_S
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))


class _Forked:
    """Rank in a process that has imported torch and `module`, as the leader of a new session, on a
    host ("": this machine). It has those attributes of a `subprocess.Popen` that `run` uses.
    """

    def __init__(
        self, module: str, words: str, variables: Mapping[str, str], host: str = ""
    ) -> None:
        warm = warm_context(module)
        (out, its_out), (err, its_err) = warm.Pipe(duplex=False), warm.Pipe(duplex=False)
        self._process = warm.Process(
            target=_begin, args=(words, variables, host, its_out, its_err), daemon=True
        )
        self._process.start()
        self.pid: int = self._process.pid
        for end in (its_out, its_err):
            end.close()
        self.stdout, self.stderr = _reader(out), _reader(err)

    def poll(self) -> int | None:
        """Return the exit status, minus the signal that ended the process; None while it runs."""
        return self._process.exitcode  # type: ignore[no-any-return]

    def wait(self, timeout_s: float) -> None:
        """Wait for the process to end, for at most `timeout_s` seconds."""
        self._process.join(timeout_s)


_Process = _Forked | subprocess.Popen[str]


def _reader(end: Any) -> TextIO:
    with end:
        return os.fdopen(os.dup(end.fileno()), encoding="utf-8", errors="replace")


def _begin(words: str, variables: Mapping[str, str], host: str, out: Any, err: Any) -> None:
    os.setsid()
    for number, end in ((1, out), (2, err)):
        os.dup2(end.fileno(), number)
        end.close()
    multiprocessing.current_process().daemon = False  # a user's hook may start processes
    if host:
        _enter(host)
    become_rank(variables)
    _be_rank(words, emits=True)


def _enter(host: str) -> None:
    """Move this process to a host's namespace and set the host name; it must have one thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"{NAMESPACES}/{host}", encoding="ascii") as there:
        failed = libc.setns(there.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS)
    if failed:
        raise OSError(ctypes.get_errno(), f"cannot enter {host}")
    socket.sethostname(host)


def _be_rank(words: str, *, emits: bool) -> None:
    body, args, backend = _unpack(words)
    gc.freeze()  # what is imported need not be looked through at the end
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    try:
        body(_emit if emits else lambda message: None, *args)
    finally:
        gc.collect()  # a model in a reference cycle would keep gloo's threads
        dist.destroy_process_group()


def _emit(message: Any) -> None:
    print(MARK + base64.b64encode(pickle.dumps(message)).decode(), flush=True)


def _unpack(words: str) -> Any:
    # safe: printed by a rank that this program has started
    return pickle.loads(base64.b64decode(words))  # noqa: S301


def warm_context(*modules: str) -> Any:
    """Return a context of `multiprocessing` whose new processes have already imported torch,
    gradcomp and `modules`. A process must call `become_rank` first.
    """
    if sys.platform != "linux":  # torch does not support forking elsewhere
        return multiprocessing.get_context("spawn")
    with _STARTING:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", *IMPORTED, __name__, *modules])
        before = os.environ.get("PYTHONPATH")
        # the server imports the same modules as this process
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        try:
            _start_server()
        except OSError:  # TMPDIR is too long for the address of the server's socket
            pass
        else:
            return context
        finally:
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before
    return multiprocessing.get_context("spawn")


def _start_server() -> None:
    """Start the server with interrupts blocked, because it ignores them only after its imports.

    An interrupt of this program is delivered after the server has started; `_end_server` ends it.
    """
    atexit.register(_end_server)
    resource_tracker.ensure_running()  # now, because it would unblock the interrupts
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    # torch's threads do not have this mask, and Python raises a signal that one of them receives in
    # the main thread
    handler = (
        signal.signal(signal.SIGINT, lambda number, _: came.append(number)) if is_main else None
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _end_server() -> None:
    """Kill the server at exit: it would notice the end of this program only after its imports."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def become_rank(variables: Mapping[str, str]) -> None:
    """Set up a process forked from the server: it ends with its parent and has `variables`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(
        target=_end_with, args=(multiprocessing.parent_process(),), daemon=True
    ).start()
    os.environ.clear()
    os.environ.update(variables)
    np.random.seed()


def _end_with(parent: Any) -> None:
    if parent is not None:
        parent.join()
        os._exit(1)


if __name__ == "__main__":  # a rank started by an mpiexec
    number = importlib.import_module("gradcomp.launch").export_environment()["RANK"]
    _be_rank(sys.argv[1], emits=number == "0")
