"""Average one tensor over all ranks, compressed: `all_reduce`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradcomp.codecs import Codec, resolve
from gradcomp.codecs.checks import check_tensor
from gradcomp.comm.base import Communicator
from gradcomp.engine.agree import agree
from gradcomp.exchange.interface import Exchange, run_stages
from gradcomp.exchange.routes import Route, make_route
from gradcomp.exchange.sizing import EXCHANGES, Strategy, choose
from gradcomp.exchange.stats import Stats
from gradcomp.memory.residuals import Feedback
from gradcomp.payload import fingerprint, wire
from gradcomp.payload.order import storage_order, storage_shape
from gradcomp.payload.pieces import Slot
from gradcomp.payload.rng import check_uint32


class _Call:
    """What `all_reduce` keeps between calls for one (communicator, key): step counter and buffers."""

    def __init__(self, comm: Communicator, key: int) -> None:
        self.lease = comm.lease(f"all_reduce(key={key})")
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
        tensor: any shape, float32, bfloat16 or float16, CPU, filling its memory in any order of dimensions; overwritten by the average.
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
    order = storage_order(tensor.shape, tensor.stride())
    check_tensor(tensor, "tensor", contiguous=not order)
    codec = resolve(codec)
    check_uint32("key", key)
    if feedback is not None and not codec.error_feedback:
        raise ValueError(f"{codec!r} takes no feedback")
    if comm is None:
        from gradcomp.comm.torchdist import default_communicator

        comm = default_communicator()
    call = comm.kept.setdefault(("all_reduce", key), _Call(comm, key))
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise ValueError(f"step must be None or an integer of at least 0, got {step!r}")
    now = call.step if step is None else step
    call.step += step is None
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {EXCHANGES}, got {exchange!r}")
    if comm.world_size == 1:
        choose(codec, 1, exchange)
        return tensor
    place = (tensor.shape, order, tensor.dtype, repr(codec), exchange, feedback)
    with call.lease:
        found = call.exchanges.get(place)
        if found is None:
            route = make_route(codec, call.lease, exchange)
            what = (*place[:-1], feedback is not None)
            if what not in call.agreed:
                _agree(call.lease, tensor, codec, route.strategy, key, now, feedback is not None, timeout_s)
                call.agreed.add(what)
            found = call.exchanges[place] = _make_exchange(route, tensor, codec, key, feedback)
        found.timeout_s = timeout_s
        if feedback is not None:
            feedback.begin_step()
        run_stages(found, tensor.as_strided((tensor.numel(),), (1,)) if order else tensor.view(-1), now)
    return tensor


def _make_exchange(route: Route, tensor: Tensor, codec: Codec, key: int, feedback: Feedback | None) -> Exchange:
    """Return the buffers that average tensors like this one."""
    owner = None
    if feedback is not None and route.strategy.second_phase == "requantize":
        owner = feedback.owned(route.owner_numel)
    offset = feedback.offset(key) if feedback is not None else 0
    slot = Slot(key, tensor.numel(), codec.group_numel(storage_shape(tensor)), True, 0, offset)
    plan = route.plan([slot], codec, {key: owner.offset(key)} if owner is not None else None)
    options = {"feedback": feedback, "owner_feedback": owner, "seed": codec.seed, "device": tensor.device}
    return route.exchange(plan, tensor.dtype, Stats(), **options)


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
        layout=(key, tuple(tensor.shape), storage_order(tensor.shape, tensor.stride())),
        step=step,
        world_size=comm.world_size,
    )
    agree(comm, mine, 0, timeout_s)
