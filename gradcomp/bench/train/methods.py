"""How gradients travel: DDP's own ways, torch's hooks, this library's codecs, anyone's hook."""

# no annotations from the future: DDP reads those of a hook

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import gradcomp.ddp
from gradcomp.bench.accuracy.methods import METHODS as CODECS
from gradcomp.bench.accuracy.methods import parse

NONE = "none"  # the model alone: what a step takes without an exchange
NOOP = "noop"  # under DDP, with a hook that averages nothing
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
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START)
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
DEFAULT = ("fp32", "bf16", "ternary", "block2", "block4", "onebit")


def check(name: str) -> None:
    """Raise ValueError for what is no method."""
    find(name)


def find(name: str) -> Join:
    """Return what makes a DDP model exchange by a method: a name of `OTHERS`, a codec with options, or ``module:factory``.

    Raises:
        ValueError: there is no such method, codec, option or factory.
    """
    if name in OTHERS:
        return OTHERS[name]
    word, colon, rest = name.partition(":")
    if word not in CODECS and colon and not rest.partition("=")[1]:
        return _factory(word, rest)
    try:
        method = parse(name)
    except ValueError as error:
        known = ", ".join([*(m for m in OTHERS if m != NONE), *(c for c in CODECS if c not in OTHERS)])
        raise ValueError(f"{error}; here also {known}, or module:factory for a hook of your own") from None
    if method.momentum:
        raise ValueError(f"{name}: momenta travel with optimizers of their own, which this benchmark does not train with")
    codec = method.codec
    assert codec is not None  # bf16 is one of OTHERS

    def join(model: DistributedDataParallel) -> Any:
        options = {k: v for k, v in method.options.items() if k != "exclude"}
        exempt = method.options_for(list(model.module.named_parameters()))["exclude"] if method.exempt != "none" else ()
        return gradcomp.ddp.register(model, codec, exclude=exempt, **options)

    return join


def _factory(module: str, name: str) -> Join:
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{module}:{name}: {error}; it is to be a function that registers a hook with a DDP model") from None
    if not callable(found):
        raise ValueError(f"{module}:{name} is no function that registers a hook with a DDP model")  # noqa: TRY004 - a word's value
    return found  # type: ignore[no-any-return]


def wrap(model: nn.Module, name: str) -> tuple[nn.Module, Any]:
    """Return a model that exchanges by a method, and what its `Join` returned."""
    if name == NONE:
        return model, None
    wrapped = DistributedDataParallel(model)
    return wrapped, find(name)(wrapped)
