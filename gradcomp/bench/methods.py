"""How gradients travel: ``name[:key=value,...]`` on the command line, and what trains that way.

One row of `METHODS` a codec or way of torch's; `Method` has what its options say, and `wrap` makes
a model exchange by it.
"""

# no annotations from the future: DDP reads those of a hook

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import gradcomp.ddp
import gradcomp.fsdp
from gradcomp.bench.optimizers import exchanging_momentum
from gradcomp.codecs import Block, Codec, Identity, OneBit, Ternary, TernGrad
from gradcomp.comm.base import Communicator
from gradcomp.fsdp.weights import weights_codec
from gradcomp.local import DiLoCo
from gradcomp.local.outer import LR, MOMENTUM
from gradcomp.onebit_sgd import DoubleBuffer
from gradcomp.payload.form import removal

NONE = "none"  # the model alone: what a step takes without an exchange
NOOP = "noop"  # under DDP, with a hook that averages nothing
FSDP2 = "fsdp2"  # fully_shard in place of DDP: alone, or fsdp2:CODEC[,weights=CODEC[,keep]]
DEFAULT = ("fp32", "bf16", "ternary", "block2", "block4", "onebit")
POWERSGD_START = 2  # exchanges in fp32 first, the fewest that it takes with error feedback

Hook = Callable[[DistributedDataParallel], Any]  # returns what has `stats` and `close`, or None


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


def _powersgd(rank: int) -> Hook:
    def register(model: DistributedDataParallel) -> None:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


# what travels in fp32, by names and shapes
PRESETS: dict[str, Callable[[str, nn.Parameter], bool]] = {
    "none": lambda name, parameter: False,
    "vectors": lambda name, parameter: parameter.ndim < 2,
    "ends": lambda name, parameter: (
        parameter.ndim < 2 or name.startswith(("embedding", "position", "head", "stem"))
    ),
}


@dataclass(frozen=True)
class Method:
    """One way to average.

    Attributes:
        name: as it was given.
        codec: what packs gradients; None: `hook` sends them as they are.
        hook: registers with DDP what averages in place of a codec; None: the model alone.
        bits: a value that `hook` sends, where it is known.
        exempt: which tensors travel in fp32: a key of `PRESETS`.
        options: of `gradcomp.ddp.register`.
        momentum: "" for gradients that travel; "frozen" or "renewed" for momenta, of a variance as
            1-bit Adam's or as 0/1 Adam's, with a warm-up of `start_step` (until then the variance
            is renewed).
        feedback: whether residuals are kept; otherwise every step forgets what its codes have left
            out.
        double: half minibatches in turns (`gradcomp.onebit_sgd.DoubleBuffer`) in place of DDP.
        local: of `gradcomp.DiLoCo`, and ``outer_lr`` and ``outer_momentum``: weights' changes are
            averaged now and then; empty: gradients are, every step.
        sharded: FSDP2 in place of DDP.
        weights, keep: of FSDP2: what packs weights, and whether backward takes those of forward.
    """

    name: str
    codec: Codec | None = None
    hook: Hook | None = None
    bits: int = 0
    exempt: str = "none"
    options: dict[str, Any] = field(default_factory=dict)
    momentum: str = ""
    feedback: bool = True
    double: bool = False
    local: dict[str, Any] = field(default_factory=dict)
    sharded: bool = False
    weights: Codec | None = None
    keep: bool = False

    @property
    def plain(self) -> bool:
        """Whether a hook averages, and no codec."""
        return self.hook is not None and not self.local and not self.sharded

    @property
    def without_ddp(self) -> bool:
        """Whether the model is not wrapped in DDP, so that its step compares with `NONE`."""
        return bool(self.local) or self.sharded

    def options_for(self, named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Any]:
        """Return the options for these parameters."""
        exempt = PRESETS[self.exempt]
        options = {
            name: value
            for name, value in self.options.items()
            if name != "start_step" or not self.momentum
        }
        if self.exempt != "none":
            options["exclude"] = [n for n, p in named if exempt(n, p)]
        return options


