"""Measure on the ranks at hand what the planner needs: computing, codecs, collectives, all ranks at
once.

Ranks of one machine share its cores, its caches and its memory, so everything is timed with all of
them at work: a barrier, then every rank does the same, and the slowest rank's seconds count. A
figure is a median of repeats. What is predicted from these figures never saw a training step with
an exchange in it; `gradcomp.bench.train` holds it against some.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp.bench.models import LeNet
from gradcomp.bench.ranks import Emit, run_ranks
from gradcomp.comm.base import Channel, Communicator
from gradcomp.comm.rounds import ring_bytes
from gradcomp.comm.torchdist import TorchCommunicator
from gradcomp.errors import PeerMismatch
from gradcomp.memory.transform import Transforming
from gradcomp.onebit_sgd import AggregateAdagrad
from gradcomp.plan.costs import METHODS, LocalSteps, Method
from gradcomp.plan.models import Model
from gradcomp.plan.rates import Rates, StageRate, calibrate
from gradcomp.plan.workload import Transport, Workload

TIMEOUT_S = 120.0
GATHER_NBYTES = 1 << 20  # most that a rank may tell of its measurement
BATCH = 64  # samples of a rank and step
COMPUTE_STEPS = 30
MESSAGE_NBYTES = (1 << 12, 1 << 16, 1 << 19, 1 << 22)
MESSAGE_REPEATS = 15
SIZES = (1 << 13, 512 * 2442)  # of LeNet's gradients, where `before` keeps all ranks in step
# the last for what local steps take beside an exchange
ASKED = (*METHODS, METHODS[0].after(LocalSteps(1)))
KINDS = ("max", "all_to_all", "all_gather", "all_reduce", "all_reduce_bf16")


@dataclass(frozen=True)
class Measured:
    """What the ranks at hand can do; seconds with all of them at work.

    Attributes:
        ranks: how many.
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
        numel = sum(p.numel() for p in LeNet().parameters())
        flops = _lenet_flops()
        return Workload(
            model.parameters,
            self.batch * self.ranks if minibatch is None else minibatch,
            self.t_frame * model.forward_flops / flops,
            t_update=self.t_update * model.numel / numel,
            flops=model.flops,
            forward_share=self.forward_share,
        )


def measure_here(ranks: int | None) -> Measured:
    """Return the measurement of the ranks that this process belongs to, or of ``ranks`` new ones on
    this machine.

    Raises:
        ValueError: no ranks at hand and none asked for.
    """
    if ranks is not None:
        found: list[Measured] = []
        run_ranks(ranks, _measure_rank, on_message=found.append)
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
        comm = TorchCommunicator(timeout_s=TIMEOUT_S)
        try:
            return measure(comm, ASKED)
        finally:
            comm.close()
    finally:
        dist.destroy_process_group()


def _measure_rank(rank: int, emit: Emit) -> None:
    comm = TorchCommunicator(timeout_s=TIMEOUT_S)
    found = measure(comm, ASKED)
    comm.close()
    if rank == 0:
        emit(found)


def measure(comm: Communicator, methods: Sequence[Method]) -> Measured:
    """Return what these ranks can do. Collective; the same result on every rank.

    Args:
        comm: the ranks.
        methods: whose codecs are measured.
    """
    computed = _measure_training(comm)
    own = calibrate(methods, sizes=SIZES, repeats=7, before=lambda: barrier(comm))
    rates = _slowest_rates(gather(comm, own.to_dict()))
    transport = measure_transport(comm)
    return Measured(
        ranks=comm.world_size,
        batch=BATCH,
        rates=rates,
        transport=transport,
        cores=(os.cpu_count() or 1) / comm.world_size,
        **computed,
    )


def gather(comm: Communicator, value: Any) -> list[Any]:
    """Return every rank's value, made of what JSON knows (floats arrive bit for bit). Collective.

    Raises:
        PeerMismatch: a rank sent what is not JSON, or more than `GATHER_NBYTES` bytes.
    """
    mine = json.dumps(value).encode()
    lengths = [
        int.from_bytes(b, "little")
        for b in comm.all_gather_bytes(len(mine).to_bytes(8, "little"), TIMEOUT_S)
    ]
    if max(lengths) > GATHER_NBYTES:
        raise PeerMismatch(
            "measurement",
            lengths.index(max(lengths)),
            f"at most {GATHER_NBYTES} bytes",
            max(lengths),
        )
    found = []
    for rank, data in enumerate(comm.all_gather_bytes(mine.ljust(max(lengths)), TIMEOUT_S)):
        try:
            found.append(json.loads(data))
        except (ValueError, RecursionError) as error:
            raise PeerMismatch("measurement", rank, "JSON", f"{data[:20]!r}...") from error
    return found


def barrier(comm: Communicator) -> None:
    """Wait for all ranks."""
    comm.all_gather_bytes(b"\0" * 8, TIMEOUT_S)


