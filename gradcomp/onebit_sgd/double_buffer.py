"""Double buffering: while the gradient of one half of a minibatch is exchanged, the other half
computes.

References:
    Seide et al. 2014, "1-bit stochastic gradient descent": each minibatch is cut in two, so that
    the model is half a minibatch stale.
"""

from __future__ import annotations

import logging
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.arguments import check_integer
from gradcomp.averager import GradientAverager
from gradcomp.codecs import Codec
from gradcomp.comm.base import Communicator
from gradcomp.engine.delayed import DelayedSeconds
from gradcomp.engine.options import Advanced, DelayedOptions, takes
from gradcomp.exchange.agree import gather
from gradcomp.exchange.stats import Stats
from gradcomp.onebit_sgd.halves import cut
from gradcomp.onebit_sgd.report import OverlapComparison, OverlapReport
from gradcomp.onebit_sgd.restore import GroupOptions, apply_options, read_options, rolled_back

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

logger = logging.getLogger("gradcomp")
ROUNDS = 2  # of each way in `compare`; the faster one counts: other programs only slow one down


class DoubleBuffer:
    """Trains a model on weights that lack only the update that is under way.

    Each minibatch is cut into two halves. After a half's backward its gradients are sent off, the
    averages of the half before are applied, and the next half computes on those weights meanwhile::

        with gradcomp.onebit_sgd.DoubleBuffer(model, optimizer, "onebit") as buffer:
            for inputs, targets in loader:
                loss = buffer.step(lambda x, y: cross_entropy(model(x), y), inputs, targets)
        print(buffer.report())

    A half's loss is weighted by its share of the minibatch, so the two updates of plain SGD sum to
    the minibatch's. An optimizer counts updates (for momentum, moments, weight decay) in halves;
    one that divides by the gradient's size (Adam, LAMB) makes two full steps a minibatch. An update
    uses the options, such as the learning rate, that the optimizer's groups had when its gradients
    were sent off.

    Before an evaluation (a forward of `model` while it is not ``training``), a `state_dict` and
    `close` the buffer drains: it waits for the last exchange and applies it. That is no collective,
    so one rank may evaluate alone. With one rank updates are late by a half as well.

    Args:
        model: a plain module, float32, bfloat16 or float16 parameters on the CPU, equal on all
            ranks.
        optimizer: of its parameters.
        codec: codec or name; "auto": as of `gradcomp.ddp.register`.
        comm: the ranks; torch.distributed's default group when None. Closed with the buffer.
        whole_steps: exchange whole minibatches: one update each, one minibatch late.
        bucket_cap_mb: as of `gradcomp.GradientAverager`.
        common, advanced: as of `gradcomp.ddp.register`.

    Raises:
        TypeError: a DDP model, or no module.
        ValueError: an option; an optimizer of other parameters.
        UnsupportedTensor: a parameter.
        PeerMismatch: the ranks' parameters differ, or `whole_steps` does.
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
            raise ValueError(f"whole_steps must be True or False, got {whole_steps!r}")  # noqa: TRY004
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
        self._sent: GroupOptions = []  # the groups' options of the exchange under way
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
        """Train on one minibatch. Collective: every rank calls it, or `skip`, as often.

        Args:
            loss_fn: called with each half of `batch` in turn; returns the mean loss of its samples,
                a tensor of one element.
            batch: tensors whose first dimension counts samples, None, and tuples, lists and
                dictionaries of these; of an odd number the first half has one more. With
                `whole_steps` anything, passed on as it is.

        Returns:
            The mean loss of the minibatch on this rank, detached; the halves were computed on
            weights an update apart.

        Raises:
            ValueError: fewer than 2 samples, tensors that disagree on their number, a loss of
                several elements.
            TypeError: a minibatch that cannot be cut, a `loss_fn` that is no function, or a loss
                that is no tensor.
            PeerMismatch, PeerLost, CorruptPayload, UnsupportedTensor: as
                `GradientAverager.average_delayed`.
        """
        self._check_open()
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function, got {type(loss_fn).__name__}")
        halves, shares = ([batch], [1.0]) if self._whole_steps else cut(batch)
        self._stepping = True
        try:
            losses = [self._half(loss_fn, *each) for each in zip(halves, shares, strict=True)]
        finally:
            self._stepping = False
        self._minibatches += 1
        return torch.stack(losses).sum()

    def skip(self) -> None:
        """Take part in one minibatch with zero gradients: for a rank that has run out of data.
        Collective, as `step`.

        The averages are still divided by all ranks. A rank must skip as many minibatches as the
        others have left; `most` tells how many the longest has.

        Raises:
            PeerMismatch, PeerLost, CorruptPayload: as `step`.
        """
        self._check_open()
        for _ in range(1 if self._whole_steps else 2):
            self._model.zero_grad()
            self._rotate()
        self._minibatches += 1

    def most(self, count: int) -> int:
        """Return the largest `count` of any rank, for instance of minibatches in an epoch; drains.
        Collective.

        Raises:
            ValueError: `count` is no integer of at least 0.
            PeerLost: a rank did not answer.
        """
        check_integer("count", count, 0, 2**63 - 1)
        self.drain()
        return int(max(self._gather("most", "<q", count))[0])

    def drain(self) -> bool:
        """Wait for the exchange under way and apply it; return whether there was one.

        No collective, and no tensor of inference mode is made inside one.

        Raises:
            PeerMismatch, PeerLost, CorruptPayload: as `step`.
        """
        with torch.inference_mode(False), torch.no_grad():
            handed = self._averager.flush()
            if handed:
                self._update(self._sent)
        return handed

    # ---- what it has cost, checkpoints, checks ---------------------------------------------------

    def report(self) -> OverlapReport:
        """Return the seconds of this rank's exchanges, updates and computing so far."""
        spent = asdict(self._averager.delayed or DelayedSeconds())
        update_s = self._update_s + spent.pop("copy_s")
        own: dict[str, Any] = {"minibatches": self._minibatches, "compute_s": self._compute_s}
        return OverlapReport(self._whole_steps, update_s=update_s, **own, **spent)

    def compare(
        self, loss_fn: Callable[..., Tensor], *batch: Any, steps: int = 5
    ) -> OverlapComparison:
        """Time about ``4 * steps`` minibatches like this one, with double buffering and without,
        and put everything back. Collective.

        It takes memory for one more copy of weights and state. `stats` counts its exchanges,
        `report` does not. Before `warmup_steps` exchanges are fp32.

        Args:
            loss_fn, batch: as of `step`.
            steps: minibatches timed in a row.

        Raises:
            ValueError: `steps` is no positive integer.
            PeerLost, ValueError, TypeError: as `step`; everything is put back.
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
                    seconds(way, 1)  # makes buffers
                rounds = [[seconds(way, steps) for way in ways] for _ in range(ROUNDS)]
        finally:
            self._minibatches, self._update_s, self._compute_s = own
            if self._averager._delayed is not None:
                self._averager._delayed.seconds = spent
        fastest = map(min, zip(*rounds, strict=True))
        everyone = self._gather("compare", "<dd", *fastest)
        return OverlapComparison(*map(max, zip(*everyone, strict=True)))

    @property
    def minibatches(self) -> int:
        """Minibatches trained on so far, skipped ones included."""
        return self._minibatches

    def describe(self) -> str:
        """Return one line: what is compressed, the exchange, the expected ratio, and what is
        double-buffered.
        """
        parts = "whole steps" if self._whole_steps else "halves"
        return f"{self._averager.describe()}; {parts} are double-buffered"

    @property
    def stats(self) -> Stats:
        """Bytes and seconds of the exchanges; a step of it is half a minibatch."""
        return self._averager.stats

    def state_dict(self) -> dict[str, Any]:
        """Drain, and return what this rank needs to resume bit for bit beside model and optimizer:
        save those after it.

        Raises:
            PeerMismatch, PeerLost, CorruptPayload: as `drain`, once; after that it is the state
                before what failed.
        """
        self.drain()
        return self._averager.state_dict()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on where `state_dict` of the same rank was taken; an exchange under way is waited for
        and dropped.

        With the states of all ranks of a run, also of another world size, as
        `GradientAverager.load_state_dict`.

        Raises:
            ValueError: a state of another format, rank, world size, codec or model, or of whole
                steps where these are halves; nothing is changed then.
        """
        self._averager.load_state_dict(state)

    def check_replicas(self) -> None:
        """Drain, and compare the parameters' bits over all ranks; PeerMismatch names the first
        that differs. Collective.
        """
        self.drain()
        self._averager.check_replicas()

    def close(self) -> None:
        """Drain, stop the threads and close the communicator. Closing twice is harmless.

        Raises:
            PeerMismatch, PeerLost, CorruptPayload: the last exchange failed; everything is closed
                nevertheless.
        """
        self._close(drains=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an exception without draining: other ranks may not answer any more."""
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
        """Compute one half's gradients, send them off, apply those of the half before; return
        its weighted loss.
        """
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
        handed = self._averager.average_delayed()
        before, self._sent = self._sent, sent
        if handed:
            self._update(before)

    def _update(self, options: GroupOptions) -> None:
        """Step the optimizer with the options of when the gradients were sent off."""
        begun = time.perf_counter()
        with apply_options(self._optimizer, options):
            self._optimizer.step()
        self._update_s += time.perf_counter() - begun

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("gradcomp: this buffer is closed")

    def _gather(self, called: str, layout: str, *mine: float) -> list[tuple[Any, ...]]:
        """Return the numbers that every rank gives in the call of this name."""
        comm, timeout_s = self._engine.comm, self._engine.timeout_s
        data = struct.pack(layout, *mine)
        found = gather(comm, data, called, timeout_s, called=f"{called}()")
        return [struct.unpack(layout, theirs) for theirs in found]


class _DrainBeforeEvaluation:
    """A forward pre-hook that drains if the model is evaluated outside of a step. That of a copied
    or saved model does nothing.
    """

    def __init__(self, buffer: DoubleBuffer | None = None) -> None:
        self._buffer = weakref.ref(buffer) if buffer is not None else lambda: None

    def __call__(self, module: nn.Module, args: Any) -> None:
        buffer = self._buffer()
        if not (buffer is None or module.training or buffer._stepping):
            buffer.drain()

    def __reduce__(self) -> tuple[type[_DrainBeforeEvaluation], tuple[()]]:
        return type(self), ()
