"""`GradientAverager`: average the gradients of a model without DistributedDataParallel.

References:
    Seide et al. 2014, "1-bit stochastic gradient descent" (double buffering, `average_delayed`).
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradcomp.codecs import Codec
from gradcomp.comm.base import Communicator
from gradcomp.engine.buckets import Bucket, Gradient, check_gradient, check_layers, fuse, poison
from gradcomp.engine.controls import Controls
from gradcomp.engine.optimizers import check_optimizers, listed
from gradcomp.engine.options import Advanced, CommonOptions, takes
from gradcomp.engine.state import Accepted
from gradcomp.engine.step import Engine, Step
from gradcomp.engine.watch import Newcomers
from gradcomp.errors import GradcompError

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("gradcomp")


@dataclass
class DelayedSeconds:
    """Time spent in delayed exchanges so far, in seconds.

    Attributes:
        exchanges: number of finished exchanges.
        exchange_s: time from the start of the first bucket to the end of the last.
        waited_s: time that callers were blocked.
        codec_s: time spent in codecs.
        copy_s: time to copy gradients to buckets and averages back.
    """

    exchanges: int = 0
    exchange_s: float = 0.0
    waited_s: float = 0.0
    codec_s: float = 0.0
    copy_s: float = 0.0


class GradientAverager(Controls):
    """Averages the gradients of a model that is not wrapped in DDP, over any communicator.

    Gradients are copied to buckets, whose exchanges overlap. Use it after ``loss.backward()`` and
    before ``optimizer.step()``::

        averager = gradcomp.GradientAverager(model, "auto", optimizer=optimizer)
        ...
        loss.backward()
        averager.average()
        optimizer.step()

    Args:
        named_parameters: a model, or (name, parameter) pairs from its ``named_parameters()``, the
            same on every rank. The first exchange compares the bits of trained parameters. The
            local shard of a DTensor is averaged: then `comm` must have the ranks with the same
            shards.
        codec: codec or name; for "auto" see `gradcomp.ddp.register`.
        optimizer: the optimizer of these parameters, or a list of several. "auto" chooses by its
            kind, a codec that is known to lose with it causes a warning, and `Advanced.scale_lr`
            changes its rate.
        comm: communicator; torch.distributed's default group when None. Closed with the averager.
        bucket_cap_mb: size in MiB at which a bucket is closed, as in DDP.
        common, advanced: see `gradcomp.ddp.register`.

    Attributes:
        delayed: seconds of the exchanges of `average_delayed`; None before its first call.

    Raises:
        ValueError, UnsupportedTensor: see `gradcomp.ddp.register`.
        TypeError: `optimizer` is a class, a name or another object without ``param_groups``.
    """

    @takes(CommonOptions)
    def __init__(
        self,
        named_parameters: nn.Module | Iterable[tuple[str, nn.Parameter]],
        codec: Codec | str,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        comm: Communicator | None = None,
        bucket_cap_mb: float = 25.0,
        advanced: Advanced | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        from gradcomp.plan.advice import resolve_auto

        if not 0 < bucket_cap_mb < float("inf"):
            raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}")
        self._named = _pairs(named_parameters)
        if isinstance(named_parameters, nn.Module):
            check_layers(named_parameters)
        self._newcomers = (
            Newcomers(named_parameters) if isinstance(named_parameters, nn.Module) else None
        )
        self._sources = [Gradient(name, p) for name, p in self._named]
        optimizers = listed(optimizer)
        codec, options, chosen, guarded, faster = resolve_auto(
            codec, common, advanced, optimizers, self._sources, self._expected_ranks(comm)
        )
        check_optimizers(optimizers, [p for _, p in self._named])
        self._scaled = options.grad_scaler is not None
        own_comm = comm if comm is not None else torch_communicator(options.timeout_s)
        self._given = own_comm
        try:
            self._engine = Engine(
                self._sources, codec, own_comm, options, chosen, guarded=guarded, faster=faster
            )
            self._engine.scale_lr_of(optimizers)
        except BaseException:
            if "_engine" in vars(self):
                self._engine.close(keep_comm=True)
            if comm is None:
                own_comm.close()
            raise
        self._warn_if_alone()
        self._advise(chosen, optimizers)
        self._watch_steps(p for _, p in self._named)
        self._bucket_cap_mb = bucket_cap_mb
        self._buckets = fuse(self._sources, bucket_cap_mb)
        self.delayed: DelayedSeconds | None = None
        # the step of `average_delayed` whose averages were not returned yet, buckets for the next
        # one, and the engine's codec seconds when the step began
        self._pending: Step | None = None
        self._spare: list[Bucket] = []
        self._codec_s = 0.0
        # whether parameters were compared over the ranks
        self._compared = self._engine.comm.world_size == 1

    def average(self) -> None:
        """Replace every ``p.grad`` by its average over all ranks; a missing gradient counts as
        zero.

        Raises:
            PeerMismatch, PeerLost, CorruptPayload: on every rank, and again in every later call.
            UnsupportedTensor: a sparse gradient, or one of another dtype than its parameter's; the
                other ranks get PeerLost. Raised again in every later call until `reset`.
            GradcompError: an exchange of `average_delayed` is in progress; nothing is changed then.
            After any other error every ``p.grad`` is NaN.
        """
        self._refuse_pending("average()")
        self._end(self._begin())

    def _begin(self) -> Step:
        """Start to average every ``p.grad``; return the step."""
        with self._poisoned_on_failure():
            self._prepare()
            step = self._engine.begin()
            for bucket in self._buckets:
                bucket.load()
                step.submit(bucket.flat, bucket.members)
            return step

    def _end(self, step: Step) -> None:
        """Wait for the averages and put them into ``p.grad``."""
        with self._poisoned_on_failure():
            step.finish()
        for bucket in self._buckets:
            bucket.store()

    def __getattr__(self, name: str) -> Any:
        more = ": it is called average_delayed()" if name == "rotate" else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{more}")

    def average_delayed(self) -> bool:
        """Start to average every ``p.grad``, and replace it by the average of the previous call.

        The exchange continues while the next gradients are computed (double buffering). The first
        call allocates a second set of buckets. A missing gradient counts as zero. Collective like
        `average`: all ranks must call it equally often.

        Returns:
            Whether ``p.grad`` has averages now. If not, as in the first call and after `flush`,
            every ``p.grad`` is None.

        Raises:
            PeerMismatch, PeerLost, CorruptPayload: this or an earlier exchange failed; raised again
                in every later call.
            UnsupportedTensor: see `average`.
            GradcompError: a `grad_scaler` was given: its loss scale may change before the averages
                are returned. Nothing is changed then.
            After any other error every ``p.grad`` is NaN.
        """
        if self._scaled:
            raise GradcompError(
                "average_delayed() hands back gradients of an earlier loss scale: make the averager"
                " without one"
            )
        with self._poisoned_on_failure():
            self._prepare()
            if self.delayed is None:
                self._spare = fuse(self._sources, self._bucket_cap_mb)
                self.delayed = DelayedSeconds()
            has_averages = self._finish_pending()
            step = self._engine.begin()
            begun = time.perf_counter()
            for bucket in self._spare:
                bucket.load()
            for bucket in self._buckets:
                if has_averages:
                    bucket.store()
                else:  # leave no local gradients for an optimizer step
                    bucket.clear()
            self._buckets, self._spare = self._spare, self._buckets
            self.delayed.copy_s += time.perf_counter() - begun
            self._pending, self._codec_s = step, self._engine.stats.codec_seconds
            for bucket in self._buckets:
                step.submit(bucket.flat, bucket.members)
            step.seal()
            return has_averages

    def flush(self) -> bool:
        """Wait for an exchange of `average_delayed` and put the averages into ``p.grad``; return
        whether there was one.

        Not collective: the exchange has already started, so a rank may call it alone.

        Raises:
            PeerMismatch, PeerLost, CorruptPayload: see `average_delayed`.
        """
        with self._poisoned_on_failure():
            has_averages = self._finish_pending()
            if has_averages and self.delayed is not None:
                begun = time.perf_counter()
                for bucket in self._buckets:
                    bucket.store()
                self.delayed.copy_s += time.perf_counter() - begun
            return has_averages

    def _finish_pending(self) -> bool:
        """Wait for an exchange of `average_delayed`; return whether there was one."""
        step, seconds, begun = self._pending, self.delayed, time.perf_counter()
        if step is None or seconds is None:
            return False
        try:
            step.finish()
        except Exception:
            self._pending = None
            raise
        self._pending = None
        seconds.exchanges += 1
        if self._engine.comm.world_size > 1:
            seconds.waited_s += time.perf_counter() - begun
            seconds.exchange_s += step.ended - step.started
            # codec_seconds may be smaller than before if the statistics were reset
            seconds.codec_s += max(0.0, self._engine.stats.codec_seconds - self._codec_s)
        return True

    def state_dict(self) -> dict[str, Any]:
        """See `Controls.state_dict`; raises GradcompError while an exchange of `average_delayed` is
        in progress.
        """
        self._refuse_pending("state_dict()")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """See `Controls.load_state_dict`; averages of `average_delayed` are dropped."""
        self._take(self._engine.accept(state))

    def _take(self, accepted: Accepted) -> None:
        """Load a state that the engine has accepted."""
        step, self._pending = self._pending, None
        if step is not None and self._engine.error is None:
            step.finish()
        self._engine.take(accepted)

    def reset(self) -> None:
        """See `Controls.reset`; averages of `average_delayed` are dropped."""
        self._pending, self._spare, self.delayed = None, [], None
        super().reset()

    def discard_step(self) -> None:
        """See `Controls.discard_step`; raises GradcompError while an exchange of `average_delayed`
        is in progress.
        """
        self._refuse_pending("discard_step()")
        super().discard_step()

    def _refuse_pending(self, what: str) -> None:
        if self._pending is not None:
            raise GradcompError(
                f"{what} while an exchange that average_delayed() began is under way: call flush()"
                " first"
            )

    def _expected_ranks(self, comm: Communicator | None) -> int:
        """Return the number of ranks for which "auto" chooses a codec."""
        from gradcomp.comm.torchdist import group_size

        return comm.world_size if comm is not None else group_size()

    def _warn_if_alone(self) -> None:
        """Warn if the communicator has one rank but torch.distributed has several: usually the
        wrong communicator was given.
        """
        if self._engine.comm.world_size > 1:
            return
        from gradcomp.comm.torchdist import TorchCommunicator, group_size

        if group_size() > 1 and not isinstance(self._given, TorchCommunicator):
            warnings.warn(
                f"{type(self._given).__name__} has 1 rank, torch.distributed has {group_size()}:"
                " gradients are not averaged across ranks",
                stacklevel=4,  # the caller of the decorated __init__
            )

    def _advise(self, chosen: str, optimizers: Sequence[Any]) -> None:
        """On rank 0, log what "auto" has chosen, and warn of a codec that is known to lose with the
        optimizers.
        """
        if self._engine.comm.rank != 0:
            return
        from gradcomp.plan.advice import warning_of

        if chosen:
            logger.info(self.describe())
        lossy = warning_of(
            self._engine.codec, self._engine.options, optimizers, self._engine.comm.world_size
        )
        if lossy is not None and self._engine.comm.world_size > 1:
            logger.warning(lossy)

    @contextlib.contextmanager
    def _poisoned_on_failure(self) -> Iterator[None]:
        """If the block raises, fill all gradients with NaN, so that no optimizer can use them."""
        try:
            yield
        except BaseException:
            poison(p for _, p in self._named if p.requires_grad)
            raise

    def _prepare(self) -> None:
        """Check all gradients; in the first call compare the bits of trained parameters over the
        ranks.
        """
        # whatever fails in the first call, no rank compares in the next one, after `reset`
        compared, self._compared = self._compared, True
        with self._engine.failing():
            self._check_gradients()
        if not compared and self._engine.error is None:
            self._engine.compare_sources("average()")

    def _check_gradients(self) -> None:
        """Raise unless every gradient can be averaged."""
        if self._newcomers is not None:
            self._newcomers.refuse()
        bucketed = {index for bucket in self._buckets for index, _ in bucket.members}
        for index, (name, parameter) in enumerate(self._named):
            if parameter.requires_grad and index not in bucketed:
                raise GradcompError(
                    f"parameter {name!r} was frozen when the averager was made; make a new one"
                )
            if parameter.grad is not None and parameter.requires_grad:
                check_gradient(name, parameter)


def torch_communicator(timeout_s: float | None) -> Communicator:
    """Return a communicator over torch.distributed's default group."""
    from gradcomp.comm.torchdist import TorchCommunicator

    return TorchCommunicator(timeout_s=timeout_s)


def _pairs(named_parameters: Any) -> list[tuple[str, nn.Parameter]]:
    """Return the (name, parameter) pairs of a model, or the given pairs.

    Raises:
        TypeError: a DDP model, or neither a module nor such pairs.
        ValueError: two pairs with the same name.
    """
    if isinstance(named_parameters, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "DistributedDataParallel averages gradients already: give it to gradcomp.ddp.register"
        )
    pairs = list(
        named_parameters.named_parameters()
        if isinstance(named_parameters, nn.Module)
        else named_parameters
    )
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(
                "GradientAverager takes a model, or the pairs of model.named_parameters(), got"
                f" {type(pair).__name__}: residuals and checkpoints go by names"
            )
    (most, count), *_ = Counter(name for name, _ in pairs).most_common(1) or [("", 0)]
    if count > 1:
        raise ValueError(
            f"several parameters are called {most!r}: residuals and checkpoints go by names, so"
            " prefix those of each module"
        )
    return pairs
