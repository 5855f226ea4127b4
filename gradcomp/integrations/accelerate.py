"""accelerate: one call after ``prepare``. accelerate's own hook argument is a fixed list, and its
``save_state`` does not save the state of a hook.
"""

from __future__ import annotations

import itertools
import traceback
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.codecs import Codec
from gradcomp.comm.local import LocalCommunicator
from gradcomp.comm.torchdist import TorchCommunicator
from gradcomp.ddp import CompressionState
from gradcomp.engine.options import Advanced, CommonOptions, takes
from gradcomp.integrations.checkpoints import Stateful, read, write
from gradcomp.integrations.versions import imported
from gradcomp.integrations.watch import DdpWatch, Watch
from gradcomp.integrations.wrapped import attach, inner, prepared_by
from gradcomp.local.steps import DiLoCo

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gradcomp.engine.step import Engine

with imported("accelerate"):
    from accelerate.checkpointing import load_accelerator_state
    from accelerate.utils import broadcast

# engines in checkpoints, by Accelerator and by prefix of their files
_carried: weakref.WeakKeyDictionary[Any, dict[str, weakref.ref[Engine]]] = (
    weakref.WeakKeyDictionary()
)


@takes(CommonOptions)
def register(
    accelerator: Any,
    model: nn.Module,
    codec: Codec | str,
    *,
    optimizer: Any = None,
    advanced: Advanced | None = None,
    **common: Unpack[CommonOptions],
) -> CompressionState | None:
    """Compress the gradients of a prepared model. ``save_state`` and ``load_state`` of the
    accelerator then save and load every rank's residuals, too. Collective.

    ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        state = register(accelerator, model, "auto", optimizer=optimizer)

    An optimizer step raises GradcompError if gradcomp has exchanged no gradients since the step
    before.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: the model that its ``prepare`` returned, together with the optimizer or after it.
        codec: codec or name; "auto" chooses by `optimizer`; without one it is `Block(8)`.
        optimizer: as for `gradcomp.ddp.register`, prepared or not. A split optimizer then reads
            gradients from the payloads: call ``state.materialize_gradients()`` before
            ``accelerator.clip_grad_norm_``.
        common, advanced: see `gradcomp.ddp.register`.

    Returns:
        The state; None, with a warning, in a run of one process.

    Raises:
        TypeError: a model that is not wrapped in DistributedDataParallel.
        ValueError: accelerate has registered a communication hook; others see
            `gradcomp.ddp.register`.
    """
    options = {**common, "advanced": advanced}
    state = attach(model, codec, inner(optimizer), options, **prepared_by(accelerator))
    if state is not None:
        DdpWatch(state, model)  # lives as long as the model
        state._hooks += _carry(accelerator, state, state._engine)
    return state


