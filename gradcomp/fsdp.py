"""FSDP2: the gradients of `fully_shard` models are reduce-scattered as packed codes.

`compress` gives every FSDP module a reduce-scatter of its own. Pieces and owners are FSDP's: rank k owns chunk k of every parameter. A
rank encodes what it has of a chunk and sends it to its owner, who averages what has come, in fp32; nothing is sent back. So gradients take
one phase here where DDP's take two, and gloo's own reduce-scatter, which is a whole all_reduce, sends 2 (N - 1) / N of everything in fp32.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradcomp.codecs import Codec, resolve
from gradcomp.comm import torch_private
from gradcomp.comm.torchdist import TorchCommunicator, divisor, reduce_scatter
from gradcomp.engine.agree import agree_on_words
from gradcomp.engine.options import Changes, Options
from gradcomp.errors import GradcompError
from gradcomp.exchange.bucket import BucketExchange
from gradcomp.exchange.sizing import BucketPlan, Strategy
from gradcomp.exchange.stats import Stats
from gradcomp.kernels import native
from gradcomp.payload.ownership import BySlots
from gradcomp.payload.parameters import Parameter, describe_parameters
from gradcomp.payload.pieces import Slot

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

STATE_VERSION = 1


def compress(
    model: nn.Module, codec: Codec | str = "ternary", options: Options | None = None, **changes: Unpack[Changes]
) -> FsdpState:
    """Pack the gradients that a `fully_shard` model reduce-scatters. Collective.

    ::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        state = gradcomp.fsdp.compress(model, "ternary")

    Training goes on as before: gradients come out averaged, a shard a rank. What is packed depends on parameters and the number of
    ranks alone, so another wrapping of the same model gives the same bits.

    Args:
        model: with FSDP modules inside, or one itself; each may share its parameters out over another group of ranks.
        codec: codec or name, of those without residuals: `Ternary`, `Identity("bf16")`. (Residuals of a rank are as large as whole
            gradients, which FSDP is there to avoid.)
        options: see `gradcomp.Options`; `min_numel`, `exclude`, `timeout_s` count here, of parameters as they were before they were sharded.
        changes: fields of `gradcomp.Options` to set.

    Raises:
        TypeError: no module, or none inside that `fully_shard` has wrapped.
        ValueError: a codec with residuals; an option that is of other exchanges; tensor parallelism inside.
        PeerMismatch: ranks with other parameters, codec or options.
        PeerLost: a rank did not answer.
    """
    return FsdpState(model, resolve(codec), Options.of(options, **changes))


class FsdpState:
    """What `compress` has made of a model: what was sent, and the step that random numbers depend on.

    Attributes:
        stats: bytes and seconds; a step is one module's reduce-scatter.
        plain: reduce-scatters that torch did after all, because some parameter of their module had no gradient, say.
    """

    def __init__(self, model: nn.Module, codec: Codec, options: Options) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        _check(codec, options)
        self.codec, self.stats, self.plain = codec, Stats(), 0
        sharded = torch_private.sharded_modules(model)
        if not sharded:
            raise TypeError("no module of this model is wrapped by torch.distributed.fsdp.fully_shard; for DDP there is gradcomp.ddp.register")
        names = {id(p): name for name, p in model.named_parameters()}
        wholes = [(names[id(p)], shape) for one in sharded for p, shape in zip(one.parameters, one.shapes, strict=True)]
        order = {name: n for n, name in enumerate(sorted(name for name, _ in wholes))}
        described = describe_parameters(wholes, codec.group_numel, options.min_numel, options.exempts)
        known = {p.name: p for p in described}
        self._comms: list[TorchCommunicator] = []
        self._modules: list[_Module] = []
        self._closed = False
        groups: dict[int, TorchCommunicator] = {}
        try:
            for one in sharded:
                if one.group.size() == 1:  # FSDP itself sends nothing then
                    continue
                comm = groups.get(id(one.group))
                if comm is None:
                    comm = groups[id(one.group)] = TorchCommunicator(one.group, timeout_s=options.timeout_s)
                    self._comms.append(comm)
                    _agree(comm, codec, options, described)
                parts = [
                    _Part(known[names[id(p)]], order[names[id(p)]], p, chunks)
                    for p, chunks in zip(one.parameters, one.chunks, strict=True)
                ]
                made = _Module(one.module, parts, codec, comm, self.stats)
                self._modules.append(made)
                torch_private.reduce_scatter_by(one.module, self._call(made))
        except BaseException:
            self.close()
            raise

    def _call(self, module: _Module) -> Any:
        def call(output: Tensor, given: Tensor, group: Any, op: Any) -> None:
            factor = divisor(op, group.size())
            if factor is not None and module.fits(given):
                module.reduce(output, given, factor)
                return
            self._say_plain("is divided by a factor of its own" if factor is None else "lacks that of some parameter")
            self.plain += 1
            reduce_scatter(output, given, group, op)

        return call

    def _say_plain(self, why: str) -> None:
        if not self.plain:
            warnings.warn(f"the gradient of an FSDP module {why} in this step: it travels as torch sends it", stacklevel=2)

    def describe(self) -> str:
        """Return one line: how what travels."""
        parts = [part for module in self._modules for part in module.parts]
        packed = sum(part.parameter.compressed for part in parts)
        ranks = " and ".join(str(size) for size in sorted({comm.world_size for comm in self._comms})) or "1"
        return f"{self.codec!r}: {packed} of {len(parts)} parameters of {len(self._modules)} FSDP modules packed, over {ranks} ranks"

    def state_dict(self) -> dict[str, Any]:
        """Return what every rank needs beside model and optimizer: the run goes on bit for bit if all modules have exchanged equally often."""
        return {"version": STATE_VERSION, "steps": max((module.steps for module in self._modules), default=0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, of any wrapping and number of ranks.

        Raises:
            ValueError: no such state.
        """
        steps = state.get("steps")
        if state.get("version") != STATE_VERSION or isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"not a state of gradcomp.fsdp that this version knows: {state!r}"[:200])
        for module in self._modules:
            module.steps = steps

    def close(self) -> None:
        """Give torch's own reduce-scatter back and close the communicators; closing twice is harmless."""
        if not self._closed:
            self._closed = True
            for module in self._modules:
                torch_private.reduce_scatter_as_before(module.module)
            for comm in self._comms:
                comm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Part:
    """One parameter of an FSDP module: how it travels, its place among all names in order, its shards."""

    parameter: Parameter
    number: int
    sharded: nn.Parameter
    chunks: list[tuple[int, ...]]


