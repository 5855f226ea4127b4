"""Measure the planner's input on the ranks at hand: computing, codecs and collectives.

Ranks of one machine share its cores, caches and memory, so all of them work during each
measurement: after a barrier every rank does the same, and the seconds of the slowest rank are used.
Figures are medians over repetitions; ranges are of `TIMES` measurements. No measurement overlaps an
exchange with a training step.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike

from gradcomp.bench.device import CPU, device_of_rank
from gradcomp.bench.predict import planned
from gradcomp.bench.ranks import TIMEOUT_S, Emit, Place, run
from gradcomp.bench.timing import turns
from gradcomp.bench.trainer import Task, train, use_cores
from gradcomp.comm.base import Channel, Communicator
from gradcomp.comm.mpi import MpiCommunicator
from gradcomp.comm.rounds import ring_bytes
from gradcomp.comm.torchdist import TorchCommunicator
from gradcomp.kernels.staging import wait_for
from gradcomp.memory.transform import Transforming
from gradcomp.onebit_sgd import AggregateAdagrad
from gradcomp.plan.costs import METHODS, LocalSteps, Method
from gradcomp.plan.models import Model, find_model
from gradcomp.plan.rates import Rates, StageRate, calibrate, fit, per_value
from gradcomp.plan.workload import Transport, Workload

BATCH = 64  # samples per rank and step
STEPS = 33
TIMES = 3  # measurements of everything, for the ranges
REPEATS = 5  # collectives of a measurement
CODEC_REPEATS = 3
LARGEST = 512 * 2442  # LeNet's gradients, rounded so that all ranks own equally many
CALIBRATED = 1 << 20, 1 << 22  # least and most values of the largest bucket that is timed
# the last one adds the rates of local steps
ASKED = (*METHODS, METHODS[0].after(LocalSteps(1)))
KINDS = ("max", "all_to_all", "all_gather", "all_reduce", "all_reduce_bf16")


@dataclass(frozen=True)
class Measurement:
    """Measurements of the ranks at hand; seconds while all of them work."""

    ranks: int
    batch: int  # samples per rank and step
    t_frame: float  # seconds of forward and backward of one sample of LeNet
    forward_share: float  # share of `t_frame` spent in forward
    t_update: float  # seconds of SGD with momentum on LeNet's weights
    t_post: float  # seconds of AdaGrad on all of LeNet's gradients, which owners divide
    rates: Rates  # CPU seconds of the codecs
    transport: Transport  # seconds of collectives
    cores: float  # cores of this machine per rank
    # of each measurement: medians of the last two are above, `t_frame` is that of all steps
    frames: tuple[float, ...] = ()
    repeated: tuple[Rates, ...] = ()
    transports: tuple[Transport, ...] = ()

    def workload(self, model: Model, minibatch: float | None) -> Workload:
        """Return a model's workload, scaled from LeNet's; `minibatch` None: as measured."""
        lenet = find_model("LeNet")
        return Workload(
            model.parameters,
            self.batch * self.ranks if minibatch is None else minibatch,
            self.t_frame * model.forward_flops / lenet.forward_flops,
            t_update=self.t_update * model.numel / lenet.numel,
            flops=model.flops,
            forward_share=self.forward_share,
        )


def measure_here(ranks: int | None) -> Measurement:
    """Return the measurements of the launched ranks, or of `ranks` new ranks on this machine.

    Raises:
        ValueError: `ranks` is None, and this process was not launched as one of several ranks.
        gradcomp.bench.ranks.RankFailed: one of the new ranks failed.
    """
    found: list[Measurement] = []
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
    """Emit a `Measurement`, equal on every rank, from `steps` steps of LeNet and buckets of up to
    `largest` values. Collective.
    """
    world = dist.get_world_size()
    own = train(lambda message: None, Task("lenet-noise", "sgd", "none", world, steps))
    update = np.array(own["update_seconds"])
    computing = own["seconds"] - update
    frames = [slowest(part) / BATCH for part in np.array_split(computing, TIMES)]
    t_frame = slowest(computing) / BATCH
    numel = own["parameters"]
    gradients, adagrad = torch.full((numel,), 0.01), Transforming(AggregateAdagrad(), {0: numel})
    post = _together(lambda: adagrad.run(gradients, [(0, 0, numel)]), len(update))
    comm = TorchCommunicator(timeout_s=TIMEOUT_S)
    found = [
        _measure_exchange(comm, methods, largest, repeats=(CODEC_REPEATS, REPEATS))
        for _ in range(TIMES)
    ]
    repeated, transports = zip(*found, strict=True)
    comm.close()
    emit(
        Measurement(
            ranks=world,
            batch=BATCH,
            t_frame=t_frame,
            forward_share=slowest(own["forward_seconds"]) / (t_frame * BATCH),
            t_update=slowest(update),
            t_post=slowest(post),
            rates=Rates.median(repeated),
            transport=Transport.median(transports),
            cores=(os.cpu_count() or 1) / world,
            frames=tuple(frames),
            repeated=repeated,
            transports=transports,
        )
    )


def measure_methods(
    emit: Emit, names: Sequence[str], numel: int, over: str, kind: str = CPU
) -> None:
    """Emit, on rank 0, the rates of methods and the transport over gloo or mpi, with each rank on
    its share of the cores and gradients on a kind of device. The largest bucket has about `numel`
    values, because values take longer if they do not fit the cache. Collective.
    """
    use_cores()
    emit(None)  # the first heartbeat: from here on a long silence is a hang
    world, mpi = dist.get_world_size(), over == "mpi"
    comm = (MpiCommunicator if mpi else TorchCommunicator)(timeout_s=TIMEOUT_S)
    found = [method for name in names if (method := planned(name, world, over_mpi=mpi))]
    largest = min(max(numel, CALIBRATED[0]), CALIBRATED[1]) // 512 * 512
    device = device_of_rank(kind, dist.get_rank())
    measured = _measure_exchange(comm, found, largest, device)
    comm.close()
    if dist.get_rank() == 0:
        emit(measured)


def _measure_exchange(
    comm: Communicator,
    methods: Sequence[Method],
    largest: int,
    device: torch.device = torch.device(CPU),  # noqa: B008 - immutable
    repeats: tuple[int, int] = (7, 15),
) -> tuple[Rates, Transport]:
    """Return the rates of the codecs and the transport, equal on every rank, for gradients on a
    device; the largest bucket has `largest` values, a multiple of 512. `repeats`: of each codec and
    of each collective. Collective.
    """
    unique = list({method.name: method for method in methods}.values())
    rates = calibrate(
        unique, sizes=(1 << 13, largest), repeats=repeats[0], before=dist.barrier, device=device
    )
    alphas: dict[str, float] = {}
    betas: dict[str, float] = {}
    for kind in KINDS:
        points = []
        for nbytes in (1 << 12, 1 << 16, largest // 2, largest * 4):
            action, count = _collective(comm, kind, nbytes, device)
            points.append((per_value(count), slowest(_together(action, repeats[1]))))
        rate = fit(points)
        alphas[kind], betas[kind] = rate.fixed_s, rate.per_value_s
    return _slowest_rates(rates), Transport(alphas, betas)


def slowest(seconds: ArrayLike) -> float:
    """Return the median over repeats of the slowest rank's seconds. Collective."""
    return float(np.median(_largest(seconds)))