def local_steps(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    codec: Codec | str,
    *,
    sync_every: Any,
    method: type[DiLoCo] = DiLoCo,
    **arguments: Any,
) -> DiLoCo:
    """Let every process train on its own for H steps, then average the changes, compressed.
    Collective.

    ::

        # not the model: DDP would average gradients in every step
        optimizer, loader = accelerator.prepare(optimizer, loader)
        with local_steps(accelerator, model, optimizer, "terngrad", sync_every=30):
            ...  # steps of the optimizer count by themselves, also under accelerator.accumulate

    First parameters and buffers of rank 0 are sent to all ranks, as in DDP. ``save_state`` and
    ``load_state`` of the accelerator save and load every rank's model, optimizers and local state.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: a plain module, not prepared.
        optimizer: the optimizer of its parameters, or a sequence of them; prepared or not.
        codec: codec or name, as in `gradcomp.DiLoCo`.
        sync_every: H; see `gradcomp.DiLoCo`.
        method: `gradcomp.DiLoCo` or `gradcomp.LocalSGD`.
        arguments: other arguments of `method`.

    Returns:
        The object that `method` creates.

    Raises:
        TypeError: a model that is prepared or wrapped in DistributedDataParallel.
        ValueError, PeerMismatch, PeerLost: see `method`.
    """
    prepared = any(model is one for one in accelerator._models)
    if prepared or isinstance(model, DistributedDataParallel):
        raise TypeError(
            "local steps need the model as it was before accelerator.prepare, which has DDP average"
            " gradients every step: leave it out there"
        )
    optimizers = inner(optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])
    if accelerator.num_processes > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            dense = tensor.detach().contiguous()  # gloo sends memory as it lies there
            broadcast(dense)
            if not tensor.is_contiguous():
                tensor.detach().copy_(dense)
    comm = TorchCommunicator() if accelerator.num_processes > 1 else LocalCommunicator.group(1)[0]
    local = method(model, optimizers, codec, sync_every=sync_every, comm=comm, **arguments)
    why = (
        f"the optimizer has stepped, and {type(local).__name__}.step() was not called after it, so"
        " ranks never sync. Call it after every optimizer.step() that accelerator.sync_gradients"
        " lets through, or train in a with block"
    )
    watch = Watch(model.parameters(), lambda: local.inner_steps, lambda: why, late=True)
    whole, engine = _Whole(model, optimizers, local, watch), local._fragments[0].averager._engine
    local._hooks += [one.register_load_state_dict_pre_hook(_keep_own) for one in optimizers]
    local._hooks += [*watch._hooks, *_carry(accelerator, whole, engine, needed=True)]
    return local


def _carry(accelerator: Any, state: Stateful, engine: Engine, *, needed: bool = False) -> list[Any]:
    """Save and load `state` in an accelerator's checkpoints; return the hooks to remove at the end.
    A checkpoint without a state that is `needed` is a ValueError.
    """
    before = _carried.get(accelerator, {}).items()
    carried = {name: its for name, its in before if (one := its()) and not one.closed}
    names = (f"gradcomp{n or ''}" for n in itertools.count())
    name = next(one for one in names if one not in carried)
    _carried[accelerator] = carried | {name: weakref.ref(engine)}

    def save(_: Any, __: Any, folder: str) -> None:
        write(state, engine, folder, name)

    def load(_: Any, folder: str) -> None:
        read(state, engine.comm, folder, name, needed=needed)

    return [
        accelerator.register_save_state_pre_hook(save),
        accelerator.register_load_state_pre_hook(load),
    ]


class _Whole:
    """Model, optimizers and local state of a rank with local steps. They differ between ranks until
    the next sync, but accelerate saves only those of rank 0.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Any], local: DiLoCo, watch: Watch
    ) -> None:
        self._model, self._optimizers, self._local, self._watch = model, optimizers, local, watch

    def state_dict(self) -> dict[str, Any]:
        local = self._local.state_dict()  # first: it waits for averages in progress
        optimizers = [one.state_dict() for one in self._optimizers]
        return {"model": self._model.state_dict(), "optimizers": optimizers, "local": local}

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        states: list[Any] = [state] if isinstance(state, dict) else list(state)
        local = [one["local"] for one in states]
        # first: it checks everything before it changes anything
        self._local.load_state_dict(local[0] if isinstance(state, dict) else local)
        self._model.load_state_dict(states[0]["model"])
        for one, saved in zip(self._optimizers, states[0]["optimizers"], strict=True):
            one.load_state_dict(saved)
        if not isinstance(state, dict):
            self._local.restore()  # replace rank 0's weights by the anchors
        self._watch.restart()


def _keep_own(optimizer: torch.optim.Optimizer, _: Any) -> dict[str, Any] | None:
    """Keep this rank's state, which `_Whole` has loaded, where accelerate loads rank 0's."""
    loading = load_accelerator_state.__code__
    is_loading = any(frame.f_code is loading for frame, _ in traceback.walk_stack(None))
    return optimizer.state_dict() if is_loading else None
