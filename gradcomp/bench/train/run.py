"""Starting the ranks of one method, hearing from them, and ending them when they hang."""

from __future__ import annotations

import importlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradcomp.bench.train.forked import Forked
from gradcomp.bench.train.hosts import INTERFACE, Hosts
from gradcomp.bench.train.mpi import Mpiexec
from gradcomp.bench.train.rank import MARK, Task, words
from gradcomp.plan.rates import Rates
from gradcomp.plan.workload import Transport

MASTER_PORT = 29500
STARTING_S = 120.0  # for programs to start and find each other, on a machine that is busy
ENDING_S = 5.0  # for ranks to end after one of them has failed, and after being told to
POLL_S = 0.2
LOST = 255  # status of a forked process whose server has ended, while it may go on


Started = subprocess.Popen[str] | Forked


@dataclass
class Outcome:
    """What became of a method.

    Attributes:
        results: of every rank, in order; empty where it failed, and on ranks of a launched job but
            the first.
        failed: why, "" where it did not.
    """

    results: list[Any] = field(default_factory=list)
    failed: str = ""


def cores_of(number: int, count: int) -> tuple[int, ...]:
    """Return the cores of rank `number` of `count`: a share of those of this machine, or one
    that others have, too.
    """
    have = all_cores()
    if count > len(have):
        return (have[number % len(have)],)
    share = len(have) // count
    return have[number * share : (number + 1) * share]


@dataclass(frozen=True)
class Place:
    """Where ranks run.

    Attributes:
        hosts: made on this machine; None: on it, over loopback, or as they were launched.
        mpi: starts the ranks of a method, whose packed bytes go over MPI; None: they are started
            one by one, and use gloo.
        rank: the one of a launched job that this process starts; None: all of them.
        shift: of a launched job's port, so that one method's ranks do not meet those of another.
    """

    hosts: Hosts | None = None
    mpi: Mpiexec | None = None
    rank: int | None = None
    shift: int = 0


def all_cores() -> tuple[int, ...]:
    """Return the cores that this process may use."""
    return tuple(
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else range(os.cpu_count() or 1)
    )


def run_method(
    tasks: Sequence[Task], place: Place, hang_s: float, on_step: Callable[[int], None]
) -> Outcome:
    """Run one process a task, or in a launched job that of this rank, and return what they tell (to
    rank 0 of a launched job alone).

    Args:
        tasks: of every rank; all alike but for their cores.
        place: where.
        hang_s: longest silence of all ranks, once one of them has begun, before they are ended.
        on_step: called with the steps that rank 0 has done.
    """
    if place.rank is not None:
        port = int(os.environ["MASTER_PORT"]) + place.shift
        found = _run(
            [words(tasks[place.rank])], place, os.environ["MASTER_ADDR"], port, hang_s, on_step
        )
    else:
        address, port = (
            ("127.0.0.1", _free_port())
            if place.hosts is None
            else (place.hosts.address(0), MASTER_PORT)
        )
        found = _run([words(task) for task in tasks], place, address, port, hang_s, on_step)
    return Outcome(found.results[0] if found.results else [], found.failed)


def measure(
    names: list[str], numel: int, ranks: int, hang_s: float, mpi: Mpiexec | None = None
) -> tuple[Rates, Transport]:
    """Return what codecs and moving bytes cost these ranks, measured over loopback with buckets
    of up to `numel` values; nothing if that fails.
    """
    given = [
        json.dumps({"measure": names, "numel": numel, "cores": cores_of(rank, ranks)})
        for rank in range(ranks)
    ]
    found = _run(given, Place(mpi=mpi), "127.0.0.1", _free_port(), hang_s, lambda step: None)
    if not found.results:
        return Rates(), Transport()
    return Rates.from_dict(found.results[0]["rates"]), Transport(**found.results[0]["transport"])


def _run(
    given: Sequence[str],
    place: Place,
    address: str,
    port: int,
    hang_s: float,
    on_step: Callable[[int], None],
) -> Outcome:
    said: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    tails: list[list[str]] = []
    processes: list[Started] = []
    listeners = []
    try:
        for number, process in enumerate(_start(given, place, address, port)):
            processes.append(process)
            tails.append([])
            for stream in (process.stdout, process.stderr):
                listeners.append(
                    threading.Thread(
                        target=_listen, args=(stream, number, said, tails[number]), daemon=True
                    )
                )
                listeners[-1].start()
        return _wait(processes, listeners, said, tails, hang_s, on_step)
    finally:
        _end(processes)


