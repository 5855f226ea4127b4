"""All modules of a `fully_shard` model: what is theirs to exchange, when it is waited for, and what a run goes on with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gradcomp.codecs import Codec
from gradcomp.comm import torch_private
from gradcomp.comm.torchdist import TorchCommunicator, all_gather, divisor, reduce_scatter
from gradcomp.engine.agree import agree_on_words
from gradcomp.engine.options import Options
from gradcomp.exchange.gathered import Rooms
from gradcomp.exchange.stats import Stats
from gradcomp.fsdp.reduce import Part, ReduceScatter
from gradcomp.fsdp.weights import AllGather
from gradcomp.payload.parameters import Parameter, describe_parameters

if TYPE_CHECKING:
    from typing_extensions import Self

STATE_VERSION = 1


class FsdpState:
    """What `compress` has made of a model: what was sent, and the step that random numbers depend on.

    Attributes:
        codec: of gradients.
        weights: of weights, None where they travel as they are.
        stats: bytes and seconds of gradients; a step is one module's reduce-scatter.
        weights_stats: the same of weights; a step is one module's all_gather.
        plain: reduce-scatters that torch did after all, because some parameter of their module had no gradient, say.
    """

    def __init__(self, model: nn.Module, codec: Codec, options: Options, *, weights: Codec | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        _check(codec, options)
        self.codec, self.weights = codec, weights
        self.stats, self.weights_stats, self.plain = Stats(), Stats(), 0
        sharded = torch_private.sharded_modules(model)
        if not sharded:
            raise TypeError("no module of this model is wrapped by torch.distributed.fsdp.fully_shard; for DDP there is gradcomp.ddp.register")
        names = {id(p): name for name, p in model.named_parameters()}
        wholes = [(names[id(p)], shape) for one in sharded for p, shape in zip(one.parameters, one.shapes, strict=True)]
        order = {name: n for n, name in enumerate(sorted(name for name, _ in wholes))}
        gradients = _described(wholes, codec, options)
        values = _described(wholes, weights, options) if weights is not None else {}
        self._comms: list[TorchCommunicator] = []
        self._reduces: list[ReduceScatter] = []
        self._gathers: list[AllGather] = []
        self._pending: list[ReduceScatter] = []
        self._called_back = -1  # number of the backward pass at whose end pending averages are waited for
        self._closed = False
        groups: dict[int, TorchCommunicator] = {}
        rooms = Rooms()
        try:
            for one in sharded:
                if one.group.size() == 1:  # FSDP itself sends nothing then
                    continue
                comm = groups.get(id(one.group))
                if comm is None:
                    comm = groups[id(one.group)] = TorchCommunicator(one.group, timeout_s=options.timeout_s)
                    self._comms.append(comm)
                    _agree(comm, codec, weights, options, gradients)
                own = [names[id(p)] for p in one.parameters]
                self._reduces.append(ReduceScatter(one.module, _parts(one, own, order, gradients), codec, comm, self.stats))
                torch_private.reduce_scatter_by(one.module, self._reduce_by(self._reduces[-1]))
                if weights is not None:
                    self._gathers.append(AllGather(one.module, _parts(one, own, order, values), weights, comm, self.weights_stats, rooms))
                    torch_private.all_gather_by(one.module, self._gather_by(self._gathers[-1]))
        except BaseException:
            self.close()
            raise

    def _reduce_by(self, module: ReduceScatter) -> Any:
        def call(output: Tensor, given: Tensor, group: Any, op: Any) -> None:
            self._finish()  # what went out before has had this module's backward to arrive
            factor = divisor(op, group.size())
            if factor is None or not module.fits(given):
                self._say_plain("is divided by a factor of its own" if factor is None else "lacks that of some parameter")
                self.plain += 1
                reduce_scatter(output, given, group, op)
                return
            module.start(output, given, factor)
            self._pending.append(module)
            if factor == 1 and module.comes_late(given.dtype):
                self._finish_after_backward()
            else:
                self._finish()

        return call

    def _gather_by(self, module: AllGather) -> Any:
        def call(output: Tensor, given: Tensor, group: Any) -> Callable[[], None] | None:
            if module.fits(given, group.size()):
                return module.start(output, given)
            all_gather(output, given, group)
            return None

        return call

    def _finish_after_backward(self) -> None:
        number = torch_private.graph_task()
        if number != self._called_back:
            self._called_back = number
            torch_private.after_backward(self._finish)

    def _finish(self) -> None:
        pending, self._pending = self._pending, []
        for module in pending:
            module.finish()

    def _say_plain(self, why: str) -> None:
        if not self.plain:
            warnings.warn(f"the gradient of an FSDP module {why} in this step: it travels as torch sends it", stacklevel=2)

    def describe(self) -> str:
        """Return one line: how what travels."""
        parts = [part for module in self._reduces for part in module.parts]
        packed = sum(part.parameter.compressed for part in parts)
        ranks = " and ".join(str(size) for size in sorted({comm.world_size for comm in self._comms})) or "1"
        said = f"{self.codec!r}: {packed} of {len(parts)} parameters of {len(self._reduces)} FSDP modules packed, over {ranks} ranks"
        return said if self.weights is None else f"{said}; weights gathered as {self.weights!r}"

    def state_dict(self) -> dict[str, Any]:
        """Return what every rank needs beside model and optimizer: the run goes on bit for bit if all modules have exchanged equally often."""
        return {"version": STATE_VERSION, "steps": max((module.steps for module in self._reduces), default=0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, of any wrapping and number of ranks.

        Raises:
            ValueError: no such state.
        """
        steps = state.get("steps")
        if state.get("version") != STATE_VERSION or isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"not a state of gradcomp.fsdp that this version knows: {state!r}"[:200])
        for module in self._reduces:
            module.steps = steps

    def close(self) -> None:
        """Give torch's own reduce-scatter and all_gather back and close the communicators; closing twice is harmless."""
        if not self._closed:
            self._closed = True
            for reduce in self._reduces:
                torch_private.reduce_scatter_as_before(reduce.module)
            for gather in self._gathers:
                torch_private.all_gather_as_before(gather.module)
            for comm in self._comms:
                comm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _described(wholes: Sequence[tuple[str, tuple[int, ...]]], codec: Codec, options: Options) -> dict[str, Parameter]:
    return {p.name: p for p in describe_parameters(wholes, codec.group_numel, options.min_numel, options.exempts)}


