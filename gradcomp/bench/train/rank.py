"""What one rank of ``python -m gradcomp.bench train`` does: ``python -m gradcomp.bench.train.rank
JSON ...``, a result in JSON lines.

A process trains with one method and ends, so that a method which crashes or hangs spoils no other.
Its words to the bench are lines of its standard output that begin with `MARK`. Ranks that an
mpiexec has started all have the words of every rank, and the first speaks for all: their output is
one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradcomp.bench.cluster import barrier, measure_transport
from gradcomp.bench.methods import Ready, parse, wrap
from gradcomp.bench.optimizers import OPTIMIZERS
from gradcomp.bench.train.predict import planned
from gradcomp.bench.workloads import Settings, Workload, find
from gradcomp.comm.base import Communicator
from gradcomp.comm.mpi import MpiCommunicator
from gradcomp.comm.rounds import ring_bytes
from gradcomp.comm.torchdist import TorchCommunicator
from gradcomp.errors import NotFinite
from gradcomp.plan.rates import calibrate

MARK = "@gradcomp "
WARM_UP = 3  # steps in which buckets are made and rebuilt, and whose seconds do not count
TELL_S = 0.5
TIMEOUT_S = 300.0
DIVERGED = 1e4  # a loss beyond this ends a run that stops
CALIBRATED = 1 << 20, 1 << 22  # values of a bucket that codecs are timed on, at least and at most


@dataclass(frozen=True)
class Task:
    """What a rank is to do.

    Attributes:
        method, workload, data, optimizer, steps, seed: as the command line has them.
        batch: samples of a rank's minibatch; None: the workload's own.
        factor: of the workload's learning rate.
        min_numel: smallest tensor that is compressed; None: the default.
        stops: whether a run ends at the step at which it diverges on some rank; asking them all
            takes an all_reduce a step.
        points: tests on the way, the last at the end; 0 for none.
        cores: of this machine that the rank runs on.
        interface: whose counters say what was sent; "" for none.
    """

    method: str
    workload: str
    data: str
    optimizer: str
    steps: int
    seed: int
    batch: int | None
    points: int
    cores: tuple[int, ...]
    interface: str = ""
    factor: float = 1.0
    min_numel: int | None = None
    stops: bool = False


def tell(*, silent: bool = False, **words: Any) -> None:
    """Say something to the bench."""
    if not silent:
        print(MARK + json.dumps(words), flush=True)


def rate_at(step: int, steps: int, settings: Settings) -> float:
    """Return the factor of the rate at a step: up linearly, then down as `settings.decay`."""
    rising = round(steps * settings.warm_up)
    if step < rising:
        return (step + 1) / rising
    return settings.decay((step - rising) / (steps - rising))


def train(task: Task, comm: Communicator | None = None, *, silent: bool = False) -> dict[str, Any]:
    """Train as a rank of the default process group, which there is, over `comm` if one is given;
    return what was measured.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    workload = find(task.workload, Path(task.data), task.batch)
    settings = workload.settings
    torch.manual_seed(task.seed)
    plain = workload.model()
    numel = sum(p.numel() for p in plain.parameters())
    rate = settings.rates[task.optimizer] * task.factor
    ready = wrap(
        plain,
        parse(task.method),
        lambda model: _fused(OPTIMIZERS[task.optimizer](model, rate)),
        comm,
        min_numel=task.min_numel,
    )
    state = ready.state
    rates = [
        (group, group["lr"]) for optimizer in ready.optimizers for group in optimizer.param_groups
    ]
    batch = settings.batch_of(world)
    tell(step=0, silent=silent)  # from here on silence counts
    minibatches = workload.minibatches(task.seed, rank, world, batch)
    seconds: list[float] = []
    updates: list[float] = []
    cpu: list[float] = []
    curve: list[tuple[int, float, float]] = []
    sent = told = 0.0
    before: dict[str, float] = {}
    points = {round(task.steps * (n + 1) / task.points) for n in range(task.points)}
    done, diverged = task.steps, False
    for step in range(task.steps):
        for group, rate in rates:
            group["lr"] = rate * rate_at(step, task.steps, settings)
        minibatch = next(minibatches)
        if step == min(WARM_UP, task.steps - 1):
            dist.barrier()
            sent = _sent_nbytes(task.interface)
            before = _counted(state)
        begun, worked = time.perf_counter(), time.process_time()
        try:
            averaged, loss = _step(ready, workload, plain, minibatch)
        except NotFinite:
            if not task.stops:
                raise
            averaged, loss = time.perf_counter(), torch.tensor(float("inf"))
        if task.stops and _diverged(loss):
            done, diverged = step + 1, True
            break
        seconds.append(time.perf_counter() - begun)
        updates.append(time.perf_counter() - averaged)
        cpu.append(time.process_time() - worked)
        if time.perf_counter() - told > TELL_S:
            told = time.perf_counter()
            tell(step=step + 1, silent=silent)
        if step + 1 in points and step + 1 < task.steps:
            curve.append(
                (step + 1, sum(seconds), _measure(workload, plain, rank, ready, quick=True))
            )
    counted = min(WARM_UP, task.steps - 1)
    dist.barrier()
    sent = _sent_nbytes(task.interface) - sent
    steps = max(1, done - counted)
    counters = {name: (value - before[name]) / steps for name, value in _counted(state).items()}
    result = {
        "rank": rank,
        "world_size": world,
        "rare": ready.local is not None,
        "parameters": numel,
        "seconds": seconds[counted:],
        "update_seconds": updates[counted:],
        "cpu_seconds": cpu[counted:],
        "sent_nbytes": sent / steps if task.interface else None,
        "counted_nbytes": counters.pop("bytes_sent", None),
        "total_nbytes": _total_nbytes(ready, numel * done, world),
        "steps_done": done,
        "diverged": diverged,
        "phases": counters,
        "peak_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "curve": curve,
    }
    if ready.local is not None:
        ready.local.restore()  # what all ranks have agreed on last
    if task.points and not diverged:
        measure = result["measure"] = _measure(workload, plain, rank, ready)
        curve.append((task.steps, sum(seconds), measure))
    if hasattr(state, "check_replicas"):
        state.check_replicas()
    if state is not None and hasattr(state, "close"):
        state.close()
    return result


