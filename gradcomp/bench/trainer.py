"""Train one workload with one method of exchange: what a rank does, and how a run is started."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gradcomp.bench.methods import Ready, parse, wrap
from gradcomp.bench.optimizers import OPTIMIZERS
from gradcomp.bench.ranks import TIMEOUT_S, Emit, Place, all_cores, cores_of, run
from gradcomp.bench.workloads import Workload, find
from gradcomp.comm.mpi import MpiCommunicator
from gradcomp.comm.rounds import ring_bytes
from gradcomp.errors import NotFinite

WARM_UP = 3  # steps in which buckets are made and rebuilt, and whose seconds do not count
TELL_S = 0.5  # longest time between two signs of life
DIVERGED = 1e4  # a loss beyond this ends a run that stops
# fields of `Task` that decide what a run gives; the file of finished runs has them
KEY = ("workload", "optimizer", "method", "workers", "steps", "factor", "seed", "batch")


@dataclass(frozen=True)
class Task:
    """One run.

    Attributes:
        workload, optimizer, method: by name, a method with its options.
        workers: number of ranks.
        steps: of the run; the schedule of the rate is stretched to it.
        factor: of the workload's rate for this optimizer.
        seed: of the weights and of the minibatches.
        batch: samples of a rank's minibatch; 0: the workload's own number.
        data: folder of the workload's data.
        points: number of tests, the last one after the last step; 0 does not test.
        cores: of this machine that every rank runs on; empty: each rank has its share of them.
        interface: network interface whose counters give the bytes sent; "" does not count.
        min_numel: smallest tensor that is compressed; None: the default.
        stops: whether a run ends when a rank's loss diverges, which takes an all_reduce a step.
        over: transport of compressed bytes, "gloo" or "mpi".
    """

    workload: str
    optimizer: str
    method: str
    workers: int
    steps: int
    factor: float = 1.0
    seed: int = 0
    batch: int = 0
    data: str = ""
    points: int = 0
    cores: tuple[int, ...] = ()
    interface: str = ""
    min_numel: int | None = None
    stops: bool = False
    over: str = "gloo"


def run_task(
    task: Task, place: Place, hang_s: float, on_step: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Run a task; return what `train` measured in every rank (empty in a launched job but for
    rank 0).

    Args:
        task: what to train.
        place: where.
        hang_s: longest silence of all ranks in seconds before they are ended.
        on_step: called with the number of steps that rank 0 has done, now and then.

    Raises:
        gradcomp.bench.ranks.RankFailed: a rank failed, or all were silent.
    """
    if place.launched and not task.cores:
        task = replace(task, cores=all_cores())
    results: list[dict[str, Any]] = []

    def on_message(message: int | list[dict[str, Any]] | None) -> None:
        if isinstance(message, int):
            on_step(message)
        elif message is not None:
            results.extend(message)

    run(place, train_rank, task, on_message=on_message, hang_s=hang_s)
    return results


def use_cores(cores: tuple[int, ...] = ()) -> None:
    """Have this rank run on these cores, or on its share of the machine's."""
    cores = cores or cores_of(dist.get_rank(), dist.get_world_size())
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def train_rank(emit: Emit, task: Task) -> None:
    """Train as one rank; rank 0 emits the steps done, and the results of all ranks at the end."""
    use_cores(task.cores)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, train(emit, task))
    if dist.get_rank() == 0:
        emit(results)


class Seconds(NamedTuple):
    """What one step took: the whole, its forward, its update, and CPU time of the process."""

    step: float
    forward: float
    update: float
    cpu: float