def _largest(values: ArrayLike) -> list[float]:
    """Return the elementwise maximum of all ranks' values. Collective."""
    largest = torch.as_tensor(np.array(values, dtype=np.float64))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def _slowest_rates(own: Rates) -> Rates:
    """Return the maximum of every rate over all ranks. Collective."""
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


def _together(action: Callable[[], Any], repeats: int) -> Any:
    """Return the seconds of `repeats` calls that all ranks start at the same time. Collective."""
    return turns([action], repeats + 1, before=dist.barrier)[1:, 0]


def _collective(
    comm: Communicator, kind: str, nbytes: int, device: torch.device
) -> tuple[Callable[[], Any], int]:
    """Return a function that runs a collective of about `nbytes` a rank, and the exact bytes."""
    n = comm.world_size
    part = nbytes // (n - 1)
    if kind == "max":
        values = torch.ones(max(1, nbytes * n // (8 * (n - 1))), dtype=torch.int32)
        sent = ring_bytes(values.numel(), n)
        return lambda: comm.start_max(values, Channel.SCALE).wait(TIMEOUT_S), sent
    if kind.startswith("all_reduce"):
        dtype = torch.bfloat16 if kind == "all_reduce_bf16" else torch.float32
        numel = max(1, nbytes * n // (2 * dtype.itemsize * (n - 1)))
        gradients = torch.zeros(numel, dtype=dtype, device=device)
        sent = ring_bytes(numel, n) * dtype.itemsize // 4

        def reduce() -> None:
            dist.all_reduce(gradients)
            wait_for(device)

        return reduce, sent
    recv, counts = torch.empty(n * part, dtype=torch.uint8), [part] * n
    send = torch.ones(part if kind == "all_gather" else n * part, dtype=torch.uint8)

    def exchange() -> None:
        if kind == "all_gather":
            work = comm.start_all_gather(send, recv, Channel.FIRST)
        else:
            work = comm.start_all_to_all(send, counts, recv, counts, Channel.FIRST)
        work.wait(TIMEOUT_S)

    return exchange, (n - 1) * part
