"""Train one workload with one method of exchange, as one rank."""

from __future__ import annotations

import math
import os
import resource
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from gradcomp.bench.device import CPU, device_of_rank, moved
from gradcomp.bench.methods import Ready, parse, wrap
from gradcomp.bench.optimizers import OPTIMIZERS
from gradcomp.bench.ranks import TIMEOUT_S, Emit, cores_of
from gradcomp.bench.workloads import Workload, find
from gradcomp.comm.mpi import MpiCommunicator
from gradcomp.comm.rounds import ring_bytes
from gradcomp.doctor.accelerator import name_of
from gradcomp.errors import NotFinite
from gradcomp.kernels.staging import wait_for

HERE = torch.device(CPU)
WARM_UP = 3  # first steps, in which DDP builds and rebuilds buckets; their seconds do not count
TELL_S = 0.5  # longest time between two heartbeats
DIVERGED = 1e4  # a larger loss ends a run with `Task.stops`
# fields of `Task` that determine a run's result; they identify it in the file of finished runs
KEY = (
    *("workload", "optimizer", "method", "workers", "steps", "factor", "seed", "batch"),
    *("data_crc", "link"),
)


@dataclass(frozen=True)
class Task:
    """Description of one training run."""

    workload: str
    optimizer: str
    method: str  # with its options
    workers: int  # number of ranks
    steps: int  # steps of the run; the learning rate schedule is stretched to them
    factor: float = 1.0  # factor on the workload's learning rate for this optimizer
    seed: int = 0  # seed of the weights and the minibatches
    batch: int = 0  # samples of a rank's minibatch; 0: the workload's own number
    data: str = ""  # folder of the data; "": none
    points: int = 0  # number of tests, the last one after the last step; 0 does not test
    cores: tuple[int, ...] = ()  # cores shared by all ranks; empty: each rank has its own share
    interface: str = ""  # network interface whose sent bytes are counted; "": do not count
    min_numel: int | None = None  # smallest tensor that is compressed; None: the default
    stops: bool = False  # stop if a rank's loss diverges; costs an all_reduce per step
    over: str = "gloo"  # transport of compressed bytes, "gloo" or "mpi"
    device: str = CPU  # kind of device that has model and minibatches
    round: int = 0  # number of this run among runs of the same task
    data_crc: str = ""  # `Workload.data_crc` of the data; "": not known
    link: str = ""  # rate of the links between the ranks' hosts; "": loopback


def use_cores(cores: tuple[int, ...] = ()) -> None:
    """Bind this rank and torch's threads to these cores, or to its share of the machine's."""
    cores = cores or cores_of(dist.get_rank(), dist.get_world_size())
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def train_rank(emit: Emit, task: Task) -> None:
    """Train as one rank; at the end rank 0 emits the results of all ranks. Collective."""
    use_cores(task.cores)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, train(emit, task))
    if dist.get_rank() == 0:
        emit(results)


class Seconds(NamedTuple):
    """Seconds of one step: whole, forward, update, and CPU time, when the device has finished."""

    seconds: float = 0.0
    forward_seconds: float = 0.0
    update_seconds: float = 0.0
    cpu_seconds: float = 0.0


def train(emit: Emit, task: Task) -> dict[str, Any]:
    """Train as a rank and return the measurements; heartbeats emit the number of finished
    steps, or None between steps. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    comm = MpiCommunicator(timeout_s=TIMEOUT_S) if task.over == "mpi" else None
    workload = find(task.workload, Path(task.data) if task.data else None, task.batch)
    settings = workload.settings
    device = device_of_rank(task.device, rank)
    torch.manual_seed(task.seed)  # weights are drawn on the CPU: the same on every device
    plain = workload.model().to(device)
    numel = sum(p.numel() for p in plain.parameters())
    rate = settings.rates[task.optimizer] * task.factor
    method, make = parse(task.method), OPTIMIZERS[task.optimizer]
    ready = wrap(plain, method, lambda model: make(model, rate), comm, min_numel=task.min_numel)
    rates = [(group, group["lr"]) for one in ready.optimizers for group in one.param_groups]
    emit(None)  # the first heartbeat: from here on a long silence is a hang
    minibatches = workload.minibatches(task.seed, rank, world, settings.batch_of(world))
    points = {round(task.steps * (n + 1) / task.points) for n in range(task.points)}
    taken: list[Seconds] = []
    curve: list[tuple[int, float, float]] = []  # steps, seconds and measure
    counted_from = min(WARM_UP, task.steps - 1)
    sent = emitted = 0.0
    before: dict[str, float] = {}
    diverged = False
    for step in range(task.steps):
        for group, rate in rates:
            group["lr"] = rate * settings.rate_at(step, task.steps)
        minibatch = moved(next(minibatches), device)
        if step == counted_from:
            dist.barrier()
            sent, before = _sent_nbytes(task.interface), _counted(ready.state)
        try:
            seconds, loss = _step(ready, workload, plain, minibatch, device)
        except NotFinite:
            if not task.stops:
                raise
            seconds, loss = Seconds(), torch.tensor(math.inf)
        if task.stops and _diverged(loss):
            diverged = True
            break
        taken.append(seconds)
        if time.perf_counter() - emitted > TELL_S:
            emitted = time.perf_counter()
            emit(len(taken))
        if step + 1 in points and step + 1 < task.steps:
            measured = _measure(emit, workload, plain, ready, quick=True)
            curve.append((step + 1, math.fsum(one.seconds for one in taken), measured))
    done = len(taken) + diverged
    dist.barrier()
    sent = _sent_nbytes(task.interface) - sent
    steps = max(1, done - counted_from)
    phases = {
        name: (n - before.get(name, 0.0)) / steps for name, n in _counted(ready.state).items()
    }
    counted, counted_nbytes = taken[counted_from:], phases.pop("bytes_sent", None)
    result = {
        "rare": ready.local is not None,
        "parameters": numel,
        **{name: [getattr(one, name) for one in counted] for name in Seconds._fields},
        "sent_nbytes": sent / steps if task.interface else counted_nbytes,
        "total_nbytes": _total_nbytes(ready, numel * done, world),
        "steps_done": done,
        "phases": phases,
        "peak_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "curve": curve,
        "described": ready.state.describe() if hasattr(ready.state, "describe") else "",
        "device": name_of(device),
    }
    if ready.local is not None:
        ready.local.restore()  # the last weights on which all ranks have agreed
    if task.points and not diverged:
        measured = result["measure"] = _measure(emit, workload, plain, ready)
        curve.append((task.steps, math.fsum(one.seconds for one in taken), measured))
    for name in ("check_replicas", "close"):
        getattr(ready.state, name, lambda: None)()
    return result


def _diverged(loss: torch.Tensor) -> bool:
    """Return whether any rank's loss is not below `DIVERGED`. Collective, equal on all ranks."""
    bad = torch.tensor(float(not loss.item() < DIVERGED))
    dist.all_reduce(bad, dist.ReduceOp.MAX)
    return bool(bad)


