"""Average gradients without DistributedDataParallel: one tensor with `all_reduce`, a model with `GradientAverager`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from gradcomp import fingerprint, wire
from gradcomp.buckets import check_gradient, fuse, local_part, shard_place
from gradcomp.codecs import Codec, resolve
from gradcomp.codecs.base import check_tensor
from gradcomp.comm.base import Communicator
from gradcomp.controls import Controls
from gradcomp.engine import Engine
from gradcomp.errors import GradcompError, PeerLost
from gradcomp.exchange import Exchange, run_stages
from gradcomp.feedback import Feedback
from gradcomp.layout import Slot
from gradcomp.options import Options, names, read_scaler
from gradcomp.rng import check_uint32
from gradcomp.rotation import Rotation
from gradcomp.routes import Route, make_route
from gradcomp.sizing import EXCHANGES, Strategy, choose
from gradcomp.stats import Stats
from gradcomp.transform import Transform


class _Call:
    """What `all_reduce` keeps between calls for one (communicator, key): step counter and buffers."""

    def __init__(self) -> None:
        self.step = 0
        self.agreed: set[Any] = set()
        self.exchanges: dict[Any, Exchange] = {}


def all_reduce(
    tensor: Tensor,
    codec: Codec | str,
    comm: Communicator | None = None,
    *,
    key: int = 0,
    step: int | None = None,
    feedback: Feedback | None = None,
    exchange: str = "auto",
    timeout_s: float = 300.0,
) -> Tensor:
    """Average one tensor over all ranks, compressed, in place.

    Collective: every rank calls it with a tensor of the same shape and dtype and the same other arguments.

    Args:
        tensor: any shape, float32, bfloat16 or float16, contiguous, CPU; overwritten by the average.
        codec: codec or name.
        comm: the ranks; torch.distributed's default group when None.
        key: tells tensors apart: it takes the place of the parameter's position in random numbers and feedback.
        step: training step for the random numbers; None counts the calls for this (comm, key).
        feedback: residuals of error-feedback codecs, ``Feedback({key: tensor.numel()})``; None: no error feedback. Every call
            is a step of it: ``feedback.discard()`` undoes the last one.
        exchange: "auto", "all_gather" or "reduce_scatter".
        timeout_s: seconds after which a silent peer is given up.

    Returns:
        `tensor`; all NaN when any rank's held NaN or Inf.

    Raises:
        UnsupportedTensor: dtype, device or layout.
        ValueError: an argument out of its range.
        PeerMismatch, PeerLost, CorruptPayload: as they say.
    """
    check_tensor(tensor, "tensor")
    codec = resolve(codec)
    check_uint32("key", key)
    if feedback is not None and not codec.error_feedback:
        raise ValueError(f"{codec!r} takes no feedback")
    if comm is None:
        from gradcomp.comm.torchdist import default_communicator

        comm = default_communicator()
    call = comm.kept.setdefault(("all_reduce", key), _Call())
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise ValueError(f"step must be None or an integer of at least 0, got {step!r}")
    now = call.step if step is None else step
    call.step += step is None
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {EXCHANGES}, got {exchange!r}")
    if comm.world_size == 1:
        choose(codec, 1, exchange)
        return tensor
    place = (tensor.shape, tensor.dtype, repr(codec), exchange, feedback)
    found = call.exchanges.get(place)
    if found is None:
        route = make_route(codec, comm, exchange)
        what = (*place[:-1], feedback is not None)
        if what not in call.agreed:
            _agree(comm, tensor, codec, route.strategy, key, now, feedback is not None, timeout_s)
            call.agreed.add(what)
        found = call.exchanges[place] = _make_exchange(route, tensor, codec, key, feedback)
    found.timeout_s = timeout_s
    if feedback is not None:
        feedback.begin_step()
    run_stages(found, tensor.view(-1), now)
    return tensor


def _make_exchange(route: Route, tensor: Tensor, codec: Codec, key: int, feedback: Feedback | None) -> Exchange:
    """Return the buffers that average tensors like this one."""
    owner = None
    if feedback is not None and route.strategy.second_phase == "requantize":
        owner = feedback.owned(route.owner_numel)
    offset = feedback.offset(key) if feedback is not None else 0
    slot = Slot(key, tensor.numel(), codec.group_numel(tuple(tensor.shape)), True, 0, offset)
    plan = route.plan([slot], codec, {key: owner.offset(key)} if owner is not None else None)
    return route.exchange(plan, tensor.dtype, Stats(), feedback=feedback, owner_feedback=owner, seed=codec.seed)


def _agree(
    comm: Communicator,
    tensor: Tensor,
    codec: Codec,
    strategy: Strategy,
    key: int,
    step: int,
    feedback: bool,
    timeout_s: float,
) -> None:
    """Compare what the ranks are about to average; PeerMismatch on every rank if they differ."""
    mine = fingerprint.record(
        wire_version=wire.VERSION,
        codec=codec.name,
        codec_options=(codec.options(), feedback),
        exchange=strategy.exchange,
        second_phase=strategy.second_phase,
        dtype=tensor.dtype,
        numel=tensor.numel(),
        layout=(key, tuple(tensor.shape)),
        step=step,
        world_size=comm.world_size,
    )
    begun = time.perf_counter()
    try:
        everyone = comm.all_gather_bytes(fingerprint.pack(mine), timeout_s)
    except (TimeoutError, ConnectionError) as error:
        raise PeerLost("fingerprint", 0, time.perf_counter() - begun, str(error)) from error
    fingerprint.compare(everyone)


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
        bucket_cap_mb: a bucket that has reached so many MiB is closed, as in DDP.
        start_step, min_numel, exclude, exchange, nodes, transform, grad_scaler, transactional, timeout_s: as in
            `gradcomp.ddp.register`.

    Raises:
        ValueError, UnsupportedTensor: as `gradcomp.ddp.register`.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        codec: Codec | str,
        comm: Communicator | None = None,
        *,
        bucket_cap_mb: float = 25.0,
        start_step: int = 0,
        min_numel: int = 1024,
        exclude: Sequence[str] = (),
        exchange: str = "auto",
        nodes: Sequence[Sequence[int]] | None = None,
        transform: Transform | None = None,
        grad_scaler: Any = None,
        transactional: bool | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if not 0 < bucket_cap_mb < float("inf"):
            raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}")
        self._named = named = list(named_parameters)
        scale, whole_steps = read_scaler(grad_scaler, transactional)
        options = Options(
            start_step=start_step,
            min_numel=min_numel,
            exclude=names(exclude),
            exchange=exchange,
            nodes=nodes,
            transform=transform,
            transactional=whole_steps,
            timeout_s=timeout_s,
        )
        self._scaled = grad_scaler is not None
        own_comm = comm if comm is not None else _torch_communicator(timeout_s)
        try:
            self._engine = Engine([(n, local_part(p)) for n, p in named], codec, own_comm, options, scale)
        except BaseException:
            if comm is None:
                own_comm.close()
            raise
        self._engine.shards = {i: shard_place(p) for i, (_, p) in enumerate(named)}
        self._trained = [(i, p) for i, (_, p) in enumerate(named) if p.requires_grad]
        self._bucket_cap_mb = bucket_cap_mb
        self._buckets = fuse(self._trained, bucket_cap_mb)
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
            self._rotation = Rotation(self._engine, self._buckets, fuse(self._trained, self._bucket_cap_mb))
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

    def check_replicas(self) -> None:
        """As `Controls.check_replicas`; of sharded parameters the shards, over the ranks that hold the same."""
        self._engine.named = [(name, local_part(p)) for name, p in self._named]
        super().check_replicas()

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

    def close(self) -> None:
        """Stop the threads and close the communicator."""
        self._engine.close()


def _torch_communicator(timeout_s: float) -> Communicator:
    from gradcomp.comm.torchdist import TorchCommunicator

    return TorchCommunicator(timeout_s=timeout_s)
