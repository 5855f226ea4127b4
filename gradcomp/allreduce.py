"""Average one tensor over all ranks, compressed: `all_reduce`."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor

from gradcomp.codecs import Codec, resolve
from gradcomp.codecs.checks import check_tensor
from gradcomp.comm.base import Communicator
from gradcomp.engine.options import takes
from gradcomp.exchange.agree import EXCHANGE_FIELDS, Shown, agree, codec_fields
from gradcomp.exchange.bucket import BucketExchange, ExchangeOptions
from gradcomp.exchange.routes import run_stages
from gradcomp.exchange.second import owners_feed_back
from gradcomp.exchange.sizing import EXCHANGES, BucketPlan, Strategy, choose
from gradcomp.exchange.slices import Slicing
from gradcomp.exchange.staged import for_device
from gradcomp.exchange.stats import Stats
from gradcomp.kernels import encoding_device
from gradcomp.kernels.staging import join
from gradcomp.memory.saved import STEPS
from gradcomp.memory.store import Feedback, StateStore
from gradcomp.payload.order import storage_order, storage_shape
from gradcomp.payload.pieces import Slot
from gradcomp.payload.rng import check_uint32

__all__ = ["Feedback", "all_reduce", "forget_buffers"]

MOST_EXCHANGES = 16  # exchanges, with their buffers, to keep per (communicator, key)


class _Call:
    """The state of `all_reduce` between calls, for one (communicator, key).

    Attributes:
        lease: claims the communicator during a call.
        step: number of calls without an explicit `step`.
        exchanges: buffers by kind of tensor, the least recently used first.
    """

    def __init__(self, comm: Communicator, key: int) -> None:
        self.lease = comm.lease(f"all_reduce(key={key})")
        self.step = 0
        self.exchanges: OrderedDict[Any, BucketExchange] = OrderedDict()


@takes()
def all_reduce(
    tensor: Tensor,
    codec: Codec | str,
    *,
    comm: Communicator | None = None,
    key: int = 0,
    step: int | None = None,
    feedback: Feedback | None = None,
    exchange: str = "auto",
    timeout_s: float = 300.0,
) -> Tensor:
    """Average one tensor over all ranks in place, with compression.

    Collective: every rank calls it with a tensor of the same shape and dtype, and with the same
    other arguments. A collective of 192 bytes compares these first. With one rank the tensor is not
    changed. Every tensor is compressed, however small.

    Args:
        tensor: any shape; float32, bfloat16 or float16; dense, with dimensions in any memory order.
            Overwritten by the average.
        codec: codec or name.
        comm: communicator; torch.distributed's default group when None.
        key: number of the tensor, used in place of a parameter's position in random numbers and
            feedback.
        step: training step for the random numbers; None counts the calls for this (comm, key).
        feedback: residuals of error-feedback codecs, ``Feedback({key: tensor.numel()})``; None: no
            error feedback. Every call is a step; ``feedback.discard()`` undoes the last one.
        exchange: "auto", "all_gather" or "reduce_scatter".
        timeout_s: longest wait for a rank, in seconds.

    Returns:
        `tensor`; all NaN if the tensor of any rank has NaN or Inf.

    Raises:
        UnsupportedTensor: the dtype, device or layout of `tensor`.
        ValueError: an argument out of its range.
        GradcompError: the communicator is in use, for example by an exchange of
            `GradientAverager.average_delayed`.
        PeerMismatch, PeerLost, CorruptPayload: on every rank. After an error in the middle of the
            exchange `comm` fails; `comm.duplicate()` replaces it. Without `comm`, the next call
            makes a new communicator, and counts steps from 0 again.
    """
    order = () if tensor.is_contiguous() else storage_order(tensor.shape, tensor.stride())
    check_tensor(tensor, "tensor", contiguous=not order)
    codec = resolve(codec)
    check_uint32("key", key)
    if comm is None:
        from gradcomp.comm.torchdist import default_communicator

        comm = default_communicator()
    phase = codec.resolved_second_phase(comm.world_size)
    if feedback is not None and not (codec.error_feedback or owners_feed_back(phase, codec)):
        raise ValueError(f"{codec!r} takes no feedback")
    if feedback is not None and feedback.residuals.numels.get(key) != tensor.numel():
        numel = feedback.residuals.numels.get(key)
        there = f"no residuals of key {key}" if numel is None else f"{numel} residuals of key {key}"
        raise ValueError(f"feedback has {there}, and the tensor {tensor.numel()} elements")
    if (
        feedback is None
        and codec.second_phase is None
        and codec.sum_form(comm.world_size) is not None
    ):
        # encoding means in 4 bits without residuals would cause a bias
        codec = codec.with_second_phase("exact")
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {EXCHANGES}, got {exchange!r}")
    call = comm.kept.get(("all_reduce", key)) or comm.kept.setdefault(
        ("all_reduce", key), _Call(comm, key)
    )
    now = call.step if step is None else step
    if isinstance(now, bool) or not isinstance(now, int) or not 0 <= now < STEPS:
        raise ValueError(
            "step must be None or an integer from 0 to 2^32 - 1, which the draws repeat after, got"
            f" {now!r}"
        )
    strategy = choose(codec, comm.world_size, exchange)
    if comm.world_size == 1:
        return tensor
    # with residuals in host memory the tensor is averaged there, too
    where = encoding_device(tensor.device) if feedback is None else feedback.device
    with call.lease:
        call.step += step is None
        # at every call: gloo ends the process if ranks send messages of different lengths
        _agree(call.lease, tensor, codec, strategy, key, now, feedback is not None, timeout_s)
        residuals = owned = None
        if feedback is not None:
            residuals = feedback.residuals
            if owners_feed_back(strategy.second_phase, codec):
                owned = feedback.owned(comm.rank, comm.world_size)
            feedback.begin_step()
        offset = residuals.offset(key) if residuals is not None else 0
        owned_offsets = {key: owned.offset(key)} if owned is not None else None
        memory = tensor.shape, order, tensor.dtype, tensor.device, where
        kind = (*memory, repr(codec), exchange, feedback is not None, offset, repr(owned_offsets))
        bucket_exchange = call.exchanges.get(kind)
        if bucket_exchange is None:
            group = codec.group_numel(storage_shape(tensor))
            slots = [Slot(key, tensor.numel(), group, True, 0, offset)]
            plan = BucketPlan(
                codec, slots, strategy, comm.world_size, comm.rank, owned_offsets, slicing=Slicing()
            )
            options = ExchangeOptions(tensor.dtype, Stats(), seed=codec.seed, device=where)
            bucket_exchange = call.exchanges[kind] = BucketExchange(plan, call.lease, options)
            if len(call.exchanges) > MOST_EXCHANGES:
                call.exchanges.popitem(last=False)
        call.exchanges.move_to_end(kind)
        bucket_exchange.timeout_s = timeout_s
        bucket_exchange.state = StateStore(residuals if codec.error_feedback else None, owned)
        plain = tensor.detach()
        flat = plain.as_strided((tensor.numel(),), (1,)) if order else plain.view(-1)
        try:
            run_stages(for_device(bucket_exchange, flat, where), flat, now)
            join(flat.device)
        except BaseException as error:
            # other slices may still be in progress and write to the buffers: do not reuse them
            call.exchanges.pop(kind, None)
            if isinstance(error, Exception):  # the other ranks wait for this one
                comm.abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            bucket_exchange.state = StateStore()  # keep buffers, but not the caller's residuals
        bucket_exchange.end()
    return tensor


def forget_buffers(comm: Communicator | None = None) -> None:
    """Free the buffers that `all_reduce` keeps for a communicator. Step counters are kept.

    Not collective. `all_reduce` keeps the buffers of the last 16 kinds of tensor (shape, dtype,
    codec) per key, and allocates new ones as needed.

    Args:
        comm: communicator; torch.distributed's default group when None.
    """
    if comm is None:
        from gradcomp.comm.torchdist import made_default

        comm = made_default()
    for kind, call in comm.kept.items() if comm is not None else ():
        if isinstance(kind, tuple) and kind[0] == "all_reduce":
            call.exchanges.clear()


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
    """Compare the arguments of all ranks; raise PeerMismatch on every rank if they differ."""
    shape, order = tuple(tensor.shape), storage_order(tensor.shape, tensor.stride())
    values = {
        **codec_fields(codec),
        "codec_options": Shown(
            (codec.options(), feedback),
            lambda: f"{codec!r}, {'with' if feedback else 'without'} feedback",
        ),
        "exchange": strategy.exchange,
        "second_phase": strategy.second_phase,
        "dtype": tensor.dtype,
        "numel": Shown(
            tensor.numel(), lambda: f"{tensor.numel()} values (key={key}, shape {shape})"
        ),
        "layout": Shown(
            (key, shape, order),
            lambda: f"key={key}, shape {shape}{f', memory order {order}' if order else ''}",
        ),
        "step": step,
        "world_size": comm.world_size,
    }
    called = f"all_reduce(key={key})"
    agree(comm, values, timeout_s, called=called, fields=EXCHANGE_FIELDS, bucket=0)