# options of codecs, by what the command line calls them
CODEC = {"step": "step", "decay": "residual_decay", "group": "group"}
LOCAL: dict[str, Callable[[str], Any]] = {
    "every": int,
    "fragments": int,
    "delay": int,
    "alpha": float,
    "outer_lr": float,
    "outer_momentum": float,
}
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(NONE),
        Method(NOOP, None, _noop),
        Method("fp32", Identity(), _fp32, 32),  # a codec where DDP is not what averages
        Method("bf16", None, _bf16, 16),
        Method("fp16", None, _fp16, 16),
        Method("powersgd1", None, _powersgd(1)),
        Method("powersgd4", None, _powersgd(4)),
        Method("ternary", Ternary()),
        Method("terngrad", TernGrad()),
        Method("terngrad-requantize", TernGrad(scale="own", second_phase="requantize")),
        Method("onebit", OneBit()),
        Method("block2", Block(2)),
        Method("block4", Block(4)),
        Method("block8", Block(8)),
    )
}
# what the hooks of torch's ways do, exchanged over MPI as codecs are
OVER_MPI = {"fp32": Identity(), "bf16": Identity("bf16")}
OTHERS = tuple(name for name, method in METHODS.items() if method.codec is None)


def parse(text: str) -> Method:
    """Return the method that the command line names: ``onebit``,
    ``onebit:exempt=ends,start_step=100``, ``ternary:every=30,delay=5``, ``fsdp2:onebit``, or
    ``module:factory`` for a hook of one's own.

    Raises:
        ValueError: no such method, preset or option, or options that do not go together.
    """
    name, colon, rest = text.partition(":")
    if name == "diloco":
        raise ValueError(_renamed(text))
    if name == FSDP2:
        return _sharded(text)
    if name not in METHODS and colon and "=" not in rest:
        return Method(text, None, _own_hook(text))
    if name not in METHODS:
        raise ValueError(
            f"no method named {name!r}; there are {', '.join(METHODS)}, {FSDP2}, and"
            f" module:factory for a hook of your own{removal(name)}"
        )
    method = replace(METHODS[name], name=text, options={}, local={})
    for word in filter(None, rest.split(",")):
        method = _with(method, *word.partition("=")[::2])
    _check(method)
    return method


def _with(method: Method, key: str, value: str) -> Method:
    """Return a method with one more option.

    Raises:
        ValueError: there is no such option or value.
    """
    name, codec, options = method.name.partition(":")[0], method.codec, method.options
    if key == "exempt":
        if value not in PRESETS:
            raise ValueError(f"exempt must be one of {', '.join(PRESETS)}, got {value!r}")
        return replace(method, exempt=value)
    if key in ("start_step", "min_numel", "slice_numel"):
        return replace(method, options=options | {key: int(value)})
    if key == "exchange":
        return replace(method, options=options | {key: value})
    if key == "precondition":
        return replace(method, options=options | {key: True})
    if key == "start":
        first = parse(value).codec
        if first is None:
            raise ValueError(f"{method.name}: a warm start is packed by a codec, {value} is none")
        return replace(method, options=options | {"start_codec": first})
    if key == "second":
        if codec is None:
            raise ValueError(f"{name} has no second phase: it is no codec")
        return replace(method, codec=type(codec)(**codec.options() | {"second_phase": value}))
    if key in CODEC:
        given = {} if codec is None else codec.options()
        if codec is None or CODEC[key] not in given:
            raise ValueError(f"{method.name}: {name} has no {key}=")
        number: Any = value if key == "group" and not value.isdecimal() else float(value)
        number = int(value) if key == "group" and value.isdecimal() else number
        return replace(method, codec=type(codec)(**given | {CODEC[key]: number}))
    if key == "rotate":
        if not isinstance(codec, OneBit):
            raise ValueError(f"{method.name}: rotate is for onebit")
        return replace(method, codec=OneBit(rotate=True, second_phase=codec.second_phase))
    if key == "momentum":
        if value not in ("", "frozen", "renewed"):
            raise ValueError(f"momentum must be frozen or renewed, got {value!r}")
        return replace(method, momentum=value or "frozen")
    if key == "double":
        return replace(method, double=True)
    if key in LOCAL:
        return replace(method, local=method.local | {key: LOCAL[key](value)})
    if key == "feedback":
        if value != "off" or codec is None or not codec.error_feedback:
            raise ValueError(f"{method.name}: feedback=off is for codecs that have feedback")
        return replace(method, feedback=False)
    known = "exempt, start_step, start, second, rotate, step, decay, group, min_numel, slice_numel"
    known += ", exchange, precondition, momentum, double, feedback, " + ", ".join(LOCAL)
    raise ValueError(f"unknown option {key!r} of {name}: {known}")