def _total_nbytes(ready: Ready, values: int, world: int) -> int | None:
    """Return the bytes that this rank has sent for `values` parameter values; None: not known."""
    if hasattr(ready.state, "stats"):
        first = getattr(ready.state, "start_stats", None)
        return int(ready.state.stats.bytes_sent) + (first.bytes_sent if first is not None else 0)
    if isinstance(ready.state, PowerSGDState):  # it does not count its first exchanges, in fp32
        numel = sum(p.numel() for p in ready.model.parameters())
        first = min(values, ready.state.start_powerSGD_iter * numel)
        return ring_bytes(first + ready.state.total_numel_after_compression, world)
    return ring_bytes(values, world) * ready.method.bits // 32 if ready.method.bits else None


def _step(
    ready: Ready, workload: Workload, plain: nn.Module, minibatch: Any, device: torch.device = HERE
) -> tuple[Seconds, torch.Tensor]:
    """Train on a minibatch; return its seconds and the loss (0 with double buffering)."""
    begun, worked = _now(device), time.process_time()
    loss = torch.zeros(())
    if ready.double is not None:  # no clipping: averages arrive half a minibatch later
        pair = isinstance(minibatch, tuple)
        ready.double.step(
            lambda *half: workload.loss(plain, half if pair else half[0]),
            *(minibatch if pair else (minibatch,)),
        )
        forward = averaged = _now(device)
    else:
        for optimizer in ready.optimizers:
            optimizer.zero_grad()
        loss = workload.loss(ready.model, minibatch)
        forward = _now(device)
        loss.backward()  # type: ignore[no-untyped-call]
        if ready.local is not None:
            ready.local.average_gradients()
        averaged = _now(device)
        _update(ready, workload.settings.clip, plain)
    ended = _now(device)
    worked = time.process_time() - worked
    return Seconds(ended - begun, forward - begun, ended - averaged, worked), loss.detach()


def _now(device: torch.device) -> float:
    """Return the time at which all work queued on a device is done, in seconds."""
    wait_for(device)
    return time.perf_counter()


def _update(ready: Ready, clip: float | None, plain: nn.Module) -> None:
    """Clip the averaged gradients, update the weights, and end the step."""
    if not ready.method.feedback:
        ready.state.discard_step()  # reset the residuals to zero
    if clip is not None:
        nn.utils.clip_grad_norm_(plain.parameters(), clip)
    for optimizer in ready.optimizers:
        optimizer.step()
    if ready.local is not None:
        ready.local.step()


def _measure(
    emit: Emit, workload: Workload, model: nn.Module, ready: Ready, *, quick: bool = False
) -> float:
    """Return the workload's measure, equal on all ranks; its time is not counted. Collective."""
    found = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() == 0 or ready.method.sharded:
        model.eval()
        with torch.no_grad():
            found[0] = workload.test(model, quick=quick, tick=partial(emit, None))
        model.train()
    dist.broadcast(found, 0)
    return float(found[0])


def _counted(state: Any) -> dict[str, float]:
    """Return the bytes sent so far and the seconds of each phase; {} if they are not counted."""
    stats = getattr(state, "stats", None)
    return {} if stats is None else {"bytes_sent": float(stats.bytes_sent), **stats.seconds}


def _sent_nbytes(interface: str) -> float:
    """Return the bytes sent over a network interface of this host since its start; 0 for ""."""
    if not interface:
        return 0.0
    lines = (line.partition(":") for line in Path("/proc/self/net/dev").read_text().splitlines())
    return next(
        float(counted.split()[8]) for name, _, counted in lines if name.strip() == interface
    )