def _parts(one: torch_private.Sharded, names: Sequence[str], order: dict[str, int], known: dict[str, Parameter]) -> list[Part]:
    return [Part(known[name], order[name], p, chunks) for name, p, chunks in zip(names, one.parameters, one.chunks, strict=True)]


def _check(codec: Codec, options: Options) -> None:
    if codec.error_feedback or codec.gathers_only:
        raise ValueError(
            f"{codec!r} keeps residuals as large as whole gradients, which FSDP is there to avoid: take Ternary() or Identity('bf16')"
        )
    defaults = Options()
    for name in ("start_step", "start_codec", "exchange", "transform", "precondition", "grad_scaler", "transactional", "slice_numel"):
        if getattr(options, name) != getattr(defaults, name):
            raise ValueError(f"{name}={getattr(options, name)!r} is of exchanges of whole gradients; FSDP's reduce-scatter has none")


def _agree(comm: TorchCommunicator, codec: Codec, weights: Codec | None, options: Options, described: dict[str, Parameter]) -> None:
    agree_on_words(
        comm,
        {
            "codec": codec,
            "weights": weights,
            "min_numel": options.min_numel,
            "parameters": [(p.name, p.shape, p.compressed) for p in described.values()],
        },
        comm.timeout_s,
        "setup",
        called="gradcomp.fsdp.compress",
    )
