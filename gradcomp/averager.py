"""Average gradients without DistributedDataParallel: one tensor with `all_reduce`, a model with `GradientAverager`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from gradcomp.codecs import Codec
from gradcomp.comm.base import Communicator
from gradcomp.engine.buckets import Gradient, check_gradient, fuse
from gradcomp.engine.controls import Controls
from gradcomp.engine.options import Changes, Options, spell_out
from gradcomp.engine.rotation import Rotation
from gradcomp.engine.step import Engine
from gradcomp.errors import GradcompError

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GradientAverager(Controls):
    """Averages the gradients of a model that is not wrapped in DDP, over any communicator.

    Gradients are fused into buckets, whose exchanges overlap each other. Use it after ``loss.backward()`` and before
    ``optimizer.step()``::

        averager = gradcomp.GradientAverager(model.named_parameters(), "ternary")
        ...
        loss.backward()
        averager.average()
        optimizer.step()

    Args:
        named_parameters: (name, parameter) pairs as ``model.named_parameters()`` gives them, the same on every rank. Of a
            DTensor the local shard is averaged: `comm` then has the ranks that hold the same shards.
        codec: codec or name.
        comm: the ranks; torch.distributed's default group when None. Closed with the averager.
        options: see `gradcomp.Options`.
        bucket_cap_mb: a bucket that has reached so many MiB is closed, as in DDP.
        changes: fields of `gradcomp.Options` to set.

    Raises:
        ValueError, UnsupportedTensor: as `gradcomp.ddp.register`.
    """

    @spell_out
    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        codec: Codec | str,
        comm: Communicator | None = None,
        options: Options | None = None,
        *,
        bucket_cap_mb: float = 25.0,
        **changes: Unpack[Changes],
    ) -> None:
        if not 0 < bucket_cap_mb < float("inf"):
            raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}")
        self._named = list(named_parameters)
        self._sources = [Gradient(name, p) for name, p in self._named]
        options = Options.of(options, **changes)
        self._scaled = options.grad_scaler is not None
        own_comm = comm if comm is not None else torch_communicator(options.timeout_s)
        try:
            self._engine = Engine(self._sources, codec, own_comm, options)
        except BaseException:
            if comm is None:
                own_comm.close()
            raise
        self._bucket_cap_mb = bucket_cap_mb
        self._buckets = fuse(self._sources, bucket_cap_mb)
        self._rotation: Rotation | None = None

    def average(self) -> None:
        """Replace every ``p.grad`` by its average over all ranks; a missing gradient counts as zero.

        Raises:
            PeerMismatch, PeerLost, CorruptPayload: on every rank, and again at every later call.
            UnsupportedTensor: a sparse gradient, or one of another dtype than its parameter's.
            GradcompError: an exchange that `rotate` began is under way.
        """
        self._refuse_pending("average()")
        engine = self._engine
        self._check_gradients()
        engine.begin_step()
        for bucket in self._buckets:
            bucket.load()
            engine.submit(bucket.flat, bucket.members, lambda: None)
        engine.finish_step()
        for bucket in self._buckets:
            bucket.store()

    def rotate(self) -> bool:
        """Start averaging what stands in ``p.grad``, and put the averages of the call before in its place.

        The exchange goes on while the next gradients are computed (double buffering); a second set of buckets is made at
        the first call. A missing gradient counts as zero. Collective, as `average` is: every rank calls it as often.

        Returns:
            Whether ``p.grad`` holds averages now. If not, as in the first call and after `flush`, every ``p.grad`` is None.

        Raises:
            PeerMismatch, PeerLost, CorruptPayload: of this or an earlier exchange, and again at every later call; every
                ``p.grad`` is NaN then.
            UnsupportedTensor: as `average`; nothing is changed.
            GradcompError: a `grad_scaler` was given: averages would come back under another loss scale than they left.
        """
        if self._scaled:
            raise GradcompError("rotate() hands back gradients of an earlier loss scale: make the averager without one")
        self._check_gradients()
        if self._rotation is None:
            self._rotation = Rotation(self._engine, self._buckets, fuse(self._sources, self._bucket_cap_mb))
        return self._rotation.rotate()

    def flush(self) -> bool:
        """Wait for what `rotate` has begun and put the averages into ``p.grad``; return whether there was any.

        No collective: the bytes are under way already, so a rank may call it when the others do not.

        Raises:
            PeerMismatch, PeerLost, CorruptPayload: as `rotate`.
        """
        return self._rotation is not None and self._rotation.flush()

    @property
    def rotation(self) -> Rotation | None:
        """Seconds of the exchanges that `rotate` began; None before its first call."""
        return self._rotation

    def state_dict(self) -> dict[str, Any]:
        """As `Controls.state_dict`; GradcompError while an exchange that `rotate` began is under way."""
        self._refuse_pending("state_dict()")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """As `Controls.load_state_dict`; averages that wait to be handed back are dropped."""
        state = self._engine.accept(state)
        if self._rotation is not None:
            self._rotation.drop()
        super().load_state_dict(state)

    def discard_step(self) -> None:
        """As `Controls.discard_step`; GradcompError while an exchange that `rotate` began is under way."""
        self._refuse_pending("discard_step()")
        super().discard_step()

    def _refuse_pending(self, what: str) -> None:
        if self._rotation is not None and self._rotation.pending:
            raise GradcompError(f"{what} while an exchange that rotate() began is under way: call flush() first")

    def _check_gradients(self) -> None:
        """Raise unless every gradient can be averaged."""
        bucketed = {index for bucket in self._buckets for index, _ in bucket.members}
        for index, (name, parameter) in enumerate(self._named):
            if parameter.requires_grad and index not in bucketed:
                raise GradcompError(f"parameter {name!r} was frozen when the averager was made; make a new one")
            if parameter.grad is not None and parameter.requires_grad:
                check_gradient(name, parameter)


def torch_communicator(timeout_s: float | None) -> Communicator:
    """Return a communicator over torch.distributed's default group."""
    from gradcomp.comm.torchdist import TorchCommunicator

    return TorchCommunicator(timeout_s=timeout_s or TorchCommunicator.timeout_s)
