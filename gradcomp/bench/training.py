"""Train LeNet under DDP on this machine, once a codec and seed, and measure accuracy, bytes and
seconds.

The caller's process starts the ranks and shows progress; the ranks run the same program that a user
would write. ``fp32`` is DistributedDataParallel with no hook, so its bytes are counted by the ring
formula 2(N-1)/N * 4 * numel and it has no phases. Everything random depends on the seed alone, so
codecs differ in nothing but the codec.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradcomp
import gradcomp.ddp
from gradcomp.bench.data import ImageData, load
from gradcomp.bench.models import LeNet
from gradcomp.bench.ranks import Emit, run_ranks
from gradcomp.codecs import Codec
from gradcomp.comm.rounds import ring_bytes

CODECS: Mapping[str, Callable[[int], Codec] | None] = {
    "fp32": None,
    "ternary": lambda seed: gradcomp.Ternary(),
    "onebit": lambda seed: gradcomp.OneBit(),
    "terngrad": lambda seed: gradcomp.TernGrad(seed=seed),
}  # by name, of a seed; None: DDP's own all_reduce
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
DECAY_POWER = 0.5
WARM_UP_STEPS = 5
CURVE_POINTS = 8
CURVE_TEST_IMAGES = 1000
ALONE_STEPS = 15


@dataclass(frozen=True)
class TrainConfig:
    """What to train; the same on every rank.

    Attributes:
        codecs: names out of :data:`CODECS`, trained in this order.
        seeds: number of seeds; run i uses seed i for weights, batches and codec.
        steps: optimizer steps of a run.
        batch: images a step over all ranks together; a multiple of ``ranks``.
        lr: first learning rate; it decays to 0 with the square root of the steps left (TernGrad's
            LeNet schedule).
        ranks: processes, one torch thread each.
        data: folder of IDX files, None for scikit-learn's digits.
    """

    codecs: tuple[str, ...]
    seeds: int
    steps: int
    batch: int
    lr: float
    ranks: int
    data: Path | None


@dataclass(frozen=True)
class RunResult:
    """One finished run.

    Attributes:
        codec: its name.
        seed: its seed.
        accuracy: share of the test images that the final model gets right, in percent.
        bytes_sent: bytes that each rank sent in the whole run, by rank.
        baseline_bytes: bytes that a rank of an fp32 ring would have sent in the whole run.
        seconds_per_step: median over the steps after the warm-up, on rank 0, data loading excluded.
        phase_seconds: rank 0's total seconds by phase (``state.stats.seconds``); empty for fp32.
        curve: (steps done, bytes sent by rank 0 so far, test accuracy in percent on at most 1000
            images).
    """

    codec: str
    seed: int
    accuracy: float
    bytes_sent: list[int]
    baseline_bytes: int
    seconds_per_step: float
    phase_seconds: dict[str, float] = field(default_factory=dict)
    curve: list[tuple[int, int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Alone:
    """Seconds of a step in which nothing is exchanged, with all ranks at work; of the slowest rank.

    Attributes:
        compute: forward and backward.
        update: the optimizer's step.
    """

    compute: float
    update: float


def train_all(
    config: TrainConfig, data: ImageData, on_step: Callable[[str, int, int], None]
) -> tuple[list[RunResult], Alone]:
    """Start the ranks, train every seed with every codec, and collect the results.

    Args:
        config: what to train.
        data: what `load` returned for ``config.data``.
        on_step: called in this process with (codec, seed, steps done) as the training goes on.

    Returns:
        One result a (seed, codec), in the order of training, and what a step takes without an
        exchange.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; the message carries its
            traceback.
        torch.multiprocessing.ProcessExitedException: a rank was killed; the others have been ended.
    """
    results: list[RunResult] = []
    alone: list[Alone] = []

    def on_message(message: Any) -> None:
        if isinstance(message, RunResult):
            results.append(message)
        elif isinstance(message, Alone):
            alone.append(message)
        else:
            on_step(*message)

    # scikit-learn takes a rank seconds to import; files are large and quick to read
    small: dict[str, Any] | None = None
    if config.data is None:
        small = {f.name: _plain(getattr(data, f.name)) for f in fields(data)}
    run_ranks(config.ranks, _train_rank, config, small, on_message=on_message)
    return results, alone[0]


def _plain(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) else value


def curve_steps(steps: int) -> list[int]:
    """Return the steps after which the test accuracy is taken: about evenly spaced on a
    logarithmic axis, last included.
    """
    return sorted({max(1, round(s)) for s in np.geomspace(max(1, steps / 40), steps, CURVE_POINTS)})


def batch_indices(count: int, batch: int, steps: int, seed: int) -> list[Tensor]:
    """Return the images of every step: epochs of fresh permutations, the incomplete rest of an
    epoch dropped.

    Args:
        count: number of training images, at least ``batch``.
        batch: images a step.
        steps: number of steps.
        seed: decides the permutations.

    Returns:
        ``steps`` tensors of `(batch,)` int64.

    Raises:
        ValueError: there are fewer images than one batch takes.
    """
    if count < batch:
        raise ValueError(f"batch {batch} is larger than the training set of {count} images")
    generator = torch.Generator().manual_seed(seed)
    out: list[Tensor] = []
    while len(out) < steps:
        order = torch.randperm(count, generator=generator)
        out += list(torch.split(order[: count - count % batch], batch))
    return out[:steps]


def _train_rank(rank: int, emit: Emit, config: TrainConfig, given: dict[str, Any] | None) -> None:
    if given is None:
        data = load(config.data)
    else:
        values: dict[str, Any] = {
            k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in given.items()
        }
        data = ImageData(**values)
    alone = _step_alone(config, data)
    if rank == 0:
        emit(alone)
    for seed in range(config.seeds):
        for codec in config.codecs:
            result = _run(rank, emit, config, data, codec, seed)
            if rank == 0:
                emit(result)


def _model() -> LeNet:
    return LeNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def _step_alone(config: TrainConfig, data: ImageData) -> Alone:
    """Return what a step takes on all ranks at once, with nothing exchanged."""
    torch.manual_seed(0)
    model = _model()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    images, labels = _batch(data, torch.arange(config.batch // config.ranks))
    seen = []
    for _ in range(WARM_UP_STEPS + ALONE_STEPS):
        times = [time.perf_counter()]
        optimizer.zero_grad()
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(images), labels))
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        seen.append(np.diff(times))
    slowest = torch.from_numpy(np.median(seen[WARM_UP_STEPS:], axis=0))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return Alone(*slowest.tolist())


def _batch(data: ImageData, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return images and labels; in channels_last, in which CPUs take a third less time for
    LeNet's convolutions.
    """
    images = data.train_images[indices].to(memory_format=torch.channels_last)
    return images, data.train_labels[indices]