def _check(method: Method) -> None:
    text, options, momentum = method.name, method.options, method.momentum
    warm = options.get("start_step")
    if "start_codec" in options and not warm:
        raise ValueError(f"{text}: start= packs the steps before start_step=N")
    if momentum and (method.codec is None or not warm):
        raise ValueError(f"{text}: momentum needs a codec and a warm-up, start_step=N")
    if momentum == "renewed" and "start_codec" in options:
        raise ValueError(
            f"{text}: gradients and momenta take turns in a renewed warm-up, so start= cannot"
            " pack it"
        )
    if momentum and method.double:
        raise ValueError(f"{text}: momenta that travel do not wait for half a minibatch")
    if not method.feedback and (momentum or options.get("precondition")):
        raise ValueError(
            f"{text}: a step that is forgotten has neither momentum nor second moments"
        )
    if method.double and (method.local or not method.feedback):
        raise ValueError(f"{text}: double buffering has neither local steps nor feedback=off")
    if method.local and (
        method.codec is None or "every" not in method.local or momentum or not method.feedback
    ):
        raise ValueError(
            f"{text}: local steps need a codec and every=H, and go with neither momentum nor"
            " feedback=off"
        )
    if (method.hook is not None or method.codec is None) and not method.local and ":" in text:
        word = text.partition(":")[0]
        raise ValueError(f"{text}: {word} takes no options but those of local steps (every=H)")


def _renamed(text: str) -> str:
    """Return what says how ``diloco:CODEC:H[,...]`` is written now."""
    word, _, rest = text.partition(":")[2].partition(":")
    every, *more = rest.split(",")
    now = ",".join([f"every={every or 'H'}", *more]).replace("start_codec=", "start=")
    return f"{text}: local steps are an option of the codec now: {word or 'CODEC'}:{now}"


def _sharded(text: str) -> Method:
    """Return FSDP2 with torch's own reduce-scatter and all_gather, or with codecs.

    Raises:
        ValueError: there is no such codec, or it has residuals that a shard cannot have.
    """
    _, colon, rest = text.partition(":")
    if not colon:
        return Method(text, sharded=True)
    rest, _, weights = rest.partition(",weights=")
    packs, keep = weights.removesuffix(",keep"), weights.endswith(",keep")
    packed = Method(rest, OVER_MPI[rest]) if rest in OVER_MPI else parse(rest)
    codec = packed.codec
    if packed != Method(rest, codec, packed.hook, packed.bits):
        raise ValueError(
            f"{text}: under FSDP2 a codec takes second=, step=, decay= and group= alone"
        )
    if codec is None:
        raise ValueError(
            f"{text!r}: FSDP2 takes {FSDP2}:terngrad, {FSDP2}:onebit, {FSDP2}:bf16,"
            f" {FSDP2}:terngrad,weights=block8,keep"
        )
    try:
        by = weights_codec(OVER_MPI.get(packs, packs)) if packs else None
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from None
    return Method(text, codec, sharded=True, weights=by, keep=keep)