def _fused(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Have torch's AdamW step in one pass, as whoever counts seconds would: several times as
    fast as its loop over operations.
    """
    for optimizer in optimizers:
        if type(optimizer) is torch.optim.AdamW:
            for group in optimizer.param_groups:
                group["fused"] = True
    return optimizers


def _diverged(loss: torch.Tensor) -> bool:
    """Whether some rank's loss is beyond `DIVERGED`, the same on all."""
    bad = torch.tensor(float(not loss.item() < DIVERGED))
    dist.all_reduce(bad, dist.ReduceOp.MAX)
    return bool(bad)


def _total_nbytes(ready: Ready, values: int, world: int) -> int | None:
    """Return what this rank has sent in a run of `values` values and steps; None: not known."""
    if ready.state is not None and hasattr(ready.state, "stats"):
        first = getattr(ready.state, "start_stats", None)
        return int(ready.state.stats.bytes_sent) + (first.bytes_sent if first is not None else 0)
    return ring_bytes(values, world) * ready.method.bits // 32 if ready.method.bits else None


def _step(
    ready: Ready, workload: Workload, plain: nn.Module, minibatch: Any
) -> tuple[float, torch.Tensor]:
    """Train on a minibatch; return when its gradients were averaged, and the loss."""
    if ready.double is not None:  # nothing is clipped: averages come half a minibatch later
        parts = minibatch if isinstance(minibatch, tuple) else (minibatch,)
        ready.double.step(
            lambda *half: workload.loss(plain, half if isinstance(minibatch, tuple) else half[0]),
            *parts,
        )
        return time.perf_counter(), torch.zeros(())
    for optimizer in ready.optimizers:
        optimizer.zero_grad()
    loss = workload.loss(ready.model, minibatch)
    loss.backward()  # type: ignore[no-untyped-call]
    if ready.local is not None:
        ready.local.average_gradients()
    averaged = time.perf_counter()
    if not ready.method.feedback:
        ready.state.discard_step()  # residuals are zero again
    if workload.settings.clip is not None:
        if hasattr(ready.state, "materialize_gradients"):
            # those that an optimizer would take straight from payloads
            ready.state.materialize_gradients()
        nn.utils.clip_grad_norm_(plain.parameters(), workload.settings.clip)
    for optimizer in ready.optimizers:
        optimizer.step()
    if ready.local is not None:
        ready.local.step()
    return averaged, loss.detach()


def _measure(
    workload: Workload, model: nn.Module, rank: int, ready: Ready, *, quick: bool = False
) -> float:
    """Return the workload's measure, which rank 0 takes, of sharded weights with the others'
    help; outside of all seconds.
    """
    found = torch.zeros(1, dtype=torch.float64)
    if rank == 0 or ready.method.sharded:
        model.eval()
        with torch.no_grad(), _heard():
            found[0] = workload.test(model, quick=quick)
        model.train()
    dist.broadcast(found, 0)
    return float(found[0])


@contextlib.contextmanager
def _heard() -> Iterator[None]:
    """Have a test, which may take minutes, be no silence."""
    over = threading.Event()

    def speak() -> None:
        while not over.wait(TELL_S):
            tell()

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join()


def _counted(state: Any) -> dict[str, float]:
    """Return bytes and seconds by phase so far, of what counts any."""
    stats = getattr(state, "stats", None)
    return {} if stats is None else {"bytes_sent": float(stats.bytes_sent), **stats.seconds}


def _sent_nbytes(interface: str) -> float:
    """Return what has left by an interface of this process's host, "" for none."""
    if not interface:
        return 0.0
    lines = (line.partition(":") for line in Path("/proc/self/net/dev").read_text().splitlines())
    return next(
        float(counted.split()[8]) for name, _, counted in lines if name.strip() == interface
    )


def measure(names: list[str], numel: int, comm: Communicator, *, over_mpi: bool) -> dict[str, Any]:
    """Return what the planner needs to know of ranks on these cores, all of them at work: seconds
    of codecs and of moving bytes.

    Args:
        names: of methods.
        numel: values of the largest bucket: those that no cache holds take longer.
        comm: closed at the end.
        over_mpi: whether that is MPI.
    """
    largest = min(max(numel, CALIBRATED[0]), CALIBRATED[1]) // 512 * 512
    found = {
        method.name: method
        for name in names
        if (method := planned(name, comm.world_size, over_mpi=over_mpi)) is not None
    }
    rates = calibrate([*found.values()], sizes=(1 << 13, largest), before=lambda: barrier(comm))
    transport = measure_transport(comm, (1 << 12, 1 << 16, largest // 2, 4 * largest))
    comm.close()
    return {"rates": rates.to_dict(), "transport": asdict(transport)}


def main(argv: list[str]) -> int:
    """Do what `argv[0]` says, or under an mpiexec the word of this rank, and tell the result."""
    over_mpi = len(argv) > 1
    rank = (
        int(importlib.import_module("gradcomp.launch").export_environment()["RANK"])
        if over_mpi
        else 0
    )
    silent = over_mpi and rank > 0
    given = json.loads(argv[rank])
    cores = tuple(given["cores"])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        comm = MpiCommunicator(timeout_s=TIMEOUT_S) if over_mpi else None
        if "measure" in given:
            moving = comm if comm is not None else TorchCommunicator(timeout_s=TIMEOUT_S)
            tell(
                result=measure(given["measure"], given["numel"], moving, over_mpi=over_mpi),
                silent=silent,
            )
        else:
            mine, everyone = (
                train(Task(**given | {"cores": cores}), comm, silent=silent),
                [None] * dist.get_world_size(),
            )
            dist.all_gather_object(everyone, mine)
            tell(result=everyone if dist.get_rank() == 0 else [], silent=silent)
    finally:
        dist.destroy_process_group()
    return 0


def words(task: Task) -> str:
    """Return a task as `main` reads it."""
    return json.dumps(asdict(task))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
