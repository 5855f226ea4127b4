"""Measure on the ranks at hand what the planner needs: computing, codecs and collectives.

Ranks of one machine share its cores, its caches and its memory, so everything is timed with all of
them at work: a barrier, then every rank does the same, and the slowest rank's seconds count. A
figure is a median of repeats. None of them has an exchange and a training step at once;
`gradcomp.bench.train` compares what is predicted from them with such steps.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradcomp.bench.models import LeNet
from gradcomp.bench.predict import planned
from gradcomp.bench.ranks import TIMEOUT_S, Emit, Place, run
from gradcomp.bench.trainer import Task, train, use_cores
from gradcomp.comm.base import Channel, Communicator
from gradcomp.comm.mpi import MpiCommunicator
from gradcomp.comm.rounds import ring_bytes
from gradcomp.comm.torchdist import TorchCommunicator
from gradcomp.memory.transform import Transforming
from gradcomp.onebit_sgd import AggregateAdagrad
from gradcomp.plan.costs import METHODS, LocalSteps, Method
from gradcomp.plan.models import Model, find_model
from gradcomp.plan.rates import Rates, StageRate, calibrate
from gradcomp.plan.workload import Transport, Workload

BATCH = 64  # samples of a rank and step
STEPS = 33
REPEATS = 15
LARGEST = 512 * 2442  # of LeNet's gradients, as many as all ranks share out alike
CALIBRATED = 1 << 20, 1 << 22  # values of the largest bucket that is timed, at least and at most
# the last for what local steps take beside an exchange
ASKED = (*METHODS, METHODS[0].after(LocalSteps(1)))
KINDS = ("max", "all_to_all", "all_gather", "all_reduce", "all_reduce_bf16")


@dataclass(frozen=True)
class Measured:
    """What the ranks at hand can do; seconds with all of them at work.

    Attributes:
        ranks: their number.
        batch: samples of a rank and step.
        t_frame: forward and backward of a sample of LeNet.
        forward_share: of it.
        t_update: SGD with momentum on LeNet's weights.
        t_post: AdaGrad on all of LeNet's gradients, which owners share out where it is on the
            aggregate.
        rates: of the codecs.
        transport: seconds of collectives.
        cores: of this machine, per rank.
    """

    ranks: int
    batch: int
    t_frame: float
    forward_share: float
    t_update: float
    t_post: float
    rates: Rates
    transport: Transport
    cores: float

    def workload(self, model: Model, *, minibatch: float | None = None) -> Workload:
        """Return a model's work on these ranks: LeNet's as measured, another one's in proportion to
        FLOPs and values.

        Args:
            model: to train.
            minibatch: over all nodes; None: as measured.
        """
        lenet = find_model("LeNet")
        return Workload(
            model.parameters,
            self.batch * self.ranks if minibatch is None else minibatch,
            self.t_frame * model.forward_flops / lenet.forward_flops,
            t_update=self.t_update * model.numel / lenet.numel,
            flops=model.flops,
            forward_share=self.forward_share,
        )


def measure_here(ranks: int | None) -> Measured:
    """Return the measurement of the ranks that this process belongs to, or of ``ranks`` new ones on
    this machine.

    Raises:
        ValueError: no ranks at hand and none asked for.
        gradcomp.bench.ranks.RankFailed: one of the new ranks failed.
    """
    found: list[Measured] = []
    if ranks is not None:
        run(Place(ranks), measure, on_message=found.append)
        return found[0]
    importlib.import_module("gradcomp.launch").export_environment()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ValueError(
            "--measure needs ranks: --ranks 2 starts some here, python -m gradcomp.launch -n 4 -m"
            " gradcomp.plan --measure there"
        )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        measure(found.append)
    finally:
        dist.destroy_process_group()
    return found[0]


def measure(
    emit: Emit, methods: Sequence[Method] = ASKED, steps: int = STEPS, largest: int = LARGEST
) -> None:
    """Emit a `Measured` of these ranks, the same on every rank. Collective.

    Args:
        emit: called once.
        methods: whose codecs are measured.
        steps: of training.
        largest: values of the largest bucket.
    """
    world = dist.get_world_size()
    task = Task("lenet-noise", "sgd", "none", world, steps)
    own = train(lambda message: None, task)
    seconds = {name: np.array(own[f"{name}seconds"]) for name in ("", "forward_", "update_")}
    computing = slowest(list(seconds[""] - seconds["update_"]))
    comm = TorchCommunicator(timeout_s=TIMEOUT_S)
    rates, transport = measure_exchange(comm, methods, largest)
    comm.close()
    emit(
        Measured(
            ranks=world,
            batch=BATCH,
            t_frame=computing / BATCH,
            forward_share=slowest(list(seconds["forward_"])) / computing,
            t_update=slowest(list(seconds["update_"])),
            t_post=slowest(_time_adagrad(len(own["seconds"]))),
            rates=rates,
            transport=transport,
            cores=(os.cpu_count() or 1) / world,
        )
    )


def _time_adagrad(repeats: int) -> list[float]:
    numel = sum(p.numel() for p in LeNet().parameters())
    gradients, adagrad = torch.full((numel,), 0.01), Transforming(AggregateAdagrad(), {0: numel})
    return time_together(lambda: adagrad.run(gradients, [(0, 0, numel)]), repeats)


def measure_methods(emit: Emit, names: Sequence[str], numel: int, over: str) -> None:
    """Emit from rank 0 what codecs and moving bytes cost ranks on their shares of the cores.

    Args:
        emit: gets rates and transport.
        names: of methods of the bench.
        numel: values of the largest bucket: those that no cache holds take longer.
        over: transport of compressed bytes, "gloo" or "mpi".
    """
    use_cores()
    emit(None)  # from here on silence counts
    world, mpi = dist.get_world_size(), over == "mpi"
    comm = (MpiCommunicator if mpi else TorchCommunicator)(timeout_s=TIMEOUT_S)
    found = [method for name in names if (method := planned(name, world, over_mpi=mpi))]
    largest = min(max(numel, CALIBRATED[0]), CALIBRATED[1]) // 512 * 512
    measured = measure_exchange(comm, found, largest)
    comm.close()
    if dist.get_rank() == 0:
        emit(measured)


def measure_exchange(
    comm: Communicator, methods: Sequence[Method], largest: int
) -> tuple[Rates, Transport]:
    """Return seconds of codecs and of moving bytes, the same on every rank. Collective.

    Args:
        comm: the ranks of the default process group.
        methods: whose codecs are measured.
        largest: values of the largest bucket, a multiple of 512.
    """
    unique = list({method.name: method for method in methods}.values())
    rates = calibrate(unique, sizes=(1 << 13, largest), repeats=7, before=dist.barrier)
    return _slowest_rates(rates), measure_transport(
        comm, (1 << 12, 1 << 16, largest // 2, largest * 4)
    )


def slowest(seconds: Sequence[float]) -> float:
    """Return the median over repeats of the slowest rank's seconds. Collective."""
    return float(np.median(_largest(seconds)))


