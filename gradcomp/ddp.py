"""Communication hook for DistributedDataParallel: one line after `DistributedDataParallel(...)`."""

# DDP inspects the annotations of a hook, which must be classes: no postponed evaluation in this
# file.

import functools
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradcomp.codecs import Codec
from gradcomp.comm import torch_private
from gradcomp.comm.base import Communicator
from gradcomp.comm.torchdist import OF_TORCH, TorchCommunicator, same_ranks
from gradcomp.engine.buckets import Gradient, check_layers, poison, refuse_sparse
from gradcomp.engine.controls import Controls
from gradcomp.engine.layouts import Members
from gradcomp.engine.optimizers import check_optimizers, listed
from gradcomp.engine.options import Advanced, CommonOptions, takes
from gradcomp.engine.step import Engine, Step
from gradcomp.engine.watch import Newcomers
from gradcomp.errors import GradcompError, PeerLost
from gradcomp.optim import SplitOptimizer
from gradcomp.optim.fused import FusedGradients, agree_on_optimizers, replicated, why_not_fused
from gradcomp.payload.order import storage_order, storage_view

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("gradcomp")
_ONCE = "DDP keeps its first hook for good; wrap the module in a new DistributedDataParallel"
# parts of the error messages of gloo and the store about a lost or silent rank
LOST_SIGNS = (
    "onnection closed",
    "onnection reset",
    "roken pipe",
    "imed out waiting",
    "imeout waiting",
    "ait timeout",
    "imed out after",
)