class _Module:
    """The reduce-scatter of one FSDP module.

    Attributes:
        module: as torch has it.
        parts: its parameters, in the order in which their gradients stand.
        steps: reduce-scatters so far.
    """

    def __init__(self, module: Any, parts: Sequence[_Part], codec: Codec, comm: TorchCommunicator, stats: Stats) -> None:
        self.module, self.parts, self.steps = module, list(parts), 0
        self._codec, self._comm, self._stats = codec, comm, stats
        self._exchanges: dict[tuple[Any, ...], BucketExchange] = {}
        self._failed: GradcompError | None = None

    def fits(self, given: Tensor) -> bool:
        """Whether these are the gradients of all trained parameters of the module."""
        return given.numel() == self._comm.world_size * sum(_numel(part.chunks[0]) for part in self._trained())

    def reduce(self, output: Tensor, given: Tensor, factor: int) -> None:
        """Write `factor` times the averages of this rank's chunks to ``(k,)`` of ``(N * k,)``; NaN if some rank's have NaN or Inf."""
        if self._failed is not None:
            raise self._failed
        exchange = self._exchange(given.dtype, given.device, self._trained())
        exchange.begin(given, self.steps, 0)
        try:
            exchange.measure()
            exchange.encode()
            exchange.average_shard()
        except GradcompError as error:
            self._failed = error
            raise
        self.steps += 1
        self._stats.steps += 1
        self._stats.baseline_bytes += 2 * (given.numel() - output.numel()) * given.element_size()
        if exchange.flagged:
            output.fill_(float("nan"))
            self._stats.nonfinite_buckets += 1
            return
        output.zero_()
        first = output.numel() * self._comm.rank
        for piece in exchange.plan.own_second.pieces:
            output[piece.slot.offset - first :][: piece.numel].copy_(exchange.shard[piece.data : piece.data + piece.numel])
        if factor != 1:
            output.mul_(factor)

    def _trained(self) -> list[_Part]:
        return [part for part in self.parts if part.sharded.requires_grad]

    def _exchange(self, dtype: torch.dtype, device: torch.device, trained: Sequence[_Part]) -> BucketExchange:
        if dtype not in native.DTYPES:
            raise GradcompError(f"gradients of {dtype} are not packed; float32, bfloat16 and float16 are")
        kind = dtype, device, tuple(part.number for part in trained)
        if kind not in self._exchanges:
            self._exchanges[kind] = BucketExchange(
                self._plan(trained), self._comm, dtype, self._stats, seed=self._codec.seed, timeout_s=self._comm.timeout_s, device=device
            )
        return self._exchanges[kind]

    def _plan(self, trained: Sequence[_Part]) -> BucketPlan:
        world = self._comm.world_size
        each = sum(_numel(part.chunks[0]) for part in trained)
        slots = []
        for rank in range(world):
            offset = rank * each
            for part in trained:
                p = part.parameter
                slots.append(Slot(part.number * world + rank, _numel(part.chunks[rank]), p.group_numel, p.compressed, offset))
                offset += _numel(part.chunks[0])
        strategy = Strategy("reduce_scatter", "fp32")
        return BucketPlan(self._codec, slots, strategy, world, self._comm.rank, ownership=BySlots(world), stays=True)


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _check(codec: Codec, options: Options) -> None:
    if codec.error_feedback or codec.gathers_only:
        raise ValueError(
            f"{codec!r} keeps residuals as large as whole gradients, which FSDP is there to avoid: take Ternary() or Identity('bf16')"
        )
    defaults = Options()
    for name in ("start_step", "start_codec", "exchange", "transform", "precondition", "grad_scaler", "transactional", "slice_numel"):
        if getattr(options, name) != getattr(defaults, name):
            raise ValueError(f"{name}={getattr(options, name)!r} is of exchanges of whole gradients; FSDP's reduce-scatter has none")


def _agree(comm: TorchCommunicator, codec: Codec, options: Options, described: Sequence[Parameter]) -> None:
    agree_on_words(
        comm,
        {
            "codec": codec,
            "min_numel": options.min_numel,
            "parameters": [(p.name, p.shape, p.compressed) for p in described],
        },
        comm.timeout_s,
        "setup",
        called="gradcomp.fsdp.compress",
    )
