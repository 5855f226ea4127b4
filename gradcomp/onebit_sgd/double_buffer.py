"""Double buffering: compute the gradient of one half of a minibatch while that of the other half is
exchanged.

References:
    Seide et al. 2014, "1-bit stochastic gradient descent": each minibatch is cut in two, so that
    the weights are half a minibatch stale.
"""

from __future__ import annotations

import logging
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map

from gradcomp.arguments import check_integer
from gradcomp.averager import DelayedSeconds, GradientAverager
from gradcomp.codecs import Codec
from gradcomp.comm.base import Communicator
from gradcomp.engine.options import Advanced, DelayedOptions, takes
from gradcomp.exchange.agree import gather
from gradcomp.exchange.stats import Stats
from gradcomp.onebit_sgd.restore import GroupOptions, apply_options, read_options, rolled_back

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

logger = logging.getLogger("gradcomp")
ROUNDS = 2  # per variant in `compare`; the fastest counts, since other programs only add time


@dataclass(frozen=True)
class OverlapReport:
    """Seconds of one rank's training with a `DoubleBuffer`, summed since its creation. They do not
    show the time that double buffering saves; `DoubleBuffer.compare` measures it.

    Attributes:
        whole_steps: whether whole minibatches are exchanged instead of halves.
        minibatches, exchanges: number of minibatches, and of finished exchanges.
        exchange_s: seconds from an exchange's first bucket to its last.
        waited_s: the part of `exchange_s` in which this rank was blocked.
        codec_s: the part of `exchange_s` in which codecs encoded and decoded.
        update_s: seconds in ``optimizer.step()`` and in copying gradients to and from buckets.
        compute_s: seconds in forward and backward passes.
    """

    whole_steps: bool
    minibatches: int
    exchanges: int
    exchange_s: float
    waited_s: float
    codec_s: float
    update_s: float
    compute_s: float

    @property
    def hidden(self) -> float:
        """The share of `exchange_s` overlapped with computation, 0 to 1; 0 without exchanges."""
        return max(0.0, 1.0 - self.waited_s / self.exchange_s) if self.exchange_s > 0 else 0.0

    def __str__(self) -> str:
        """Return one sentence."""
        if not self.exchange_s:
            return "nothing was exchanged"
        seconds = self.exchange_s
        duration = f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
        return (
            f"hidden {100 * self.hidden:.0f} % of {duration} in {self.exchanges} exchanges;"
            " compare() measures whether that pays"
        )


@dataclass(frozen=True)
class OverlapComparison:
    """Seconds per minibatch on the slowest rank; every rank has the same values.

    Attributes:
        plain_s: seconds without double buffering: forward, backward, exchange and update of the
            whole minibatch, one after the other.
        overlapped_s: seconds with double buffering, the last exchange included.
    """

    plain_s: float
    overlapped_s: float

    @property
    def pays(self) -> bool:
        """Whether a minibatch is faster with double buffering."""
        return self.overlapped_s < self.plain_s

    def __str__(self) -> str:
        """Return one sentence."""
        return (
            f"double buffering {'pays' if self.pays else 'does not pay'} here:"
            f" {1e3 * self.overlapped_s:.1f} ms a minibatch with it, {1e3 * self.plain_s:.1f} ms"
            " without"
        )