class _Detached:
    """Stands in for the engine in the state of a copied model; every use raises GradcompError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise GradcompError(
            "this is the state of a copy of a model (deepcopy, pickle, torch.save): it compresses"
            f" nothing and has no {name}; ask the state of the model that trains, or register the"
            " copy itself"
        )


class CompressionState(Controls):
    """State of one model's communication hook: codec, residuals, pipeline, statistics.

    `register` creates and registers it. Without `register` use
    ``model.register_comm_hook(CompressionState(model, "ternary"), compression_hook)``. Arguments
    and errors are those of `register`. A state belongs to one model.
    """

    _detached = False
    _handled: BaseException | None = None
    _task = -1  # number of the backward pass whose step has not finished; -1: none
    _count = 0  # buckets so far in this backward pass

    @takes(CommonOptions)
    def __init__(
        self,
        model: nn.parallel.DistributedDataParallel,
        codec: Codec | str = "auto",
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        comm: Communicator | None = None,
        advanced: Advanced | None = None,
        **common: "Unpack[CommonOptions]",
    ) -> None:
        from gradcomp.plan.advice import resolve_auto, warning_of

        if not isinstance(model, nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"model must be wrapped in DistributedDataParallel, got {_kind_of(model)}"
            )
        _check_dtypes(model)
        check_layers(model.module, model.parameters_to_ignore)
        taken = torch_private.taken_hook(model)
        if any(
            isinstance(state, CompressionState) and not state._detached
            for state in torch_private.hook_states(model)
        ):
            raise ValueError(f"this model is registered with gradcomp already: {_ONCE}")
        if taken:
            raise ValueError(f"this model has no communication hook left for gradcomp: {taken}")
        named = _averaged(model)
        sources = [Gradient(name, p) for name, p in named]
        optimizers = listed(optimizer)
        codec, options, chosen, guarded, faster = resolve_auto(
            codec, common, advanced, optimizers, sources, model.process_group.size()
        )
        self._known = {
            id(p): (position, p.numel(), p.stride()) for position, (_, p) in enumerate(named)
        }
        self._places: set[Members] = set()  # bucket layouts whose memory order was checked
        check_optimizers(optimizers, [p for _, p in named])
        own_comm = (
            comm
            if comm is not None
            else TorchCommunicator(model.process_group, timeout_s=options.timeout_s)
        )
        try:
            same_ranks(
                own_comm, model.process_group, timeout_s=options.timeout_s or own_comm.timeout_s
            )
            self._engine = Engine(
                sources, codec, own_comm, options, chosen, guarded=guarded, faster=faster
            )
            self._engine.scale_lr_of(optimizers)
            self._step = Step(self._engine)  # an empty step
            self._fused = self._fuse(optimizers, has_scaler=options.grad_scaler is not None)
        except BaseException:
            if "_engine" in vars(self):
                self._engine.close(keep_comm=True)
            if comm is None:
                own_comm.close()
            raise
        self._finds_unused = bool(model.find_unused_parameters)
        self._ranks = tuple(dist.get_process_group_ranks(model.process_group))
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        self._newcomers = Newcomers(model.module)
        self._watch_steps(p for _, p in named)
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]
        if own_comm.rank == 0:
            logger.info(self.describe())
            lossy = warning_of(self._engine.codec, options, optimizers, own_comm.world_size)
            if lossy is not None and own_comm.world_size > 1:
                logger.warning(lossy)

    def _fuse(self, optimizers: Sequence[Any], *, has_scaler: bool) -> FusedGradients | None:
        """Let a split optimizer update weights from payloads, if possible; otherwise return None.
        Raises PeerMismatch unless the state of split optimizers is the same on all ranks.
        """
        engine = self._engine
        self._not_fused = why_not_fused(optimizers, engine, has_scaler=has_scaler)
        packed = bool(optimizers) and not self._not_fused
        if packed:
            engine.layouts.keeps_packed = True
        split = [one for one in optimizers if isinstance(one, SplitOptimizer)]
        if split:
            engine.replicas.more = lambda: replicated(split, engine)
            agree_on_optimizers(split, engine, self._not_fused)
        return FusedGradients(engine, optimizers[0]) if packed else None

    def describe(self) -> str:
        """Return one line of text: what is compressed, what is not, the exchange, the expected
        ratio, and whether updates are fused.
        """
        line = self._engine.describe()
        if self._fused is not None:
            line += "; updates go straight from payloads to weights"
        return f"{line}; updates are not fused: {self._not_fused}" if self._not_fused else line

    def materialize_gradients(self) -> None:
        """Decode the averaged gradients of the last backward into every `p.grad`, unless that has
        been done.

        For code that reads or changes gradients before ``optimizer.step()``, such as a mask or a
        loss scaler. The step then uses `p.grad`.
        """
        if self._fused is not None:
            self._fused.materialize()

    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the L2 norm of the model's gradients, packed or not, like
        `torch.nn.utils.clip_grad_norm_`.

        Packed gradients stay packed: their norm is computed from the payloads, and
        ``optimizer.step()`` multiplies them by ``max_norm / (norm + 1e-6)`` in float32 if that is
        below 1. The norm is bitwise equal on all ranks.

        Args:
            max_norm: largest norm, not negative.
            error_if_nonfinite: if the norm is NaN or Inf, raise and change nothing.

        Returns:
            The norm before clipping, a float32 scalar on the gradients' device.

        Raises:
            ValueError: `max_norm` is negative or NaN.
            RuntimeError: see `error_if_nonfinite`.
            GradcompError: a packed gradient was written to.
        """
        limit = float(max_norm)
        if not limit >= 0:
            raise ValueError(f"max_norm must not be negative, got {max_norm!r}")
        if self._fused is not None:
            norm = self._fused.clip(limit, error_if_nonfinite=error_if_nonfinite)
            return torch.tensor(norm, device=self._engine.layouts.device)
        trained = [p for _, p in self._engine.named]
        return nn.utils.clip_grad_norm_(trained, limit, error_if_nonfinite=error_if_nonfinite)

    def check_replicas(self) -> tuple[int, ...]:
        """See `Controls.check_replicas`; return the ranks that were compared, by their numbers in
        the default process group.
        """
        super().check_replicas()
        return self._ranks

    def close(self) -> None:
        """Stop the threads and release the process groups. The model cannot be trained after it."""
        if not self._detached:
            self._give_back(keep_comm=False)

    def _give_back(self, *, keep_comm: bool) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._fused is not None:
            self._fused.close()
        self._engine.close(keep_comm=keep_comm)

    def __repr__(self) -> str:
        if self._detached:
            return "<CompressionState of a copy: off>"
        return f"<CompressionState {self.describe()}>"

    # ---- the hook --------------------------------------------------------------------------------

    def handle(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a bucket (`torch.distributed.GradBucket`, its buffer ``(numel,)`` float32,
        bfloat16 or float16) in place; return a future that completes with its buffer.
        """
        buffer = bucket.buffer()
        # DDP's stream waits for what has been queued when the future completes
        devices = [] if buffer.is_cpu else [buffer.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        engine, task = self._engine, torch_private.graph_task()
        in_backward = task != -1
        # in the first backward of a static graph every bucket has index 0, and none is the last
        is_more = in_backward and bucket.index() == 0 and task == self._task
        # DDP launches buckets in order, also in inner backward passes of checkpointing
        is_first = bucket.index() == 0 and not is_more
        self._count = 1 if is_first else self._count + 1
        is_second = is_more and self._count == 2
        try:
            if is_first:
                self._task = task
                self._step = engine.begin()
                if self._fused is not None:
                    self._fused.drop()
            self._step.submit(buffer, self._place(bucket), functools.partial(_end, future, buffer))
        except Exception as error:  # noqa: BLE001 - Step.finish raises it out of backward
            engine.fail(error)
            if not future.done():
                future.set_result(buffer)
        if (bucket.is_last() or is_second) and in_backward:
            torch_private.after_backward(self._finish)
        elif bucket.is_last():  # join(): this rank has no more data and shadows the others
            self._step.finish()
            self._step.unpack()
        return (
            torch_private.record_until("gradcomp::bucket", future)
            if torch_private.is_profiling()
            else future
        )

    def _finish(self) -> None:
        self._task = -1
        try:
            self._step.finish()
        except Exception as error:  # noqa: BLE001
            # raised after DDP's own callback: its reducer must come to its end
            torch_private.after_backward(functools.partial(self._fail, error))
            return
        except BaseException:
            self._leave_no_gradients()
            raise
        if self._fused is None:
            return
        if self._fused.must_unpack(finds_unused=self._finds_unused):
            self._step.unpack()
        else:  # after DDP's own callback, which copies buckets to gradients
            torch_private.after_backward(functools.partial(self._fused.place, self._step.packed()))

    def _fail(self, error: Exception) -> NoReturn:
        self._leave_no_gradients()
        raise error

    def _leave_no_gradients(self) -> None:
        """Fill all gradients with NaN, so that no optimizer can use them as averages."""
        poison(p for _, p in self._engine.named)
        if self._fused is not None:
            self._fused.fail()

    def _place(self, bucket: dist.GradBucket) -> Members:  # type: ignore[name-defined]
        """Return (parameter position, offset) of every tensor in the bucket."""
        entries, offset = [], 0
        for parameter in bucket.parameters():
            known = self._known.get(id(parameter))
            if known is None:
                raise GradcompError(
                    "DDP passed a parameter that was not in the model when gradcomp was registered"
                )
            position, numel, stride = known
            refuse_sparse(bucket.buffer(), self._engine.named[position][0])
            if parameter.stride() != stride and storage_order(
                parameter.shape, parameter.stride()
            ) != self._engine.orders.get(position, ()):
                raise self._converted(position, "gradcomp was registered")
            entries.append((position, offset))
            offset += numel
        members = tuple(entries)
        if self._engine.orders and members not in self._places:
            self._check_orders(bucket.buffer(), members)
            self._places.add(members)
        return members

    def _check_orders(self, buffer: Tensor, members: Members) -> None:
        """Raise GradcompError if a gradient in DDP's bucket has another memory order than its
        parameter.

        DDP chooses the order of its first buckets at construction, and has no API to query it.
        """
        for position, offset in members:
            parameter = self._engine.named[position][1]
            grad = parameter.grad
            if position not in self._engine.orders or grad is None or grad.layout != torch.strided:
                continue
            view = storage_view(buffer[offset : offset + parameter.numel()], parameter)
            if not torch.allclose(view, grad, rtol=0.0, atol=0.0, equal_nan=True):
                raise self._converted(position, "DistributedDataParallel was made")

    def _converted(self, position: int, since: str) -> GradcompError:
        return GradcompError(
            f"parameter {self._engine.named[position][0]!r} has another memory format than when"
            f" {since}: convert the model, for example .to(memory_format=torch.channels_last),"
            " before wrapping and registering it"
        )

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._detached:
            return
        self._handled = sys.exc_info()[1]  # not None if the caller is in an except block
        self._engine.pipeline.check()
        if not torch.is_grad_enabled():
            return
        if self._engine.comm.world_size > 1 and torch_private.joins_by_active_ranks(module):
            raise GradcompError(
                "Join(divide_by_initial_world_size=False) cannot be honoured: gradcomp divides by"
                " the initial number of ranks; leave the argument out"
            )
        self._newcomers.refuse()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise GradcompError(
                    f"parameter {name!r} was frozen when the model was wrapped or registered: no"
                    " bucket holds its gradient, and every rank would train it apart; unfreeze"
                    " first, then wrap in DistributedDataParallel and register"
                )
        if self._fused is not None:
            self._fused.before_forward()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Fail the engine if torch's own collectives in forward (buffers, bucket rebuilds) have
        lost a rank. Logs which one: this forward can only raise torch's error.
        """
        error = sys.exc_info()[1]
        handled, self._handled = self._handled, None
        if output is not None or error is handled:  # forward has not failed
            return
        if self._detached or not isinstance(error, RuntimeError) or self._engine.error is not None:
            return
        text = str(error)
        if any(sign in text for sign in LOST_SIGNS):
            gone = self._engine.comm.find_lost()
            unknown = "a rank, or the network to it, was lost: read the output of the others"
            when = f"while DDP broadcast buffers or rebuilt buckets: {text.splitlines()[0]}"
            rank = getattr(gone, "rank", None)  # of RankGone
            lost = PeerLost(OF_TORCH, -1, 0.0, f"{gone or unknown} [{when}]", rank)
            lost.__cause__ = error
            self._engine.fail(lost)
            logger.error("gradcomp: rank %d: %s", self._engine.comm.rank, lost)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a state that does nothing, for copies and pickles of a model (weight averaging,
        ``torch.save``).
        """
        return _detached, ()


def _end(future: "torch.futures.Future[Tensor]", buffer: Tensor, error: Exception | None) -> None:
    if error is None:
        future.set_result(buffer)
    else:
        future.set_exception(error)  # type: ignore[arg-type]


def _detached() -> CompressionState:
    """Return a state that compresses nothing, for a copy of a model."""
    state = object.__new__(CompressionState)
    state._detached = True
    state._engine = state._fused = _Detached()  # type: ignore[assignment]
    return state


def compression_hook(
    state: CompressionState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average one DDP bucket with compression; for ``model.register_comm_hook(state,
    compression_hook)``.
    """
    return state.handle(bucket)


@takes(CommonOptions)
def register(
    model: nn.parallel.DistributedDataParallel,
    codec: Codec | str = "auto",
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    comm: Communicator | None = None,
    advanced: Advanced | None = None,
    **common: "Unpack[CommonOptions]",
) -> CompressionState:
    """Compress the gradients of a DistributedDataParallel model from the next backward pass on.

    Collective: every rank of the model's process group calls it, with the same arguments, before
    the first backward. Rank 0 logs `CompressionState.describe` to the logger "gradcomp", at INFO.

    Args:
        model: wrapped in DistributedDataParallel; float32, bfloat16 or float16 parameters. Buckets
            on an accelerator are averaged in host memory.
        codec: `Ternary(...)`, `TernGrad(...)`, `OneBit(...)`, `Block(...)`, `Identity()`, or a name
            ("ternary", "onebit"). "auto": codec and options for the kind of `optimizer`, chosen by
            measured accuracy (`gradcomp.plan.accuracy`); explicit options win.
        optimizer: the optimizer of this model, or a list of several (Muon and AdamW), checked to
            update these parameters. "auto" chooses by it; without one, and where it leaves out a
            trained parameter, it takes `Block(8)`, which is safe for all. A split optimizer
            (`gradcomp.optim`) of all trained parameters then updates weights directly from the
            payloads: no averaged gradient is written, and `p.grad` is a NaN placeholder after
            backward (see `CompressionState.materialize_gradients`).
        comm: communicator; by default gloo groups with the ranks of the model's process group.
            Closed with the state.
        min_numel: tensors with fewer elements are sent in fp32. None: those with fewer than 1024,
            and vectors (norms, biases) of any size.
        exclude: further parameters to send in fp32, one entry or a sequence: names, patterns
            (``"*.bias"``), "norm", "embedding", "head" (by the usual names of such layers), or
            functions of name and shape.
        exchange: "auto" (fewer bytes), "all_gather", "reduce_scatter", or "hierarchical": fp32
            inside a node, compressed between nodes.
        warmup_steps: number of first steps that are averaged in fp32, or with `warmup_codec`.
        warmup_codec: codec or name for the warm-up, for example `Block(4)`, which loses nothing and
            takes an eighth of the bytes. Its scale groups are those of `codec`. None: fp32.
        precondition: encode gradients in units of the root of their second moment, which all ranks
            compute from the averages. For Adam and similar optimizers with codecs of 1 and 2 bits.
            True, or `Precondition` for other settings than its defaults. With such an `optimizer`
            its learning rate is scaled, too (`Advanced.scale_lr`).
        grad_scaler: a `torch.amp.GradScaler` or similar: residuals follow its scale, and are
            committed for a whole step at a time. A step is one backward: to accumulate several, run
            all but the last under ``no_sync()``.
        atomic_steps: commit residuals only if no bucket of the step has NaN or Inf and every rank
            has finished the step (a collective of 16 bytes); on by default with `grad_scaler`.
        timeout_s: longest wait for a rank, in seconds. By default the communicator's timeout: that
            of its process group over torch.distributed, otherwise 300.
        advanced: rare options, see `gradcomp.Advanced`.

    Returns:
        The state, with `stats`, `state_dict`, `discard_step`, `check_replicas`,
        `materialize_gradients` and `close`.

    Raises:
        TypeError: `model` is not wrapped in DDP; an unknown option; `optimizer` is a class, a name
            or another object without ``param_groups``.
        UnsupportedTensor: the dtype, device or layout of a parameter.
        ValueError: an option out of its range, a second hook, or a model without trained
            parameters; the message has the value.
        PeerMismatch: (split optimizers) "optimizer": its state, trails included, is not the same on
            every rank.

    Later ``loss.backward()`` may raise on every rank: PeerMismatch, PeerLost, CorruptPayload,
    UnsupportedTensor.
    """
    state = CompressionState(
        model, codec, optimizer=optimizer, comm=comm, advanced=advanced, **common
    )
    try:
        model.register_comm_hook(state, compression_hook)
    except BaseException as error:
        state._give_back(keep_comm=comm is not None)
        if isinstance(error, RuntimeError) and "called once" in str(error):
            raise ValueError(
                f"another communication hook is registered on this model: {_ONCE}"
            ) from error
        raise
    torch_private.name_hook(model, f"gradcomp.ddp.compression_hook: {state._engine.codec!r}")
    return state


def _kind_of(model: object) -> str:
    """Return a text of the kind of a model without DDP, and of the entry point to use for it."""
    if isinstance(getattr(model, "_orig_mod", None), nn.parallel.DistributedDataParallel):
        return (
            "a compiled one; register on the DistributedDataParallel inside, before torch.compile"
        )
    kinds = (
        {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
        if isinstance(model, nn.Module)
        else set()
    )
    if "FSDPModule" in kinds:
        return (
            f"{type(model).__name__}, which fully_shard has wrapped; for FSDP2 use"
            " gradcomp.fsdp.register"
        )
    if "FullyShardedDataParallel" in kinds:
        return (
            f"{type(model).__name__} of FSDP1; wrap with torch.distributed.fsdp.fully_shard, and"
            " use gradcomp.fsdp.register"
        )
    return f"{type(model).__name__}; for a model without DDP use gradcomp.GradientAverager"


def _averaged(model: nn.parallel.DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) pairs, except for parameters that DDP ignores."""
    ignored = model.parameters_to_ignore
    return [(name, p) for name, p in model.module.named_parameters() if name not in ignored]


def _check_dtypes(model: nn.parallel.DistributedDataParallel) -> None:
    """Raise ValueError if a parameter's dtype changed after DDP was constructed: DDP would miss its
    gradients.
    """
    names = {torch.float32: "float", torch.bfloat16: "c10::BFloat16", torch.float16: "c10::Half"}
    seen = torch_private.bucket_dtypes(model)
    for name, parameter in _averaged(model):
        wanted = names.get(parameter.dtype)
        if (
            parameter.requires_grad
            and wanted is not None
            and seen is not None
            and wanted not in seen
        ):
            raise ValueError(
                f"parameter {name!r} has become {parameter.dtype} after DistributedDataParallel was"
                " made, which then does not see its gradients: convert the model"
                " (split_parameters, .to()) before wrapping it"
            )
