"""accelerate: one call after ``prepare``. Its own hook argument is a closed list, and
`save_state` knows no state of a hook.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.codecs import Codec
from gradcomp.comm.local import LocalCommunicator
from gradcomp.comm.torchdist import TorchCommunicator
from gradcomp.ddp import CompressionState
from gradcomp.engine.options import Options
from gradcomp.engine.watch import NOT_CALLED
from gradcomp.errors import GradcompError
from gradcomp.integrations.checkpoints import Stateful, read, write
from gradcomp.integrations.versions import missing, warn_unless_tried
from gradcomp.local.steps import DiLoCo

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gradcomp.engine.options import Changes
    from gradcomp.engine.step import Engine

try:
    from accelerate.utils import broadcast

    from gradcomp.integrations.prepared import attach, check_device, inner, watch
except ImportError as error:
    raise missing("accelerate", error) from error

warn_unless_tried("accelerate")
_carried: weakref.WeakKeyDictionary[Any, dict[str, Engine]] = (
    weakref.WeakKeyDictionary()
)  # of an Accelerator, by names of files


def register(
    accelerator: Any,
    model: nn.Module,
    codec: Codec | str,
    options: Options | None = None,
    *,
    optimizer: Any = None,
    **changes: Unpack[Changes],
) -> CompressionState | None:
    """Compress the gradients of a prepared model; `save_state` and `load_state` carry every rank's
    residuals from now on. Collective.

    ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        state = register(accelerator, model, "ternary")

    A step of a prepared optimizer before which gradcomp was not called is a GradcompError.

    Args:
        accelerator: an ``accelerate.Accelerator`` on CPUs.
        model: what its ``prepare`` has returned, together with the optimizer or after it.
        codec: codec or name; "auto" with `optimizer`.
        options: see `gradcomp.Options`.
        optimizer: as `gradcomp.ddp.register` takes it, prepared or not. A split optimizer then
            takes gradients straight from the payloads: call ``state.materialize_gradients()``
            before ``accelerator.clip_grad_norm_``.
        changes: fields of `gradcomp.Options` to set.

    Returns:
        The state; None, with a warning, in a run of one process.

    Raises:
        TypeError: a model that is not wrapped in DistributedDataParallel.
        ValueError: a communication hook that accelerate has registered; and as
            `gradcomp.ddp.register`.
        UnsupportedTensor: an accelerator that is not on the CPU.
    """
    state = attach(accelerator, model, codec, Options.of(options, **changes), optimizer)
    if state is not None:
        _carry(accelerator, state, state._engine, watch(accelerator, model, state).restart)
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
    """Let every process train on its own for H steps, then average what they have changed, packed.
    Collective.

    ::

        optimizer, loader = accelerator.prepare(optimizer, loader)  # not the model: DDP would
        average gradients every step with local_steps(accelerator, model, optimizer, "terngrad",
        sync_every=30):
            ...  # steps of the optimizer count by themselves, also under accelerator.accumulate

    Weights of rank 0 go to all first, as DDP would. `save_state` and `load_state` carry every
    rank's model, optimizer and local state.

    Args:
        accelerator: an ``accelerate.Accelerator`` on CPUs.
        model: a plain module, not prepared.
        optimizer: of its parameters, prepared or not, or several.
        codec: codec or name.
        sync_every: H; see `gradcomp.DiLoCo`.
        method: `gradcomp.DiLoCo` or `gradcomp.LocalSGD`.
        arguments: of `method`.

    Raises:
        TypeError: a prepared model.
        UnsupportedTensor: an accelerator that is not on the CPU.
        ValueError, PeerMismatch, PeerLost: as `method`.
    """
    check_device(accelerator)
    if isinstance(model, DistributedDataParallel) or any(
        model is one for one in accelerator._models
    ):
        raise TypeError(
            "local steps need the model as it was before accelerator.prepare, which has DDP average"
            " gradients every step: leave it out there"
        )
    optimizers = [
        inner(one) for one in (optimizer if isinstance(optimizer, Sequence) else [optimizer])
    ]
    if accelerator.num_processes > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast(tensor.detach())
    comm = TorchCommunicator() if accelerator.num_processes > 1 else LocalCommunicator.group(1)[0]
    local = method(model, optimizers, codec, comm, sync_every=sync_every, **arguments)
    counted = _Counted(local, optimizers)
    whole = _Whole(model, optimizers, local)

    def loaded() -> None:
        counted.seen.clear()
        whole.keep = {
            id(one)
            for one in optimizers
            if any(one is inner(other) for other in accelerator._optimizers)
        }

    _carry(accelerator, whole, local._fragments[0].averager._engine, loaded, needed=True)
    return local


def _carry(
    accelerator: Any,
    state: Stateful,
    engine: Engine,
    loaded: Callable[[], None],
    *,
    needed: bool = False,
) -> None:
    """Have an accelerator's checkpoints carry a state until it is closed.

    Args:
        engine: of the state.
        loaded: called when the state was loaded.
        needed: whether a checkpoint without it is refused.
    """
    carried = _carried.setdefault(accelerator, {})
    for one in [one for one, its in carried.items() if its.pipeline.closed]:
        del carried[one]
    name = next(
        one for one in (f"gradcomp{n or ''}" for n in itertools.count()) if one not in carried
    )
    carried[name] = engine

    def save(_: Any, __: Any, folder: str) -> None:
        if not engine.pipeline.closed:
            write(state, engine.comm, folder, name)

    def load(_: Any, folder: str) -> None:
        if not engine.pipeline.closed and read(state, engine.comm, folder, name, needed=needed):
            loaded()

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


class _Whole:
    """What a rank of local steps needs: between syncs its weights and optimizers are its own,
    and accelerate saves those of rank 0.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], local: DiLoCo
    ) -> None:
        self._model, self._optimizers, self._local = model, optimizers, local
        self.keep: set[int] = (
            set()
        )  # optimizers whose state accelerate is about to overwrite by rank 0's
        for one in optimizers:
            one.register_load_state_dict_pre_hook(self._before_load)

    def state_dict(self) -> dict[str, Any]:
        local = self._local.state_dict()  # first: it waits for averages under way
        return {
            "model": self._model.state_dict(),
            "optimizers": [one.state_dict() for one in self._optimizers],
            "local": local,
        }

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        own = state if isinstance(state, dict) else state[0]
        self._model.load_state_dict(own["model"])
        for one, saved in zip(self._optimizers, own["optimizers"], strict=True):
            one.load_state_dict(saved)
        self._local.load_state_dict(
            own["local"] if isinstance(state, dict) else [one["local"] for one in state]
        )

    def _before_load(
        self, optimizer: torch.optim.Optimizer, _: dict[str, Any]
    ) -> dict[str, Any] | None:
        if id(optimizer) not in self.keep:
            return None
        self.keep.discard(id(optimizer))
        return optimizer.state_dict()


class _Counted:
    """Raises at the second of two steps of an optimizer between which `DiLoCo.step` was not
    called.
    """

    def __init__(self, local: DiLoCo, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._local = local
        self.seen: dict[int, int] = {}
        for one in optimizers:
            one.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if self.seen.get(id(optimizer)) == self._local.inner_steps:
            raise GradcompError(
                f"{NOT_CALLED}: the optimizer has stepped, and {type(self._local).__name__}.step()"
                " was not called after it, so ranks never sync. Call it after every"
                " optimizer.step() that accelerator.sync_gradients lets through, or train in a"
                " with block"
            )
        self.seen[id(optimizer)] = self._local.inner_steps