class DoubleBuffer:
    """Double-buffered training: one half of a minibatch is exchanged while the next is computed.

    After the backward pass of a half, its exchange starts and the averages of the half before are
    applied. The next half is then computed on weights that lack only the update in progress::

        with gradcomp.onebit_sgd.DoubleBuffer(model, optimizer, "onebit") as buffer:
            for inputs, targets in loader:
                loss = buffer.step(lambda x, y: cross_entropy(model(x), y), inputs, targets)
        print(buffer.report())

    A half's loss is weighted by its share of the minibatch, so the two updates of plain SGD sum to
    the minibatch's. For the optimizer (momentum, moments, weight decay) each half is a step. An
    optimizer that normalizes the gradient (Adam, LAMB) makes two full steps per minibatch. An
    update uses the options, such as the learning rate, that the optimizer's groups had when the
    exchange of its gradients started.

    The buffer drains (waits for the last exchange and applies it) before `state_dict`, `close` and
    an evaluation, which is a forward pass of `model` in eval mode. Draining is not collective, so
    one rank may evaluate alone. Updates are half a minibatch late with one rank, too.

    Args:
        model: plain module with float32, bfloat16 or float16 parameters on the CPU, equal on all
            ranks.
        optimizer: the optimizer of its parameters.
        codec: codec or name; for "auto" see `gradcomp.ddp.register`.
        comm: communicator; torch.distributed's default group when None. Closed with the buffer.
        whole_steps: exchange whole minibatches: one update each, one minibatch late.
        bucket_cap_mb: see `gradcomp.GradientAverager`.
        common, advanced: see `gradcomp.ddp.register`.

    Raises:
        TypeError: `model` is wrapped in DDP, or is not a module.
        ValueError: an option out of its range; an optimizer of other parameters.
        UnsupportedTensor: a parameter with an unsupported dtype, device or layout.
        PeerMismatch: parameters or `whole_steps` differ between ranks.
        PeerLost: a rank did not answer.
    """

    @takes(
        DelayedOptions,
        others="the loss scale may change before an average is applied; use bfloat16",
    )
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        codec: Codec | str,
        *,
        comm: Communicator | None = None,
        whole_steps: bool = False,
        bucket_cap_mb: float = 25.0,
        advanced: Advanced | None = None,
        **common: Unpack[DelayedOptions],
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if isinstance(model, DistributedDataParallel):
            raise TypeError(
                "DoubleBuffer averages gradients itself: pass the module inside DDP, model.module"
            )
        if not isinstance(whole_steps, bool):
            text = f"whole_steps must be True or False, got {whole_steps!r}"
            raise ValueError(text)  # noqa: TRY004
        self._model, self._optimizer, self._whole_steps = model, optimizer, whole_steps
        self._averager = GradientAverager(
            model,
            codec,
            optimizer=optimizer,
            comm=comm,
            bucket_cap_mb=bucket_cap_mb,
            advanced=advanced,
            **common,
        )
        self._engine = self._averager._engine
        self._engine.origin = {"kind": type(self).__name__, "whole_steps": whole_steps}
        self._engine.replicas.more = lambda: [("whole_steps", whole_steps)]
        self._stepping = self._closed = False
        self._sent: GroupOptions = []  # the groups' options for the exchange in progress
        self._minibatches = 0
        self._update_s = self._compute_s = 0.0
        try:
            self._averager.check_replicas()
        except BaseException:
            self._averager.close()
            raise
        if self._engine.comm.rank == 0:
            logger.info(self.describe())
        self._hook = model.register_forward_pre_hook(_DrainBeforeEvaluation(self))

    # ---- training --------------------------------------------------------------------------------

    def step(self, loss_fn: Callable[..., Tensor], *batch: Any) -> Tensor:
        """Train on one minibatch. Collective: every rank calls it or `skip` the same number of
        times.

        Args:
            loss_fn: called with each half of `batch` in turn; returns the mean loss of its samples,
                a tensor of one element.
            batch: tensors whose first dimension is the samples, None, and tuples, lists and
                dictionaries of these. The first half of an odd number has one sample more. With
                `whole_steps` any values, passed to `loss_fn` unchanged.

        Returns:
            The mean loss of the minibatch on this rank, a detached scalar. The halves are computed
            on weights that are one update apart.

        Raises:
            ValueError: fewer than 2 samples; tensors with different numbers of samples; a loss with
                several elements.
            TypeError: a minibatch that cannot be cut; `loss_fn` is not callable, or its result is
                not a tensor.
            RuntimeError: the buffer is closed.
            PeerMismatch, PeerLost, CorruptPayload, UnsupportedTensor: see
                `GradientAverager.average_delayed`.
        """
        self._check_open()
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function, got {type(loss_fn).__name__}")
        halves, shares = ([batch], [1.0]) if self._whole_steps else _cut(batch)
        self._stepping = True
        try:
            losses = [self._half(loss_fn, *each) for each in zip(halves, shares, strict=True)]
        finally:
            self._stepping = False
        self._minibatches += 1
        return torch.stack(losses).sum()

    def skip(self) -> None:
        """Contribute zero gradients to one minibatch, on a rank that has run out of data.
        Collective, like `step`.

        Averages are still divided by the number of all ranks. A rank must skip as many minibatches
        as the other ranks have left; `most` returns the largest number of any rank.

        Raises:
            PeerMismatch, PeerLost, CorruptPayload, RuntimeError: as for `step`.
        """
        self._check_open()
        for _ in range(1 if self._whole_steps else 2):
            self._model.zero_grad()
            self._rotate()
        self._minibatches += 1

    def most(self, count: int) -> int:
        """Drain, and return the largest `count` of any rank, for instance of minibatches in an
        epoch. Collective.

        Raises:
            ValueError: `count` is not an integer of at least 0.
            PeerLost: a rank did not answer.
        """
        check_integer("count", count, 0, 2**63 - 1)
        self.drain()
        return int(max(self._gather("most", "<q", count))[0])

    def drain(self) -> bool:
        """Wait for the exchange in progress and apply it; return whether there was one.

        Not collective. It leaves inference mode while it updates the weights, so that it creates no
        inference tensors.

        Raises:
            PeerMismatch, PeerLost, CorruptPayload: as for `step`.
        """
        with torch.inference_mode(False), torch.no_grad():
            has_averages = self._averager.flush()
            before, self._sent = self._sent, []
            if has_averages:
                self._update(before)
        return has_averages

    # ---- measurements, checkpoints, checks -------------------------------------------------------

    def report(self) -> OverlapReport:
        """Return the seconds of this rank's exchanges, updates and forward and backward passes."""
        spent = asdict(self._averager.delayed or DelayedSeconds())
        update_s = self._update_s + spent.pop("copy_s")
        own: dict[str, Any] = {"minibatches": self._minibatches, "compute_s": self._compute_s}
        return OverlapReport(self._whole_steps, update_s=update_s, **own, **spent)

    def compare(
        self, loss_fn: Callable[..., Tensor], *batch: Any, steps: int = 5
    ) -> OverlapComparison:
        """Time about ``4 * steps`` minibatches like this one, with and without double buffering,
        then roll back. Collective.

        It needs memory for one more copy of weights and state. `stats` counts its exchanges,
        `report` does not. Exchanges are fp32 until `warmup_steps` are over.

        Args:
            loss_fn, batch: as for `step`.
            steps: number of minibatches that are timed in a row.

        Returns:
            The seconds per minibatch on the slowest rank, the same on every rank.

        Raises:
            ValueError: `steps` is not a positive integer.
            PeerLost, ValueError, TypeError: as for `step`; everything is rolled back.
        """
        check_integer("steps", steps, 1)
        self._check_open()

        def plain() -> None:
            self._model.zero_grad()
            loss_fn(*batch).backward()  # type: ignore[no-untyped-call]
            self._averager.average()
            self._optimizer.step()

        def overlapped() -> None:
            self.step(loss_fn, *batch)

        def seconds(way: Callable[[], None], count: int) -> float:
            begun = time.perf_counter()
            for _ in range(count):
                way()
            self.drain()
            return (time.perf_counter() - begun) / count

        own = self._minibatches, self._update_s, self._compute_s
        spent = replace(self._averager.delayed or DelayedSeconds())
        ways = plain, overlapped
        try:
            with rolled_back(self._model, self._optimizer, [self]):
                for way in ways:
                    seconds(way, 1)  # warm-up: creates buffers
                rounds = [[seconds(way, steps) for way in ways] for _ in range(ROUNDS)]
        finally:
            self._minibatches, self._update_s, self._compute_s = own
            if self._averager.delayed is not None:
                self._averager.delayed = spent
        fastest = map(min, zip(*rounds, strict=True))
        everyone = self._gather("compare", "<dd", *fastest)
        return OverlapComparison(*map(max, zip(*everyone, strict=True)))

    @property
    def minibatches(self) -> int:
        """Minibatches trained on so far, skipped ones included."""
        return self._minibatches

    def describe(self) -> str:
        """Return one line: codec, exchange, expected ratio, and whether halves or whole steps are
        double-buffered.
        """
        parts = "whole steps" if self._whole_steps else "halves"
        return f"{self._averager.describe()}; {parts} are double-buffered"

    @property
    def stats(self) -> Stats:
        """Bytes and seconds of the exchanges; one of its steps is one exchange."""
        return self._averager.stats

    def state_dict(self) -> dict[str, Any]:
        """Drain, and return this rank's state dict, to resume bit for bit. Save model and optimizer
        after this call.

        Raises:
            PeerMismatch, PeerLost, CorruptPayload: as for `drain`, once; later calls return the
                state before the exchange that failed.
        """
        self.drain()
        return self._averager.state_dict()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Load a state dict of the same rank; an exchange in progress is waited for and dropped.

        The states of all ranks of a run, even of another world size, can be loaded, too; see
        `GradientAverager.load_state_dict`.

        Raises:
            ValueError: a state of another format, rank, world size, codec or model, or with another
                `whole_steps`; nothing is changed then.
        """
        self._averager.load_state_dict(state)

    def check_replicas(self) -> None:
        """Drain, and compare the parameters' bits over all ranks. Collective.

        Raises:
            PeerMismatch: on every rank; names the first parameter that differs.
        """
        self.drain()
        self._averager.check_replicas()

    def close(self) -> None:
        """Drain, stop the threads and close the communicator. Closing twice is harmless.

        Raises:
            PeerMismatch, PeerLost, CorruptPayload: the last exchange failed; everything is closed
                all the same.
        """
        self._close(drains=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an exception do not drain, since other ranks may no longer answer."""
        self._close(drains=kind is None)

    # ---- parts -----------------------------------------------------------------------------------

    def _close(self, *, drains: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if drains:
                self.drain()
        finally:
            self._hook.remove()
            self._averager.close()

    def _half(self, loss_fn: Callable[..., Tensor], half: tuple[Any, ...], share: float) -> Tensor:
        """Start a half's exchange, and apply the averages before it; return its weighted loss."""
        self._model.zero_grad()
        begun = time.perf_counter()
        loss = loss_fn(*half)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_fn must return a tensor, got {type(loss).__name__}")
        if loss.numel() != 1:
            raise ValueError(
                f"loss_fn must return the mean over its samples, got shape {tuple(loss.shape)}"
            )
        weighted = loss.reshape(()) * share
        weighted.backward()  # type: ignore[no-untyped-call]
        self._compute_s += time.perf_counter() - begun
        self._rotate()
        return weighted.detach()

    def _rotate(self) -> None:
        sent = read_options(self._optimizer)
        has_averages = self._averager.average_delayed()
        before, self._sent = self._sent, sent
        if has_averages:
            self._update(before)

    def _update(self, options: GroupOptions) -> None:
        """Step the optimizer with the options from the start of the gradients' exchange."""
        begun = time.perf_counter()
        with apply_options(self._optimizer, options, self._sent):
            self._optimizer.step()
        self._update_s += time.perf_counter() - begun

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("gradcomp: this buffer is closed")

    def _gather(self, called: str, layout: str, *mine: float) -> list[tuple[Any, ...]]:
        """Return every rank's numbers, packed by `layout`, in a call of the method `called`."""
        comm, timeout_s = self._engine.comm, self._engine.timeout_s
        data = struct.pack(layout, *mine)
        found = gather(comm, data, called, timeout_s, called=f"{called}()")
        return [struct.unpack(layout, theirs) for theirs in found]


def _cut(batch: tuple[Any, ...]) -> tuple[list[tuple[Any, ...]], list[float]]:
    """Return the two halves of a minibatch, as views, and each half's share of the samples. The
    first half of an odd number has one sample more.

    Raises:
        ValueError, TypeError: see `DoubleBuffer.step`.
    """
    leaves = [leaf for leaf in tree_flatten(batch)[0] if leaf is not None]
    if foreign := [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]:
        raise TypeError(
            f"a minibatch holds tensors, in tuples, lists and dictionaries, got {foreign[0]}"
        )
    if not leaves:
        raise ValueError("the minibatch holds no tensor: call step(loss_fn, *batch)")
    if not all(leaf.dim() for leaf in leaves):
        raise ValueError("a tensor of the minibatch has no dimension for samples: its shape is ()")
    samples, *others = sorted({leaf.shape[0] for leaf in leaves})
    if others:
        raise ValueError(
            "all tensors of a minibatch must have the same number of samples, got"
            f" {[samples, *others]}"
        )
    if samples < 2:
        raise ValueError(f"a minibatch of {samples} samples cannot be cut into two halves")
    first = (samples + 1) // 2
    halves = [
        tree_map(lambda leaf, part=part: leaf if leaf is None else leaf[part], batch)
        for part in (slice(first), slice(first, None))
    ]
    return halves, [first / samples, (samples - first) / samples]


class _DrainBeforeEvaluation:
    """Hook that drains before an evaluation; in a copied or saved model it does nothing."""

    def __init__(self, buffer: DoubleBuffer | None = None) -> None:
        self._buffer = weakref.ref(buffer) if buffer is not None else lambda: None

    def __call__(self, module: nn.Module, args: Any) -> None:
        buffer = self._buffer()
        if not (buffer is None or module.training or buffer._stepping):
            buffer.drain()

    def __reduce__(self) -> tuple[type[_DrainBeforeEvaluation], tuple[()]]:
        return type(self), ()
