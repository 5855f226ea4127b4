"""The compressed collectives of all modules of a `fully_shard` model: registration, waits at the
end of backward, and checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradcomp.codecs import Codec, Identity, TernGrad, resolve
from gradcomp.comm import torch_private
from gradcomp.comm.torchdist import (
    TorchCommunicator,
    all_gather,
    divisor,
    group_rank,
    group_size,
    read_checkpoint,
    reduce_scatter,
)
from gradcomp.engine.buckets import check_layers, poison
from gradcomp.engine.options import Options
from gradcomp.engine.watch import NOT_CALLED, OR_TWICE, Growth, Mine, Steps, before_any_step, remove
from gradcomp.errors import GradcompError, PeerMismatch
from gradcomp.exchange.agree import agree
from gradcomp.exchange.gather import BufferPool
from gradcomp.exchange.pipeline import InlinePipeline
from gradcomp.exchange.quality import Probe, Quality
from gradcomp.exchange.stats import Stats
from gradcomp.exchange.telemetry import Telemetry
from gradcomp.fsdp.parts import (
    Part,
    claim,
    described,
    number_of,
    owner_of,
    parts_of,
    release,
    sharded_modules,
)
from gradcomp.fsdp.reduce import ReduceScatter, allocator
from gradcomp.fsdp.residuals import ModelResiduals
from gradcomp.fsdp.weights import AllGather, Forward
from gradcomp.kernels import empty
from gradcomp.kernels.staging import Shared
from gradcomp.memory.saved import Saved, check_step, odd_key, write
from gradcomp.payload.parameters import Parameter

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("gradcomp")


class FsdpState:
    """The state that `register` returns: statistics, residuals, and the step counters that random
    numbers depend on.

    It is a ``Stateful`` of ``torch.distributed.checkpoint``.

    Attributes:
        codec: codec of gradients.
        weights: codec of weights; None if they are not compressed.
        stats: bytes and seconds of gradients; a step is one module's reduce-scatter.
        weights_stats: bytes and seconds of weights; a step is one module's all_gather.
        plain: number of reduce-scatters that torch did without compression, for example because a
            parameter of the module had no gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        codec: Codec,
        options: Options,
        *,
        weights: Codec | None = None,
        keep_weights: bool = False,
        residuals: str = "fp32",
        chosen: str = "",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        check_layers(model)
        if keep_weights and weights is None:
            raise ValueError(
                "keep_weights=True keeps packed weights: say how they are packed, weights='block8'"
            )
        self.codec, self.weights, self._options, self._chosen = codec, weights, options, chosen
        self.stats, self.weights_stats, self.plain = Stats(), Stats(), 0
        self._residuals = ModelResiduals(residuals, can_discard=options.grad_scaler is not None)
        # of this backward pass: the loss scale, and the communicators of its modules
        self._loss_scale: float | None = None
        self._used: set[TorchCommunicator] = set()
        self._names: dict[int, str] = {}  # parameter names by slot position of each chunk
        self._probe = Probe(options.advanced.quality_every, self._names)
        self._model = weakref.ref(model)
        self._comms: dict[int, TorchCommunicator] = {}  # by process group
        self._reduces: list[ReduceScatter] = []
        self._gathers: list[Any] = []  # modules whose all_gather of weights was replaced
        self._pipeline = InlinePipeline(self._abort)
        # number of the last backward pass for which `_end_backward` was queued
        self._called_back = -1
        self._alone: list[Part] = []  # parameters in groups of one rank
        # loaded residuals to add to the next gradients of `_alone`, by name
        self._to_add: dict[str, Tensor] = {}
        self._reports: list[Telemetry] = []
        self._hooks: list[Any] = []
        # steps of each reduce-scatter before the backward pass that is in progress
        self._steps_before: list[tuple[ReduceScatter, int]] = []
        self._backwards = self._calls = 0
        self._has_warned = False
        sharded = sharded_modules(model)
        self._modules = [one.module for one in sharded]
        self._split = any(one.is_split for one in sharded)
        self._forward = Forward() if keep_weights else None
        claim(self._modules, self)
        try:
            self._replace_collectives(model, sharded, options)
        except BaseException:
            self.close()
            raise
        watched = Mine(p for one in sharded if one.group.size() > 1 for p in one.parameters)
        self._steps = Steps(watched, lambda: self._calls, self._missed)
        self._hooks += [
            before_any_step(watched, self._before_step),
            model.register_forward_pre_hook(self._keep_alive),
        ]
        if self._residuals.nbytes > 1e6:
            logger.warning(
                "gradcomp: residuals of %r take %.0f MB on every rank, which sharding does not"
                " divide ('bf16' takes half of 'fp32')",
                codec,
                self._residuals.nbytes / 1e6,
            )
        packed = [part for one in self._reduces for part in one.parts if part.parameter.compressed]
        noisy = isinstance(codec, TernGrad) and group_rank() == 0
        self._growth = Growth((lambda: [part.sharded for part in packed]) if noisy else None)
        if group_rank() == 0:
            logger.info(self.describe())

    def _replace_collectives(
        self, model: nn.Module, sharded: Sequence[torch_private.Sharded], options: Options
    ) -> None:
        """Replace torch's collectives by compressed ones in every FSDP module."""
        names = {id(p): name for name, p in model.named_parameters()}
        called = {id(module): name for name, module in model.named_modules()}
        wholes = [
            (names[id(p)], shape)
            for one in sharded
            for p, shape in zip(one.parameters, one.shapes, strict=True)
        ]
        gradients = described(wholes, self.codec, options)
        warm_up = Identity() if options.warmup_codec is None else resolve(options.warmup_codec)
        values = described(wholes, self.weights, options) if self.weights is not None else {}
        pool, reused, staged = BufferPool(), torch_private.ReusedTensors(empty), Shared()
        for one in sharded:
            own = [names[id(p)] for p in one.parameters]
            parts = parts_of(one, own, gradients)
            self._names |= {i: part.parameter.name for part in parts for i in part.slot_indices}
            if one.group.size() == 1:  # FSDP sends nothing
                self._alone += parts
                continue
            comm = self._comms.get(id(one.group))
            if comm is None:
                comm = TorchCommunicator(one.group, timeout_s=options.timeout_s)
                self._comms[id(one.group)] = comm
                self._agree(comm, options, [gradients[name] for name, _ in wholes])
            feeds_back = self.codec.error_feedback or warm_up.error_feedback
            name = called[id(one.module)] or "(the model)"
            reduce = ReduceScatter(
                one.module,
                name,
                parts,
                (warm_up, self.codec),
                options.warmup_steps,
                comm,
                self.stats,
                self._probe,
                staged,
                self._residuals.add(parts) if feeds_back else None,
            )
            self._reduces.append(reduce)
            torch_private.reduce_scatter_by(
                one.module, self._reduce_by(reduce, comm), allocator(reused, reduce)
            )
            if self.weights is None:
                if torch_private.follow_all_gather(one.module, self._follow_by(comm)):
                    self._gathers.append(one.module)
                continue
            if self._forward is not None:
                self._hooks.append(self._forward.watch(one.module))
            gather = AllGather(
                one.module,
                parts_of(one, own, values),
                self.weights,
                comm,
                self.weights_stats,
                pool,
                self._forward,
            )
            self._gathers.append(one.module)
            call = self._gather_by(gather, comm)
            torch_private.all_gather_by(one.module, call, allocator(reused))

    def _agree(
        self, comm: TorchCommunicator, options: Options, parameters: Sequence[Parameter]
    ) -> None:
        """Raise PeerMismatch unless all ranks of a group have the same parameters and options."""
        values = {
            "codec": self.codec,
            "weights": self.weights,
            "keep_weights": self._forward is not None,
            "residuals": repr(self._residuals.dtype),
            "min_numel": options.min_numel,
            "warmup_steps": options.compared()["warmup_steps"],
            "atomic_steps": int(options.is_atomic),
            "parameters": [(p.name, p.shape, p.compressed) for p in parameters],
        }
        called = "gradcomp.fsdp.register"
        with comm.lease(called) as lease:
            agree(lease, values, comm.timeout_s, called=called, phase="setup")

    def _any_overflows(self, loss_scale: float) -> bool:
        """Whether a gradient is NaN or Inf on this rank or on one with which it shares a module.
        Raise PeerMismatch unless these ranks have the same loss scale.
        """
        grads: list[Any] = [p.grad for p in self._trained_parameters() if p.grad is not None]
        overflows = not all(bool(grad.to_local().isfinite().all()) for grad in grads)
        called = "backward of a loss that a grad_scaler has scaled"
        for comm in self._comms.values():
            if comm in self._used:
                values = {"loss_scale": loss_scale, "overflows": int(overflows)}
                with comm.lease(called) as lease:
                    records = agree(
                        lease,
                        values,
                        comm.timeout_s,
                        called=called,
                        ignored="overflows",
                        phase="outcome",
                    )
                overflows = any(record[3] for record in records)
        return overflows

    def _reduce_by(self, module: ReduceScatter, comm: TorchCommunicator) -> Any:
        def call(output: Tensor, given: Tensor, group: Any, op: Any) -> None:
            self._calls += 1
            self._check_modules()
            number = torch_private.graph_task()
            if number != self._called_back:
                self._begin_backward()
                self._called_back = number
                torch_private.after_backward(self._end_backward)
            self._used.add(comm)
            factor = divisor(op, group.size())
            if factor is None or not module.fits(given.numel()):
                self._pipeline.wait()
                self._warn_plain(
                    "is divided by a factor of its own"
                    if factor is None
                    else "lacks that of some parameter"
                )
                self.plain += 1
                reduce_scatter(comm, output, given, group, op)
                return
            if module.is_under_way:  # left over from a backward pass that failed
                self._pipeline.wait()
            self._pipeline.submit(module.start(output, given, factor))
            reads_at_once = factor != 1 or not torch_private.leaves_shards_alone(
                module.module, given.dtype
            )
            if reads_at_once or self._pipeline.error is not None:
                self._pipeline.wait()

        return self._poisoned_on_failure()(call)

    def _gather_by(self, module: AllGather, comm: TorchCommunicator) -> Any:
        def call(output: Tensor, given: Tensor, group: Any) -> Callable[[], None] | None:
            if not module.fits(given, group.size()):
                all_gather(comm, output, given, group)
                return None
            return self._poisoned_on_failure()(module.start(output, given))

        return self._poisoned_on_failure()(call)

    def _follow_by(self, comm: TorchCommunicator) -> Any:
        def call(start: Callable[[], Any], group: Any) -> Callable[[], None]:
            return self._poisoned_on_failure()(comm.follow(start, group))

        return self._poisoned_on_failure()(call)

    def log_to(self, target: Any, *, every: int = 10, prefix: str = "gradcomp") -> None:
        """Report `stats` and `quality` to `target`; see `gradcomp.ddp.CompressionState.log_to`.
        Values per step are per reduce-scatter of a module; `every` counts backward passes.
        """
        self._reports.append(Telemetry(target, lambda: self.stats, self.quality, every, prefix))

    def quality(self) -> Quality:
        """Return the quality of this rank's codes in the latest sample, per unsharded parameter.
        One in 100 reduce-scatters of each module is sampled.
        """
        return self._probe.report()

    def discard_step(self) -> None:
        """Roll back residuals to the last step of an optimizer. Call this when you discard the
        gradients of a step, unless a `grad_scaler` does because they are NaN or Inf.

        Raises:
            GradcompError: there are residuals and no `grad_scaler`, so they were written over.
        """
        if self._residuals.nbytes and self._options.grad_scaler is None:
            raise GradcompError(
                "without grad_scaler= FSDP2 keeps one copy of residuals, which the last backward"
                " pass has written over: pass grad_scaler to gradcomp.fsdp.register"
            )
        self._residuals.discard()

    def _begin_backward(self) -> None:
        loss_scale = self._options.loss_scale()
        if loss_scale != self._loss_scale:
            self._pipeline.wait()  # for what a backward pass that failed has left, with its scale
            self._residuals.scale_by(loss_scale or 1.0)
        self._loss_scale = loss_scale
        self._growth.look(self._backwards)
        self._used.clear()
        self._steps_before = [(one, one.steps) for one in self._reduces]

    def _end_backward(self) -> None:
        with self._poisoned_on_failure():
            self._pipeline.wait()
            if self._loss_scale is not None and self._any_overflows(self._loss_scale):
                self._residuals.discard()  # the scaler skips this step
        self._steps_before.clear()
        self._backwards += 1
        for report in self._reports:
            report.step(self._backwards)

    @contextlib.contextmanager
    def _poisoned_on_failure(self) -> Iterator[None]:
        """Raise the error of an earlier failure, if there is one. If the block raises, fill all
        gradients with NaN, so that no optimizer can apply partial averages, and notify the other
        ranks of an error of gradcomp. Replaces module numbers in a PeerMismatch by names.
        """
        try:
            self._pipeline.check()
            yield
        except BaseException as error:
            poison(self._trained_parameters())
            if self._residuals.can_discard:
                self._residuals.discard()
            for one, steps in self._steps_before:
                one.steps = steps
            if isinstance(error, GradcompError):
                self._pipeline.fail(error)
            if isinstance(error, PeerMismatch) and error.field == "module":
                names: dict[object, str] = {number_of(one.parts): one.name for one in self._reduces}
                expected, got = (names.get(n, n) for n in (error.expected, error.got))
                raise PeerMismatch("module", error.rank, expected, got) from error
            raise

    def _abort(self, reason: str) -> None:
        for comm in self._comms.values():
            comm.abort(reason)

    def _trained_parameters(self) -> list[nn.Parameter]:
        parts = [*self._alone, *(part for module in self._reduces for part in module.parts)]
        return [part.sharded for part in parts if part.sharded.requires_grad]

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # torch has ended the backward pass with an error: `_end_backward` did not run
        if not self._pipeline.is_empty and torch_private.graph_task() < 0:
            poison(self._trained_parameters())
        self._steps.check(optimizer, args, kwargs)
        self._residuals.begin_step()

    def _check_modules(self) -> None:
        """Raise GradcompError at the first reduce-scatter if modules were sharded after `register`:
        their gradients would not be compressed.
        """
        model = self._model()
        if self._calls > 1 or model is None:
            return
        late = [
            type(one.module).__name__
            for one in torch_private.sharded_modules(model)
            if owner_of(one.module) is not self
        ]
        if late:
            raise GradcompError(
                f"fully_shard came after gradcomp.fsdp.register for {len(late)} modules ({late[0]},"
                " ...): shard all of them first"
            )

    def _keep_alive(self, *_: Any) -> None:
        """Do nothing. As a hook it keeps this state alive as long as the model."""

    def _missed(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"{NOT_CALLED}: FSDP2 used its own uncompressed reduce-scatter, because"
            " set_custom_reduce_scatter was called after gradcomp.fsdp.register:"
            f" call register last. {OR_TWICE}",
            stacklevel=6,
        )

    def _warn_plain(self, why: str) -> None:
        if not self.plain:
            warnings.warn(
                f"the gradient of an FSDP module {why} in this step: torch sends it uncompressed",
                stacklevel=2,
            )

    def describe(self) -> str:
        """Return one line of text: codec, compressed parameters, ranks, warm-up, weights, and why
        "auto" took this codec.
        """
        parts = [part for module in self._reduces for part in module.parts]
        packed = sum(part.parameter.compressed for part in parts)
        ranks = (
            " and ".join(map(str, sorted({comm.world_size for comm in self._comms.values()})))
            or "1"
        )
        text = (
            f"{self.codec!r}: {packed} of {len(parts)} parameters of {len(self._reduces)} FSDP"
            f" modules packed, over {ranks} ranks"
        )
        if self._options.warmup_steps:
            first = self._options.warmup_codec or Identity()
            text += f", from step {self._options.warmup_steps} on ({first!r} before it)"
        kept = ", which backward takes from forward" if self._forward is not None else ""
        gathered = f"weights gathered as {self.weights!r}{kept}" if self.weights is not None else ""
        return "; ".join(filter(None, [text, gathered, self._chosen]))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, for a bitwise equal continuation together with model and
        optimizer. Its keys differ between ranks, so one file can have the states of all ranks.
        """
        steps = sorted(
            [part.parameter.name, module.steps] for module in self._reduces for part in module.parts
        )
        return write(
            self._origin(),
            group_rank(),
            group_size(),
            max((module.steps for module in self._reduces), default=0),
            {"residual": self._residuals.state()},
            steps=steps,
        )

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Load the `state_dict` of this rank, or a list of the state dicts of all ranks of a run,
        which may have had another number of ranks: then each rank gets the mean of their residuals.
        A single rank, which sends nothing, adds residuals to its next gradients.

        Raises:
            ValueError: not such a state; a state of another model, codec or number of ranks; or the
                state of a rank is missing.
        """
        self._load(Saved.of(state))

    def load(self, checkpoint_id: str, prefix: str = "gradcomp") -> None:
        """Load a ``torch.distributed.checkpoint`` that was saved by any number of ranks.

        With the same number of ranks ``torch.distributed.checkpoint.load({prefix: state, ...})``
        does the same.

        Args:
            checkpoint_id: folder of the checkpoint.
            prefix: key of this state in the checkpoint.

        Raises:
            ValueError: see `load_state_dict`; no such folder or key.
        """
        part, ranks = f"{prefix}.ranks.", set()

        def is_wanted(key: str) -> bool:
            if key.startswith(part):
                ranks.add(key.removeprefix(part).partition(".")[0])
                return False
            return key.startswith(f"{prefix}.")

        head = read_checkpoint(checkpoint_id, is_wanted, f"{prefix}.")

        def read(rank: str) -> dict[str, Any]:
            values = f"{part}{rank}."  # only one rank's residuals are in memory at a time
            return read_checkpoint(checkpoint_id, lambda key: key.startswith(values), values)

        self._load(Saved(head, ranks, read))

    def _load(self, saved: Saved) -> None:
        """Load steps and residuals: this rank's, or the mean of all ranks'. A single rank adds
        residuals to its next gradients.
        """
        saved.check_origin(self._origin())
        names = {part.parameter.name for module in self._reduces for part in module.parts}
        steps = _read_steps(saved.extra.get("steps"), names)
        residuals, size = self._residuals, group_size()
        may_add = bool(self._alone) and not self._reduces and self.codec.error_feedback
        saved_residuals: Iterable[Mapping[str, Tensor]] = ()
        if may_add or residuals.nbytes:
            if self._split and saved.world_size != size:
                raise ValueError(
                    f"residuals of {saved.world_size} ranks with tensor parallelism do not fit"
                    f" {size}: resume with as many, on the same mesh"
                )
            saved_residuals = (
                parts.get("residual", {}) for parts in saved.of_ranks(group_rank(), size)
            )
            if not steps:  # saved by a single rank, which may have residuals to add
                saved_residuals = [residual for residual in saved_residuals if residual]
        adds = may_add and bool(steps or saved_residuals)
        if adds:
            residuals = ModelResiduals(residuals.dtype)
            alone = residuals.add(self._alone)
        if residuals.nbytes:
            residuals.load(saved_residuals)
        self._steps_before.clear()  # of a backward pass that failed before the state was loaded
        for module in self._reduces:
            module.steps = max(steps.get(part.parameter.name, 0) for part in module.parts)
        if adds:
            self._residuals, self._to_add = residuals, {}
            for part in alone.parts:
                sharded: Any = part.sharded
                if sharded.requires_grad:
                    self._to_add[part.parameter.name] = alone.current(part.slot_indices[0])
                    add = partial(self._add_residual, part)
                    self._hooks.append(sharded.register_post_accumulate_grad_hook(add))

    def _add_residual(self, part: Part, p: Any) -> None:
        """Add a parameter's loaded residual to its next gradient, once."""
        residual = self._to_add.pop(part.parameter.name, None)
        if residual is None:
            return
        grad = p.grad.to_local()
        scale = self._options.loss_scale() or 1.0
        grad.add_(residual.view(part.parameter.shape).to(grad.device), alpha=scale)
        residual.zero_()
        if not self._to_add:
            self._residuals = ModelResiduals(self._residuals.dtype)

    def _origin(self) -> dict[str, object]:
        return {"kind": "fsdp", "codec": repr(self.codec)}

    def close(self) -> None:
        """Restore torch's own reduce-scatter and all_gather, and close the communicators. Further
        calls do nothing.
        """
        if not self._pipeline.closed:
            for comm in self._comms.values():
                comm.close()
            self._pipeline.close()
            release(self._modules)
            remove(self._hooks)
            for reduce in self._reduces:
                torch_private.reduce_scatter_as_before(reduce.module)
            for module in self._gathers:
                torch_private.all_gather_as_before(module)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_steps(saved_steps: Any, names: Collection[str]) -> dict[str, int]:
    """Return the steps of a state by parameter name. Raise ValueError unless the names are `names`;
    a state of a single rank, which exchanges nothing, has no steps.
    """
    try:
        steps = dict(saved_steps)
    except (TypeError, ValueError):
        steps = None
    if steps is None or len(steps) != len(saved_steps):
        message = (
            f"this state's steps must be pairs of name and step, each name once: {saved_steps!r}"
        )
        raise ValueError(message[:200])
    for name, step in steps.items():
        check_step(step, of=f" of {name!r}")
    if steps and names and steps.keys() != set(names):
        raise ValueError(f"this state is of other parameters: {odd_key(steps, names)}")
    return steps