def _largest(values: Sequence[float]) -> list[float]:
    """Return the largest of every rank's values, one by one. Collective."""
    largest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def _slowest_rates(own: Rates) -> Rates:
    """Return the largest over ranks of every rate; all ranks have measured the same methods."""
    rates = [rate for stages in own.stages.values() for rate in stages.values()]
    flat = iter(_largest([value for rate in rates for value in asdict(rate).values()]))
    return Rates(
        {
            method: {
                stage: StageRate(**{name: next(flat) for name in asdict(rate)})
                for stage, rate in stages.items()
            }
            for method, stages in own.stages.items()
        }
    )


def time_together(action: Callable[[], Any], repeats: int) -> list[float]:
    """Return seconds of an action that all ranks begin at once, two warm-ups left out."""
    taken = []
    for _ in range(repeats + 2):
        dist.barrier()
        begun = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begun)
    return taken[2:]


def measure_transport(comm: Communicator, sizes: Sequence[int]) -> Transport:
    """Return alpha and beta of every collective: least relative squares over several `sizes`
    (bytes that a rank sends). Collective.
    """
    alphas: dict[str, float] = {}
    betas: dict[str, float] = {}
    for kind in KINDS:
        sent, seconds = [], []
        for nbytes in sizes:
            action, count = _collective(comm, kind, nbytes)
            sent.append(float(count))
            seconds.append(slowest(time_together(action, REPEATS)))
        alphas[kind], betas[kind] = fit_alpha_beta(sent, seconds)
    return Transport(alphas, betas)


def fit_alpha_beta(nbytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (alpha, beta) of seconds = alpha + beta * nbytes with the least relative squares,
    neither negative.
    """
    sizes, times = np.asarray(nbytes), np.asarray(seconds)
    rows = np.stack([1 / times, sizes / times], axis=1)
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)[0]
    if alpha < 0:
        return 0.0, float((sizes / times).sum() / ((sizes / times) ** 2).sum())
    if beta < 0:
        return float((1 / times).sum() / ((1 / times) ** 2).sum()), 0.0
    return float(alpha), float(beta)


def _collective(comm: Communicator, kind: str, nbytes: int) -> tuple[Callable[[], Any], int]:
    """Return a collective in which a rank sends about `nbytes`, and how many they are."""
    n = comm.world_size
    part = nbytes // (n - 1)
    if kind == "max":
        values = torch.ones(max(1, nbytes * n // (8 * (n - 1))), dtype=torch.int32)
        sent = ring_bytes(values.numel(), n)
        return lambda: comm.start_max(values, Channel.SCALE).wait(TIMEOUT_S), sent
    if kind.startswith("all_reduce"):
        dtype = torch.bfloat16 if kind == "all_reduce_bf16" else torch.float32
        gradients = torch.zeros(max(1, nbytes * n // (2 * dtype.itemsize * (n - 1))), dtype=dtype)
        sent = ring_bytes(gradients.numel(), n) * dtype.itemsize // 4
        return lambda: dist.all_reduce(gradients), sent
    recv, counts = torch.empty(n * part, dtype=torch.uint8), [part] * n
    send = torch.ones(part if kind == "all_gather" else n * part, dtype=torch.uint8)

    def exchange() -> None:
        if kind == "all_gather":
            work = comm.start_all_gather(send, recv, Channel.FIRST)
        else:
            work = comm.start_all_to_all(send, counts, recv, counts, Channel.FIRST)
        work.wait(TIMEOUT_S)

    return exchange, (n - 1) * part