def _run(
    rank: int, emit: Emit, config: TrainConfig, data: ImageData, codec: str, seed: int
) -> RunResult:
    torch.manual_seed(seed)
    model = DistributedDataParallel(_model())
    state = _register(model, codec, seed)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 - step / config.steps) ** DECAY_POWER
    )
    numel = sum(p.numel() for p in model.parameters())
    ring_nbytes = ring_bytes(numel, config.ranks)
    points = curve_steps(config.steps)
    curve: list[tuple[int, int, float]] = []
    step_seconds: list[float] = []
    for step, indices in enumerate(
        batch_indices(len(data.train_labels), config.batch, config.steps, seed), start=1
    ):
        mine = indices[rank :: config.ranks]
        images, labels = _batch(data, mine)
        start = time.perf_counter()
        optimizer.zero_grad()
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(images), labels))
        optimizer.step()
        step_seconds.append(time.perf_counter() - start)
        schedule.step()
        if rank == 0:
            emit((codec, seed, step))
        if step in points:
            sent = step * ring_nbytes if state is None else state.stats.bytes_sent
            curve.append(
                (step, sent, _accuracy(rank, config.ranks, model.module, data, CURVE_TEST_IMAGES))
            )
    accuracy = _accuracy(rank, config.ranks, model.module, data, len(data.test_labels))
    mine = torch.tensor([config.steps * ring_nbytes if state is None else state.stats.bytes_sent])
    sent_by_rank = [torch.empty_like(mine) for _ in range(config.ranks)]
    dist.all_gather(sent_by_rank, mine)
    phases = {} if state is None else dict(state.stats.seconds)
    if state is not None:
        state.check_replicas()
        state.close()
    seconds = statistics.median(step_seconds[min(WARM_UP_STEPS, config.steps - 1) :])
    return RunResult(
        codec,
        seed,
        accuracy,
        [int(n) for n in sent_by_rank],
        config.steps * ring_nbytes,
        seconds,
        phases,
        curve,
    )


def _register(
    model: DistributedDataParallel, codec: str, seed: int
) -> gradcomp.ddp.CompressionState | None:
    make = CODECS[codec]
    return None if make is None else gradcomp.ddp.register(model, make(seed))


def _accuracy(rank: int, ranks: int, model: torch.nn.Module, data: ImageData, limit: int) -> float:
    """Return the percentage of the first ``limit`` test images that the model gets right; each
    rank takes its share.
    """
    images = data.test_images[rank:limit:ranks].to(memory_format=torch.channels_last)
    labels = data.test_labels[rank:limit:ranks]
    counts = torch.zeros(2, dtype=torch.int64)
    model.eval()
    with torch.no_grad():
        for some_images, some_labels in zip(
            torch.split(images, 500), torch.split(labels, 500), strict=True
        ):
            counts[0] += (model(some_images).argmax(dim=1) == some_labels).sum()
            counts[1] += len(some_labels)
    model.train()
    dist.all_reduce(counts)
    return 100.0 * int(counts[0]) / int(counts[1])
