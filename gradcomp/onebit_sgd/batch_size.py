"""Find the largest minibatch that does not hurt training, by trying several on the data that comes
next.

References:
    Seide et al. 2014, "1-bit stochastic gradient descent": every 24 h of data, several sizes are
    tried on the next 45 minutes, and the largest is kept that does not lose training-set frame
    accuracy. Steps of sqrt(2), multiples of 64, at most a factor of 2 from the last choice and the
    margin of 1 % are CNTK's.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from gradcomp.comm.base import Channel, Communicator
from gradcomp.engine.agree import agree_on_words
from gradcomp.errors import GradcompError
from gradcomp.exchange.agree import gather
from gradcomp.onebit_sgd.choice import BatchSizeChoice, BatchSizeTrial
from gradcomp.onebit_sgd.progress import Progress
from gradcomp.onebit_sgd.rollback import Checkpoint

_RESULT = struct.Struct("<dqd")  # sum of losses, steps, seconds


def find_batch_size(
    train: Callable[[int, int], Iterable[float | Tensor]],
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
    """Try minibatch sizes around `current`, each from where training stands, and return the largest
    that trains as well.

    Every trial trains on the same `samples` samples and is rolled back afterwards, bit for bit:
    parameters, buffers, optimizer, `state`, random numbers. Its criterion is the mean of all losses
    that `train` yielded, each step's weighing the same, first within a rank, then over the ranks in
    rank order, in float64. Chosen is the largest minibatch whose criterion is at most the best
    one's plus `margin` times its size; one with NaN or Inf, on any rank, is out. Collective: every
    rank calls it with the same arguments and gets the same choice::

        def train(minibatch, samples):
            for inputs, targets in batches(samples, minibatch // world_size):
                yield buffer.step(loss_fn, inputs, targets)

        choice = find_batch_size(train, model=model, optimizer=optimizer, state=buffer,
        samples=50_000, current=256)

    Args:
        train: called with a minibatch (of all ranks together) and `samples`; trains on that share
            of the data, from its start in every call, and yields each step's training loss.
        model: what `train` trains, in DDP or not.
        optimizer: of its parameters, torch's or split.
        samples: of all ranks together, in each trial: at least 2 of the largest minibatch.
        current: the minibatch now, of all ranks together.
        state: what else is to be rolled back, one object or a sequence, with ``state_dict()`` and
            ``load_state_dict``: `CompressionState`, `GradientAverager`, `DoubleBuffer`, a scaler, a
            scheduler that `train` steps.
        comm: the ranks; torch.distributed's default group when None, or one rank where it is not
            initialised. No exchange may be under way on it outside `train`. Left open.
        smallest, largest: bounds of the sizes tried; None: those of `factor`.
        multiple: sizes but `current` are multiples of it, and of the number of ranks.
        step: between one size and the next.
        factor: the largest change from `current`, either way.
        margin: what a criterion may be worse than the best, relative to it.
        per_sample_lr: keep the learning rate per sample, for losses that are means: every group's
            ``lr`` is multiplied by minibatch / `current` in a trial, and in the end for the choice.
            False: leave learning rates alone.
        progress: show a bar, and the table at the end, on stderr of rank 0 (needs rich; quiet
            without).
        timeout_s: seconds after which a silent peer is given up.

    Returns:
        What was chosen, and every trial. Nothing has changed but the learning rates, counters of
        bytes and seconds, and gradients, which are None.

    Raises:
        ValueError: an argument out of its range; `samples` too few; no size within the bounds; a
            `train` that yields nothing on some rank. On every rank.
        PeerMismatch: ranks called with different arguments, on every rank.
        GradcompError: every trial had NaN or Inf, on every rank.
        PeerLost: a rank did not answer, for instance because its `train` raised.
        Exception: what `train` raises, after rolling back.
    """
    own = comm if comm is not None else _default()
    numbers: dict[str, object] = {
        "samples": samples,
        "current": current,
        "smallest": smallest,
        "largest": largest,
        "multiple": multiple,
    }
    numbers |= {"step": step, "factor": factor, "margin": margin, "per_sample_lr": per_sample_lr}
    agree_on_words(
        own, numbers, timeout_s, "batch_size", called="find_batch_size", channel=Channel.CONTROL
    )
    _check(samples, current, smallest, largest, multiple, step, factor, margin)
    sizes = candidates(current, own.world_size, smallest, largest, multiple, step, factor)
    if samples < 2 * sizes[-1]:
        raise ValueError(
            f"samples={samples} are too few: 2 steps of the largest minibatch to be tried,"
            f" {sizes[-1]}, take {2 * sizes[-1]}"
        )
    others: Sequence[Any] = (
        state if isinstance(state, (list, tuple)) else [] if state is None else [state]
    )
    checkpoint = Checkpoint(model, optimizer, others)
    trials = []
    with Progress(sizes, samples, shown=progress and own.rank == 0) as bar:
        for size in sizes:
            scale = size / current if per_sample_lr else 1.0
            _scale_lr(optimizer, scale)
            begun = time.perf_counter()
            try:
                total, steps = _run(train, size, samples, bar)
            except BaseException:
                with suppress(
                    GradcompError
                ):  # what ended the trial may have ended an exchange: that is told already
                    checkpoint.restore()
                raise
            checkpoint.restore()
            trials.append(
                _merge(own, size, scale, (total, steps, time.perf_counter() - begun), timeout_s)
            )
        choice = BatchSizeChoice(_choose(trials, margin), tuple(trials), margin)
        bar.table(choice)
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
    """Return the sizes to try in rising order: ``current``, and ``current * step**k`` rounded to
    multiples, within all bounds.

    Raises:
        ValueError: there is none.
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


def _check(
    samples: int,
    current: int,
    smallest: int | None,
    largest: int | None,
    multiple: int,
    step: float,
    factor: float,
    margin: float,
) -> None:
    """Raise ValueError for an argument out of its range."""
    optional = {"smallest": smallest, "largest": largest}
    whole = {"samples": samples, "current": current, "multiple": multiple}
    whole |= {k: v for k, v in optional.items() if v is not None}
    for name, value in whole.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    for name, number, least, most in (
        ("step", step, 1.0, 1e3),
        ("factor", factor, 1.0, 1e3),
        ("margin", margin, 0.0, 1e3),
    ):
        right = (
            isinstance(number, (int, float))
            and not isinstance(number, bool)
            and least <= number <= most
        )
        if not right or (name == "step" and number < 1.01):
            least = 1.01 if name == "step" else least
            raise ValueError(f"{name} must be a number from {least:g} to {most:g}, got {number!r}")


def _default() -> Communicator:
    """Return the default group's communicator, or a rank of its own."""
    from gradcomp.comm.torchdist import default_communicator, is_initialized

    if is_initialized():
        return default_communicator()
    from gradcomp.comm.local import LocalCommunicator

    return LocalCommunicator.group(1)[0]


def _scale_lr(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Multiply every group's learning rate, tensors in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            with torch.no_grad():
                group["lr"].mul_(scale)
        else:
            group["lr"] = group["lr"] * scale


def _run(
    train: Callable[[int, int], Iterable[float | Tensor]], size: int, samples: int, bar: Progress
) -> tuple[float, int]:
    """Run one trial; return the sum of its losses and its steps."""
    total, steps, losses = 0.0, 0, train(size, samples)
    if not isinstance(losses, Iterable):
        raise TypeError(f"train must yield the loss of each step, got {type(losses).__name__}")
    try:
        for loss in losses:
            total += float(loss.detach() if isinstance(loss, Tensor) else loss)
            steps += 1
            bar.show(size, steps * size)
    finally:
        close = getattr(losses, "close", None)
        if close is not None:
            close()  # a generator's own clean-up belongs before the roll-back
    return total, steps


def _merge(
    comm: Communicator, size: int, scale: float, mine: tuple[float, int, float], timeout_s: float
) -> BatchSizeTrial:
    """Return what all ranks saw in a trial: the same on each."""
    found = gather(comm, _RESULT.pack(*mine), "batch_size", timeout_s, called="find_batch_size")
    everyone = [_RESULT.unpack(data) for data in found]
    for rank, (_, steps, _) in enumerate(everyone):
        if not steps:
            raise ValueError(f"train({size}, ...) yielded no loss on rank {rank}")
    criterion = 0.0
    for total, steps, _ in everyone:
        criterion += total / steps
    criterion /= comm.world_size
    steps, seconds = max(e[1] for e in everyone), max(e[2] for e in everyone)
    return BatchSizeTrial(
        size, criterion if math.isfinite(criterion) else math.nan, scale, steps, seconds
    )


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