def train(emit: Emit, task: Task) -> dict[str, Any]:
    """Train as a rank of the default process group; return what was measured.

    Args:
        emit: gets signs of life, from rank 0 the steps done.
        task: what to train.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    comm = MpiCommunicator(timeout_s=TIMEOUT_S) if task.over == "mpi" else None
    workload = find(task.workload, Path(task.data), task.batch)
    settings = workload.settings
    torch.manual_seed(task.seed)
    plain = workload.model()
    numel = sum(p.numel() for p in plain.parameters())
    rate = settings.rates[task.optimizer] * task.factor
    ready = wrap(
        plain,
        parse(task.method),
        lambda model: OPTIMIZERS[task.optimizer](model, rate),
        comm,
        min_numel=task.min_numel,
    )
    rates = [
        (group, group["lr"]) for optimizer in ready.optimizers for group in optimizer.param_groups
    ]
    emit(0)  # from here on silence counts
    minibatches = workload.minibatches(task.seed, rank, world, settings.batch_of(world))
    points = {round(task.steps * (n + 1) / task.points) for n in range(task.points)}
    taken: list[Seconds] = []
    curve: list[tuple[int, float, float]] = []  # steps, seconds and measure
    counted_from = min(WARM_UP, task.steps - 1)
    sent = told = 0.0
    before: dict[str, float] = {}
    diverged = False
    for step in range(task.steps):
        for group, rate in rates:
            group["lr"] = rate * settings.rate_at(step, task.steps)
        minibatch = next(minibatches)
        if step == counted_from:
            dist.barrier()
            sent, before = _sent_nbytes(task.interface), _counted(ready.state)
        try:
            seconds, loss = _step(ready, workload, plain, minibatch)
        except NotFinite:
            if not task.stops:
                raise
            seconds, loss = Seconds(0.0, 0.0, 0.0, 0.0), torch.tensor(math.inf)
        if task.stops and _diverged(loss):
            diverged = True
            break
        taken.append(seconds)
        if time.perf_counter() - told > TELL_S:
            told = time.perf_counter()
            emit(step + 1 if rank == 0 else None)
        if step + 1 in points and step + 1 < task.steps:
            measured = _measure(emit, workload, plain, ready, quick=True)
            curve.append((step + 1, math.fsum(one.step for one in taken), measured))
    done = len(taken) + diverged
    dist.barrier()
    sent = _sent_nbytes(task.interface) - sent
    steps = max(1, done - counted_from)
    phases = {name: (n - before[name]) / steps for name, n in _counted(ready.state).items()}
    counted = taken[counted_from:]
    result = {
        "rank": rank,
        "world_size": world,
        "rare": ready.local is not None,
        "parameters": numel,
        "seconds": [one.step for one in counted],
        "forward_seconds": [one.forward for one in counted],
        "update_seconds": [one.update for one in counted],
        "cpu_seconds": [one.cpu for one in counted],
        "sent_nbytes": sent / steps if task.interface else None,
        "counted_nbytes": phases.pop("bytes_sent", None),
        "total_nbytes": _total_nbytes(ready, numel * done, world),
        "steps_done": done,
        "diverged": diverged,
        "phases": phases,
        "peak_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "curve": curve,
    }
    if ready.local is not None:
        ready.local.restore()  # what all ranks have agreed on last
    if task.points and not diverged:
        measured = result["measure"] = _measure(emit, workload, plain, ready)
        curve.append((task.steps, math.fsum(one.step for one in taken), measured))
    if hasattr(ready.state, "check_replicas"):
        ready.state.check_replicas()
    if hasattr(ready.state, "close"):
        ready.state.close()
    return result


def _diverged(loss: torch.Tensor) -> bool:
    """Return whether some rank's loss is beyond `DIVERGED`, the same on all."""
    bad = torch.tensor(float(not loss.item() < DIVERGED))
    dist.all_reduce(bad, dist.ReduceOp.MAX)
    return bool(bad)


def _total_nbytes(ready: Ready, values: int, world: int) -> int | None:
    """Return what this rank has sent in a run of `values` values times steps; None: not known."""
    if hasattr(ready.state, "stats"):
        first = getattr(ready.state, "start_stats", None)
        return int(ready.state.stats.bytes_sent) + (first.bytes_sent if first is not None else 0)
    return ring_bytes(values, world) * ready.method.bits // 32 if ready.method.bits else None


def _step(
    ready: Ready, workload: Workload, plain: nn.Module, minibatch: Any
) -> tuple[Seconds, torch.Tensor]:
    """Train on a minibatch; return what it took, and the loss (0 under double buffering)."""
    begun, worked = time.perf_counter(), time.process_time()
    loss = torch.zeros(())
    if ready.double is not None:  # nothing is clipped: averages come half a minibatch later
        pair = isinstance(minibatch, tuple)
        ready.double.step(
            lambda *half: workload.loss(plain, half if pair else half[0]),
            *(minibatch if pair else (minibatch,)),
        )
        forward = averaged = time.perf_counter()
    else:
        for optimizer in ready.optimizers:
            optimizer.zero_grad()
        loss = workload.loss(ready.model, minibatch)
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        if ready.local is not None:
            ready.local.average_gradients()
        averaged = time.perf_counter()
        _update(ready, workload.settings.clip, plain)
    ended = time.perf_counter()
    worked = time.process_time() - worked
    return Seconds(ended - begun, forward - begun, ended - averaged, worked), loss.detach()


def _update(ready: Ready, clip: float | None, plain: nn.Module) -> None:
    """Clip averaged gradients, update the weights, and end the step."""
    if not ready.method.feedback:
        ready.state.discard_step()  # residuals are zero again
    if clip is not None:
        if hasattr(ready.state, "materialize_gradients"):
            # those that an optimizer would take straight from payloads
            ready.state.materialize_gradients()
        nn.utils.clip_grad_norm_(plain.parameters(), clip)
    for optimizer in ready.optimizers:
        optimizer.step()
    if ready.local is not None:
        ready.local.step()


def _measure(
    emit: Emit, workload: Workload, model: nn.Module, ready: Ready, *, quick: bool = False
) -> float:
    """Return the workload's measure, which rank 0 takes, of sharded weights with the others'
    help; outside of all seconds.
    """
    found = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() == 0 or ready.method.sharded:
        model.eval()
        with torch.no_grad(), signs_of_life(emit):
            found[0] = workload.test(model, quick=quick)
        model.train()
    dist.broadcast(found, 0)
    return float(found[0])


@contextlib.contextmanager
def signs_of_life(emit: Emit) -> Iterator[None]:
    """Emit None now and then while a block runs that may take minutes."""
    over = threading.Event()

    def speak() -> None:
        while not over.wait(TELL_S):
            emit(None)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join()


def _counted(state: Any) -> dict[str, float]:
    """Return bytes and seconds by phase so far; {} where nothing is counted."""
    stats = getattr(state, "stats", None)
    return {} if stats is None else {"bytes_sent": float(stats.bytes_sent), **stats.seconds}


def _sent_nbytes(interface: str) -> float:
    """Return the bytes that have left through a network interface of this host; 0 for ""."""
    if not interface:
        return 0.0
    lines = (line.partition(":") for line in Path("/proc/self/net/dev").read_text().splitlines())
    return next(
        float(counted.split()[8]) for name, _, counted in lines if name.strip() == interface
    )
