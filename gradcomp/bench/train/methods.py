"""How gradients travel: DDP's own ways, torch's hooks, this library's codecs, anyone's hook."""

# no annotations from the future: DDP reads those of a hook

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import gradcomp.ddp
import gradcomp.fsdp
from gradcomp import Codec, DiLoCo, Identity
from gradcomp.bench.accuracy.methods import METHODS as CODECS
from gradcomp.bench.accuracy.methods import Method, parse
from gradcomp.bench.accuracy.optimizers import exchanging_momentum
from gradcomp.comm.base import Communicator
from gradcomp.fsdp.weights import weights_codec
from gradcomp.onebit_sgd import DoubleBuffer

NONE = "none"  # the model alone: what a step takes without an exchange
NOOP = "noop"  # under DDP, with a hook that averages nothing
DOUBLE = "double"  # a codec's option: `DoubleBuffer` in place of DDP
FSDP2 = "fsdp2"  # fully_shard in place of DDP: alone, or fsdp2:CODEC
WEIGHTS = ",weights="  # and a codec for weights
KEEP = ",keep"  # and backward takes those of forward
# local steps: diloco:CODEC:H, with options as fragments=K,delay=D,start_step=N,start_codec=CODEC
DILOCO = "diloco"
POWERSGD_START = 2  # exchanges in fp32 first, the fewest that it takes with error feedback

Join = Callable[[DistributedDataParallel], Any]  # returns what has `stats` and `close`, or None


def _fp32(model: DistributedDataParallel) -> None:
    """DDP's own all_reduce."""


def _noop(model: DistributedDataParallel) -> None:
    """Nothing is averaged: what DDP takes by itself."""

    def hook(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
        done: Future[torch.Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)


def _bf16(model: DistributedDataParallel) -> None:
    """Buckets cast to bf16: the honest baseline. torch's own hook of this kind fails on gloo."""

    def hook(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
        whole = bucket.buffer()
        half = whole.to(torch.bfloat16).div_(dist.get_world_size())
        work: Any = dist.all_reduce(half, async_op=True)
        return work.get_future().then(lambda done: whole.copy_(half))  # type: ignore[no-any-return]

    model.register_comm_hook(None, hook)


def _fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _powersgd(rank: int) -> Join:
    def join(model: DistributedDataParallel) -> None:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return join


OTHERS: dict[str, Join] = {
    NONE: _fp32,
    NOOP: _noop,
    "fp32": _fp32,
    "bf16": _bf16,
    "fp16": _fp16,
    "powersgd1": _powersgd(1),
    "powersgd4": _powersgd(4),
}
OVER_MPI = {
    "fp32": Identity(),
    "bf16": Identity("bf16"),
}  # what DDP's own all_reduce would do, exchanged over MPI as codecs are
DEFAULT = ("fp32", "bf16", "ternary", "block2", "block4", "onebit")


@dataclass(frozen=True)
class Ready:
    """A model that exchanges by a method.

    Attributes:
        model: to call.
        optimizers: that train it.
        state: what has `stats` and `close`, or None.
        double: exchanges half a minibatch behind the other, with steps of its own.
        local: exchanges now and then, after a step.
        sharded: every rank has a part of the weights, so all of them call the model alike.
    """

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    state: Any = None
    double: DoubleBuffer | None = None
    local: DiLoCo | None = None
    sharded: bool = False


def check(name: str) -> None:
    """Raise ValueError unless this names a method: one of `OTHERS`, a codec with options, or
    ``module:factory``.
    """
    if name in OTHERS:
        return
    if is_factory(name):
        factory(name)
        return
    try:
        if is_local(name):
            local_of(name)
        elif is_sharded(name):
            sharded_of(name)
        else:
            codec_of(name)
    except ValueError as error:
        known = ", ".join(
            [*(m for m in OTHERS if m not in (NONE, NOOP)), *(c for c in CODECS if c not in OTHERS)]
        )
        raise ValueError(
            f"{error}; here also {DOUBLE}, and {known}, {DILOCO}:CODEC:H, {FSDP2},"
            f" {FSDP2}:CODEC[{WEIGHTS}CODEC[{KEEP}]], or module:factory for a hook of your own"
        ) from None


def is_factory(name: str) -> bool:
    """Whether a name is that of a function somewhere."""
    word, colon, rest = name.partition(":")
    return (
        bool(colon)
        and word not in CODECS
        and "=" not in rest
        and not is_local(name)
        and not is_sharded(name)
    )


def is_local(name: str) -> bool:
    """Whether a name is that of local steps."""
    return name.partition(":")[0] == DILOCO


def is_sharded(name: str) -> bool:
    """Whether a name is that of FSDP2, with a codec or without."""
    return name.partition(":")[0] == FSDP2


def sharded_of(name: str) -> tuple[Codec | None, Codec | None, bool]:
    """Return the codecs of gradients and of weights that a name of FSDP2 says, None for torch's own
    reduce-scatter and all_gather, and whether weights are kept for backward.

    Raises:
        ValueError: there is no such codec, or it has residuals.
    """
    _, colon, rest = name.partition(":")
    if not colon:
        return None, None, False
    rest, _, weights = rest.partition(WEIGHTS)
    weights, keep = weights.removesuffix(KEEP), weights.endswith(KEEP)
    codec = OVER_MPI[rest] if rest in OVER_MPI else parse(rest).codec
    if codec is None or codec.gathers_only:
        raise ValueError(
            f"{name!r}: FSDP2 takes {FSDP2}:terngrad, {FSDP2}:onebit, {FSDP2}:bf16,"
            f" {FSDP2}:terngrad{WEIGHTS}block8{KEEP}"
        )
    return codec, weights_codec(OVER_MPI.get(weights, weights)) if weights else None, keep


def local_of(name: str) -> tuple[Codec, dict[str, Any]]:
    """Return the codec and the options of `gradcomp.DiLoCo` that a name says.

    Raises:
        ValueError: not understood.
    """
    word, _, rest = name.partition(":")[2].partition(":")
    every, *words = rest.split(",")
    options = {"sync_every": every} | {
        key: value for key, _, value in (one.partition("=") for one in words)
    }
    codec = parse(word).codec
    first = options.pop("start_codec", "")
    numbers = {key: int(value) for key, value in options.items() if value.isdigit()}
    if (
        codec is None
        or len(numbers) < len(options)
        or not set(options) <= {"sync_every", "fragments", "delay", "start_step"}
    ):
        raise ValueError(
            f"{name!r} is not understood; {DILOCO}:terngrad:30 and"
            f" {DILOCO}:onebit:30,fragments=2,delay=5,start_step=100,start_codec=ternary are"
        )
    return codec, numbers | ({"start_codec": parse(first).codec} if first else {})


def codec_of(name: str) -> tuple[Method, bool]:
    """Return the codec's method that a name says, and whether it is to be double buffered.

    Raises:
        ValueError: there is no such method, or option.
    """
    word, _, rest = name.partition(":")
    options = [one for one in rest.split(",") if one]
    double = DOUBLE in options
    method = parse(
        ":".join(filter(None, [word, ",".join(one for one in options if one != DOUBLE)]))
    )
    if double and method.momentum:
        raise ValueError(f"{name}: momenta that travel do not wait for half a minibatch")
    return method, double


def factory(name: str) -> Join:
    """Return the function that ``module:factory`` names.

    Raises:
        ValueError: there is none.
    """
    module, _, word = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), word)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name}: {error}; it is to be a function that registers a hook with a DDP model"
        ) from None
    if not callable(found):
        raise ValueError(f"{name} is no function that registers a hook with a DDP model")  # noqa: TRY004 - a word's value
    return found  # type: ignore[no-any-return]