def _own_hook(name: str) -> Hook:
    """Return the function that ``module:factory`` names.

    Raises:
        ValueError: there is none.
    """
    module, _, word = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), word)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name}: {error}; there are {', '.join(METHODS)}, {FSDP2}, and module:factory, which"
            " registers a hook with a DDP model"
        ) from None
    if not callable(found):
        raise ValueError(f"{name} is no function that registers a hook with a DDP model")  # noqa: TRY004 - a word's value
    return found  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Ready:
    """A model that exchanges by a method.

    Attributes:
        method: of it.
        model: to call.
        optimizers: that train it.
        state: what has `stats` and `close`, or None.
        double: exchanges half a minibatch behind the other, with steps of its own.
        local: exchanges now and then, after a step.
    """

    method: Method
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    state: Any = None
    double: DoubleBuffer | None = None
    local: DiLoCo | None = None


def wrap(
    model: nn.Module,
    method: Method,
    make: Callable[[nn.Module], list[torch.optim.Optimizer]],
    comm: Communicator | None = None,
    *,
    min_numel: int | None = None,
) -> Ready:
    """Make a model exchange by a method.

    Args:
        model: on the CPU, the same on every rank.
        method: how.
        make: returns the optimizers of a model; momenta that travel are those of their relatives.
        comm: what codecs send over; None: torch's default process group.
        min_numel: smallest tensor that is compressed, unless the method says; None: the default.
    """
    named = list(model.named_parameters())
    options = ({} if min_numel is None else {"min_numel": min_numel}) | method.options_for(named)
    if method.sharded:
        if comm is not None:
            raise ValueError(
                f"{method.name}: FSDP2 moves bytes over torch's process group, not over MPI"
            )
        return _shard(model, method, make)
    if method.local:
        return _apart(model, method, make(model), comm, options)
    if method.double:
        assert method.codec is not None
        optimizers = make(model)
        buffer = DoubleBuffer(model, optimizers[0], method.codec, comm, **options)
        return Ready(method, model, optimizers, buffer, buffer)
    optimizers = make(model)
    codec = method.codec
    if method.hook is not None:
        codec = None if comm is None else OVER_MPI.get(method.name)
        options = {"min_numel": 0}
    if codec is None and method.hook is None:
        return Ready(method, model, optimizers)
    wrapped = DistributedDataParallel(model)
    if codec is None:
        assert method.hook is not None
        return Ready(method, wrapped, optimizers, method.hook(wrapped))
    if method.momentum:
        optimizers = exchanging_momentum(optimizers, method.momentum, method.options["start_step"])
        options["optimizer"] = optimizers[0]
    state = gradcomp.ddp.register(wrapped, codec, comm=comm, **options)
    return Ready(method, wrapped, optimizers, state)


def _apart(
    model: nn.Module,
    method: Method,
    optimizers: list[torch.optim.Optimizer],
    comm: Communicator | None,
    options: dict[str, Any],
) -> Ready:
    assert method.codec is not None
    chosen = dict(method.local)
    rates = {"lr": chosen.pop("outer_lr", LR), "momentum": chosen.pop("outer_momentum", MOMENTUM)}
    options |= {
        "sync_every": chosen.pop("every"),
        "outer_optimizer": lambda anchors: torch.optim.SGD(
            anchors, **rates, nesterov=rates["momentum"] > 0
        ),
        **chosen,
    }
    local = DiLoCo(model, optimizers, method.codec, comm, **options)
    return Ready(method, model, optimizers, local, local=local)


def _shard(
    model: nn.Module,
    method: Method,
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
    state = None
    if method.codec is not None:
        state = gradcomp.fsdp.compress(
            model, method.codec, weights=method.weights, keep_weights=method.keep
        )
    return Ready(method, model, make(model), state)