def slowest(comm: Communicator, seconds: Sequence[float]) -> float:
    """Return the median over repeats of the slowest rank's seconds, the same on every rank."""
    return float(np.median(np.max(gather(comm, list(seconds)), axis=0)))


def _lenet_flops() -> float:
    from gradcomp.plan.models import find_model

    return find_model("LeNet").forward_flops


class Training:
    """LeNet's training step on this rank, with nothing exchanged."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = LeNet()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self._images, self._labels = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
        numel = sum(p.numel() for p in self.model.parameters())
        self._flat = torch.full((numel,), 0.01)
        self._adagrad = Transforming(AggregateAdagrad(), {0: numel})

    def forward(self) -> Tensor:
        """Return the loss of the batch."""
        self.optimizer.zero_grad()
        return torch.nn.functional.cross_entropy(self.model(self._images), self._labels)

    def time_parts(self) -> list[float]:
        """Return seconds of forward, backward, update, and AdaGrad on all gradients."""
        times = [time.perf_counter()]
        loss = self.forward()
        times.append(time.perf_counter())
        torch.autograd.backward(loss)
        times.append(time.perf_counter())
        self.optimizer.step()
        times.append(time.perf_counter())
        self._adagrad.run(self._flat, [(0, 0, self._flat.numel())])
        times.append(time.perf_counter())
        return np.diff(times).tolist()  # type: ignore[no-any-return]


def _measure_training(comm: Communicator) -> dict[str, float]:
    """Return what `Measured` says of computing."""
    training, seen = Training(comm.rank), []
    for _ in range(COMPUTE_STEPS + 3):
        barrier(comm)
        seen.append(training.time_parts())
    return computing(comm, seen[3:])


def computing(comm: Communicator, seen: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return what `Measured` says of computing, of what `Training.time_parts` returned.
    Collective.
    """
    forward, backward, update, post = (slowest(comm, column) for column in zip(*seen, strict=True))
    whole = slowest(comm, [f + b for f, b, *_ in seen])
    share = forward / (forward + backward)
    return {
        "t_frame": whole / BATCH,
        "forward_share": share,
        "t_update": update,
        "t_post": post,
    }


def _slowest_rates(dicts: Sequence[dict[str, dict[str, dict[str, float]]]]) -> Rates:
    """Return the largest over ranks of every rate, of what `Rates.to_dict` returned on each."""
    return Rates(
        {
            method: {
                stage: StageRate(
                    **{name: max(d[method][stage][name] for d in dicts) for name in rate}
                )
                for stage, rate in stages.items()
            }
            for method, stages in dicts[0].items()
        }
    )


def measure_transport(comm: Communicator, sizes: Sequence[int] = MESSAGE_NBYTES) -> Transport:
    """Return alpha and beta of every collective: least relative squares over several `sizes`
    (bytes that a rank sends). Collective.
    """
    alphas: dict[str, float] = {}
    betas: dict[str, float] = {}
    for kind in KINDS:
        if kind.startswith("all_reduce") and not dist.is_initialized():
            continue
        sent, seconds = [], []
        for nbytes in sizes:
            start, count = _collective(comm, kind, nbytes)
            times = []
            for _ in range(MESSAGE_REPEATS + 2):
                barrier(comm)
                begun = time.perf_counter()
                start()
                times.append(time.perf_counter() - begun)
            sent.append(float(count))
            seconds.append(slowest(comm, times[2:]))
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


def _collective(comm: Communicator, kind: str, nbytes: int) -> tuple[Callable[[], None], int]:
    """Return a collective in which a rank sends about `nbytes`, and how many they are."""
    n = comm.world_size
    if kind == "max":
        values = torch.ones(max(1, nbytes * n // (8 * (n - 1))), dtype=torch.int32)
        return lambda: comm.start_max(values, Channel.SCALE).wait(TIMEOUT_S), ring_bytes(
            values.numel(), n
        )
    if kind.startswith("all_reduce"):
        dtype = torch.bfloat16 if kind == "all_reduce_bf16" else torch.float32
        gradients = torch.ones(max(1, nbytes * n // (2 * dtype.itemsize * (n - 1))), dtype=dtype)
        return (
            lambda: _all_reduce(gradients),
            ring_bytes(gradients.numel(), n) * dtype.itemsize // 4,
        )
    part = nbytes // (n - 1)
    if kind == "all_gather":
        send, recv = torch.ones(part, dtype=torch.uint8), torch.empty(n * part, dtype=torch.uint8)
        return (
            lambda: comm.start_all_gather(send, recv, Channel.FIRST).wait(TIMEOUT_S),
            (n - 1) * part,
        )
    send, recv = torch.ones(n * part, dtype=torch.uint8), torch.empty(n * part, dtype=torch.uint8)
    counts = [part] * n
    return (
        lambda: comm.start_all_to_all(send, counts, recv, counts, Channel.FIRST).wait(TIMEOUT_S),
        (n - 1) * part,
    )


def _all_reduce(values: Tensor) -> None:
    dist.all_reduce(values)
    values.fill_(1.0)