def wrap(
    model: nn.Module,
    name: str,
    make: Callable[[nn.Module], list[torch.optim.Optimizer]],
    comm: Communicator | None = None,
) -> Ready:
    """Make a model exchange by a method, over `comm` if one is given; what `make` returns trains
    it, or momenta that travel are taken from it.
    """
    if is_sharded(name):
        if comm is not None:
            raise ValueError(f"{name}: FSDP2 moves bytes over torch's process group, not over MPI")
        return _shard(model, *sharded_of(name), make)
    optimizers = make(model)
    if name == NONE:
        return Ready(model, optimizers)
    if comm is not None and name in OVER_MPI:
        wrapped = DistributedDataParallel(model)
        return Ready(
            wrapped,
            optimizers,
            gradcomp.ddp.register(wrapped, OVER_MPI[name], comm=comm, min_numel=0),
        )
    if name in OTHERS or is_factory(name):
        wrapped = DistributedDataParallel(model)
        return Ready(wrapped, optimizers, (OTHERS.get(name) or factory(name))(wrapped))
    if is_local(name):
        codec, numbers = local_of(name)
        local = DiLoCo(model, optimizers, codec, comm, **numbers)
        return Ready(model, optimizers, local, local=local)
    method, double = codec_of(name)
    codec = method.codec  # type: ignore[assignment]
    assert codec is not None  # bf16 is one of OTHERS
    options = {k: v for k, v in method.options.items() if k != "start_step" or not method.momentum}
    if method.exempt != "none":
        options["exclude"] = method.options_for(list(model.named_parameters()))["exclude"]
    if double:
        buffer = DoubleBuffer(model, optimizers[0], codec, comm, **options)
        return Ready(model, optimizers, buffer, buffer)
    if method.momentum:
        optimizers = exchanging_momentum(optimizers, method)
        options["optimizer"] = optimizers[0]
    wrapped = DistributedDataParallel(model)
    return Ready(wrapped, optimizers, gradcomp.ddp.register(wrapped, codec, comm=comm, **options))


def _shard(
    model: nn.Module,
    codec: Codec | None,
    weights: Codec | None,
    keep: bool,
    make: Callable[[nn.Module], list[torch.optim.Optimizer]],
) -> Ready:
    """Shard a model, its lists' and sequences' members as modules of their own, each of which
    asks for the next one's weights early.
    """
    # here, since it takes as long to import as a third of torch, and most methods do without
    from torch.distributed.fsdp import fully_shard

    before = model
    for outer in model.modules():
        if isinstance(outer, (nn.ModuleList, nn.Sequential)):
            for inner in outer:
                if any(True for _ in inner.parameters()):
                    fully_shard(inner)
                    if before is not model:
                        before.set_modules_to_forward_prefetch([inner])  # type: ignore[operator]
                    before = inner
    fully_shard(model)
    state = (
        gradcomp.fsdp.compress(model, codec, weights=weights, keep_weights=keep)
        if codec is not None
        else None
    )
    return Ready(model, make(model), state, sharded=True)
