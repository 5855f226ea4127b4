"""Search for the largest minibatch that does not hurt training, by trials on upcoming data.

References:
    Seide et al. 2014, "1-bit stochastic gradient descent": after every 24 h of data, several sizes
    are tried on the next 45 minutes. The choice is the largest size that does not lose training-set
    frame accuracy. Steps of sqrt(2), multiples of 64, a factor of at most 2 from the last choice
    and the margin of 1 % are CNTK's.
"""

from __future__ import annotations

import math
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradcomp.arguments import check_integer, check_number
from gradcomp.comm.base import Channel, Communicator
from gradcomp.errors import GradcompError
from gradcomp.exchange.agree import Shown, agree, gather
from gradcomp.onebit_sgd.restore import rolled_back

Train = Callable[[int, int], Iterable[float | Tensor]]
_RESULT = struct.Struct("<dqd")  # sum of losses, steps, seconds


@dataclass(frozen=True)
class BatchSizeTrial:
    """Result of one minibatch size.

    Attributes:
        minibatch: samples per step of all ranks together.
        criterion: mean training loss over steps and ranks; NaN if any loss was NaN or Inf.
        lr_factor: the trial's learning rates divided by those before it.
        steps: steps of the rank with the most.
        seconds: duration on the slowest rank.
    """

    minibatch: int
    criterion: float
    lr_factor: float
    steps: int
    seconds: float


@dataclass(frozen=True)
class BatchSizeChoice:
    """Result of `find_batch_size`.

    Attributes:
        minibatch: the chosen size, in samples of all ranks together.
        trials: all trials, by increasing minibatch.
        margin: the `margin` passed to `find_batch_size`.
    """

    minibatch: int
    trials: tuple[BatchSizeTrial, ...]
    margin: float

    @property
    def trial(self) -> BatchSizeTrial:
        """The trial of the chosen minibatch."""
        return next(t for t in self.trials if t.minibatch == self.minibatch)

    def __str__(self) -> str:
        """Return a table of the trials; the chosen row begins with ``*``."""
        best = min((t.criterion for t in self.trials if math.isfinite(t.criterion)), default=0.0)
        lines = ["   minibatch   criterion    of best  lr factor     steps    seconds"]
        for t in self.trials:
            known = best and math.isfinite(t.criterion)
            more = f"{100 * (t.criterion - best) / abs(best):+.2f} %" if known else "-"
            mark = "*" if t.minibatch == self.minibatch else " "
            lines.append(
                f"{mark}  {t.minibatch:9d}  {t.criterion:10.6g}  {more:>9}  {t.lr_factor:9.3f}"
                f"  {t.steps:8d}  {t.seconds:9.1f}"
            )
        within = f"the largest within {100 * self.margin:g} % of the best"
        return "\n".join([*lines, f"minibatch {self.minibatch}: {within}"])


def find_batch_size(
    train: Train,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: int,
    current: int,
    state: Any = None,
    comm: Communicator | None = None,
    smallest: int | None = None,
    largest: int | None = None,
    multiple: int = 64,
    step: float = 2**0.5,
    factor: float = 2.0,
    margin: float = 0.01,
    per_sample_lr: bool = True,
    progress: bool = True,
    timeout_s: float = 300.0,
) -> BatchSizeChoice:
    """Try minibatch sizes around `current` from the current state of training, and return the
    largest that trains as well. Collective: every rank calls it with the same arguments.

    Every trial trains on the same samples and is rolled back, bit for bit. Its criterion is the
    float64 mean of the losses that `train` yields, first over a rank's steps, then over ranks in
    rank order. The choice is the largest minibatch whose criterion is at most ``best + margin *
    abs(best)``. A trial with a loss of NaN or Inf on any rank is never chosen::

        def train(minibatch, samples):
            for inputs, targets in batches(samples, minibatch // world_size):
                yield buffer.step(loss_fn, inputs, targets)

        choice = find_batch_size(
            train, model=model, optimizer=optimizer, state=buffer, samples=50_000, current=256
        )

    Args:
        train: called with a minibatch (of all ranks together) and `samples`. It trains on that many
            samples, the same ones in every call, and yields each step's training loss.
        model: the model that `train` trains, in DDP or not.
        optimizer: the optimizer of its parameters, torch's or split.
        samples: samples per trial of all ranks together, at least 2 of the largest minibatch.
        current: the current minibatch, in samples of all ranks together.
        state: other objects to roll back, one or a sequence, with ``state_dict()`` and
            ``load_state_dict()``: `CompressionState`, `DoubleBuffer`, a scaler, a scheduler.
        comm: communicator, not closed; torch.distributed's default group when None, or one rank if
            that is not initialized. No exchange may be in progress on it outside `train`.
        smallest, largest: bounds of the sizes to try; None for those of `factor`.
        multiple: sizes other than `current` are multiples of it and of the number of ranks.
        step: ratio of one size to the size before.
        factor: the largest ratio to `current`, up or down.
        margin: by how much a criterion may exceed the best, relative to it.
        per_sample_lr: multiply every group's ``lr`` by minibatch / `current` in a trial, and at the
            end for the choice. With a mean loss this keeps the learning rate per sample.
        progress: print a line for each trial to stderr of rank 0.
        timeout_s: seconds to wait for another rank.

    Returns:
        The choice and every trial. Only learning rates, counters of bytes and seconds, and
        gradients (now None) have changed.

    Raises:
        ValueError: on every rank: an argument out of its range; too few `samples`; no size within
            the bounds; a `train` that yields nothing on some rank.
        TypeError: `train` does not return an iterable.
        PeerMismatch: on every rank: the arguments differ.
        GradcompError: on every rank: every trial had a loss of NaN or Inf.
        PeerLost: a rank did not answer, for instance because its `train` raised.
        Exception: any exception of `train`, after rolling back.
    """
    if comm is None:
        from gradcomp.comm.torchdist import default_or_alone

        comm = default_or_alone()
    counts = {"samples": samples, "current": current, "multiple": multiple}
    bounds = {"smallest": smallest, "largest": largest}
    numbers = {"step": step, "factor": factor, "margin": margin}
    arguments = counts | bounds | numbers | {"per_sample_lr": per_sample_lr}
    called, channel = "find_batch_size", Channel.CONTROL
    values = {name: Shown(value, repr(value)) for name, value in arguments.items()}
    agree(comm, values, timeout_s, called=called, phase="batch_size", channel=channel)
    for name, value in (counts | {k: v for k, v in bounds.items() if v is not None}).items():
        check_integer(name, value, 1)
    for (name, number), least in zip(numbers.items(), (1.01, 1.0, 0.0), strict=True):
        check_number(name, number, least, 1e3, "[]")
    sizes = candidates(current, comm.world_size, smallest, largest, multiple, step, factor)
    if samples < 2 * sizes[-1]:
        raise ValueError(
            f"samples={samples} are too few: 2 steps of the largest minibatch to be tried,"
            f" {sizes[-1]}, take {2 * sizes[-1]}"
        )
    others = state if isinstance(state, (list, tuple)) else [] if state is None else [state]
    trials = []
    for size in sizes:
        scale = size / current if per_sample_lr else 1.0
        with rolled_back(model, optimizer, others):
            _scale_lr(optimizer, scale)
            mine = _RESULT.pack(*_run(train, size, samples))
        found = gather(comm, mine, "batch_size", timeout_s, called=called)
        trial = _merge(size, scale, [_RESULT.unpack(data) for data in found])
        trials.append(trial)
        if progress and comm.rank == 0:
            line = f"minibatch {size}: criterion {trial.criterion:.6g}, {trial.steps} steps"
            print(f"{line} in {trial.seconds:.1f} s", file=sys.stderr)
    choice = BatchSizeChoice(_choose(trials, margin), tuple(trials), margin)
    _scale_lr(optimizer, choice.trial.lr_factor)
    return choice