def _start(given: Sequence[str], place: Place, address: str, port: int) -> Iterator[Started]:
    """Start one process after the other: each rank, or the mpiexec that starts all of them."""
    shared = os.environ | {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    # torchrun's store belongs to the processes that it has started
    shared.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if place.rank is not None:
        yield Forked(given[0], shared)
        return
    interface = "lo" if place.hosts is None else INTERFACE
    shared |= {"GLOO_SOCKET_IFNAME": interface}
    if place.mpi is not None:
        words = place.mpi.command(len(given), apart=place.hosts is not None)
        yield subprocess.Popen(
            [*words, sys.executable, "-m", "gradcomp.bench.train.rank", *given],
            env=shared | place.mpi.environment(interface),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return
    for rank, one in enumerate(given):
        host = "" if place.hosts is None else place.hosts.namespace(rank)
        yield Forked(
            one,
            shared | {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(given))},
            host,
        )


def _wait(
    processes: Sequence[Started],
    listeners: Sequence[threading.Thread],
    said: queue.SimpleQueue[tuple[int, str]],
    tails: Sequence[list[str]],
    hang_s: float,
    on_step: Callable[[int], None],
) -> Outcome:
    results: dict[int, Any] = {}
    begun = heard = time.monotonic()
    failed_at = 0.0
    while True:
        try:
            rank, line = said.get(timeout=POLL_S)
        except queue.Empty:
            line = ""
        now = time.monotonic()
        if line:
            heard = now
            told = json.loads(line)
            if "result" in told:
                results[rank] = told["result"]
            elif rank == 0 and "step" in told:
                on_step(told["step"])
            continue
        statuses = [process.poll() for process in processes]
        bad = [rank for rank, status in enumerate(statuses) if status]
        if len(results) == len(processes) and all(status is not None for status in statuses):
            return Outcome([results[rank] for rank in range(len(processes))])
        if bad:
            failed_at = failed_at or now
            over = all(status is not None for status in statuses)
            if over or now - failed_at > ENDING_S:
                # the last words of those that have ended may not be read yet
                for listener in listeners if over else ():
                    listener.join(max(0.0, now + ENDING_S - time.monotonic()))
                return Outcome(
                    failed=_why({rank: _last(tails[rank], statuses[rank]) for rank in bad})
                )
        if now - heard > (hang_s if heard > begun else max(hang_s, STARTING_S)):
            return Outcome(failed=f"hung after {now - begun:.0f} s")


def _why(said: Mapping[int, str]) -> str:
    """Return what ended a method: of all ranks' errors the first that is not about another
    rank's end.
    """
    own = [
        rank
        for rank, text in said.items()
        if not re.search(r"PeerLost|[Cc]onnection (closed|reset|refused)", text)
    ]
    rank = (own or list(said))[0]
    return f"rank {rank}: {said[rank]}"


def _last(tail: list[str], status: int | None) -> str:
    """Return the line that says most of why a process ended."""
    if status is not None and status < 0:
        return f"ended by signal {-status}"
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in tail]  # torch's mark
    errors = [
        line for line in lines if re.match(r"[\w.]*(Error|Exception|Lost|Mismatch|Payload)\b", line)
    ]
    last = (errors or lines or [f"ended with status {status}"])[-1]
    # torch says it again for every callback of a hook
    return last.rpartition("the callback: ")[2][:300]


def _listen(
    stream: Any, rank: int, said: queue.SimpleQueue[tuple[int, str]], tail: list[str]
) -> None:
    for line in stream:
        if line.startswith(MARK):
            said.put((rank, line[len(MARK) :]))
        elif line.strip():
            tail.append(line.rstrip())
            del tail[:-50]


def _end(processes: Sequence[Started]) -> None:
    """End what still runs: each is the leader of a session of its own, with whatever it has
    started.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() in (None, LOST):
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    continue
        deadline = time.monotonic() + ENDING_S
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue


def _free_port() -> int:
    port: int = importlib.import_module("gradcomp.launch.ports").free_port()
    return port