def candidates(
    current: int,
    world_size: int,
    smallest: int | None,
    largest: int | None,
    multiple: int,
    step: float,
    factor: float,
) -> list[int]:
    """Return the sizes to try in increasing order: ``current``, and ``current * step**k`` rounded
    to multiples, within all bounds.

    Raises:
        ValueError: no size is within the bounds.
    """
    unit = math.lcm(multiple, world_size)
    low = max(current / factor, 1 if smallest is None else smallest)
    high = min(current * factor, math.inf if largest is None else largest)
    reach = math.ceil(math.log(factor) / math.log(step)) + 1
    sizes = {max(1, round(current * step**k / unit)) * unit for k in range(-reach, reach + 1)}
    sizes |= {current} if current % world_size == 0 else set()
    found = sorted(size for size in sizes if low <= size <= high)
    if not found:
        raise ValueError(
            f"no multiple of {unit} to try between {low:g} and {high:g}; pass a smaller multiple="
        )
    return found


def _scale_lr(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Scale every group's learning rate; a tensor in place, and once if groups share it."""
    scaled: list[Tensor] = []
    with torch.no_grad():
        for group in optimizer.param_groups:
            rate = group["lr"]
            if any(rate is tensor for tensor in scaled):
                continue
            group["lr"] *= scale
            if isinstance(rate, Tensor):
                scaled.append(rate)


def _run(train: Train, size: int, samples: int) -> tuple[float, int, float]:
    """Run one trial on this rank; return the sum of its losses, its steps and its seconds."""
    begun, total, steps = time.perf_counter(), 0.0, 0
    losses = train(size, samples)
    if not isinstance(losses, Iterable):
        raise TypeError(f"train must yield the loss of each step, got {type(losses).__name__}")
    try:
        for loss in losses:
            total += float(loss.detach() if isinstance(loss, Tensor) else loss)
            steps += 1
    finally:  # a generator's clean-up must run before the state is rolled back
        getattr(losses, "close", lambda: None)()
    return total, steps, time.perf_counter() - begun


def _merge(size: int, scale: float, everyone: Sequence[tuple[Any, ...]]) -> BatchSizeTrial:
    """Return a trial from every rank's sum of losses, steps and seconds."""
    criterion = 0.0
    for rank, (total, steps, _) in enumerate(everyone):
        if not steps:
            raise ValueError(f"train({size}, ...) yielded no loss on rank {rank}")
        criterion += total / steps
    criterion = criterion / len(everyone) if math.isfinite(criterion) else math.nan
    _, steps, seconds = map(max, zip(*everyone, strict=True))
    return BatchSizeTrial(size, criterion, scale, steps, seconds)


def _choose(trials: Sequence[BatchSizeTrial], margin: float) -> int:
    """Return the largest minibatch within the margin of the best criterion."""
    finite = [t for t in trials if math.isfinite(t.criterion)]
    if not finite:
        raise GradcompError(
            f"every trial had a loss of NaN or Inf, minibatches {[t.minibatch for t in trials]}:"
            " training diverges from here whatever the minibatch; everything was rolled back"
        )
    best = min(t.criterion for t in finite)
    return max(t.minibatch for t in finite if t.criterion <= best + margin * abs(best))
