"""torchtitan, and any FSDP2 trainer that averages over replicas in ``set_all_reduce_hook``:
gradients are compressed between machines.

Inside a machine torch still reduce-scatters over the fast links. Each rank's shard is then averaged
over the replicas of the model, once per backward pass. torchtitan itself is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradcomp.averager import GradientAverager
from gradcomp.codecs import Codec
from gradcomp.comm import torch_private
from gradcomp.comm.torchdist import TorchCommunicator
from gradcomp.engine.options import Advanced, CommonOptions, takes
from gradcomp.engine.watch import OR_TWICE, remove
from gradcomp.errors import GradcompError
from gradcomp.integrations.watch import Watch

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


_MISSED = (
    "FSDP has reduced gradients and called another all-reduce hook, or none, so every replica would"
    " train on its own. Make ReplicaAverage last, after torchtitan's maybe_set_all_reduce_hook and"
    f" the like. {OR_TWICE}"
)
_OUTSIDE = (
    "FSDP reduces gradients outside of a backward pass, as torch.distributed.pipelining does, so"
    " ReplicaAverage cannot tell the last of them. Leave it out, and call average() of a"
    " gradcomp.GradientAverager(model, codec, comm=gradcomp.comm.TorchCommunicator(group)) before"
    " each optimizer step"
)


class ReplicaAverage:
    """Compressed average of the gradients of `fully_shard` models over their replicas, at the end
    of every backward pass in which FSDP reduces gradients. Collective.

    ::

        mesh = init_device_mesh("cuda", (machines, gpus), mesh_dim_names=("replica", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        replicas = ReplicaAverage(model, mesh["replica"].get_group(), optimizer=optimizer)

    It replaces the hook of torchtitan's ``maybe_set_all_reduce_hook(model_parts)``. Gradients that
    accumulate over several backward passes are averaged once, if ``set_requires_gradient_sync``
    enables only the last exchange. Residuals have the size of shards and are on the host. An
    optimizer step raises GradcompError if gradients were not averaged because another hook was set.

    Args:
        models: a module with FSDP modules inside, or a list of them.
        group: process group of the ranks that have the same shard of other replicas.
        codec: codec or name; "auto", the default, chooses by `optimizer`; without one it is
            `Block(8)`.
        optimizer: the optimizer of these models, or a list of several; see
            `gradcomp.GradientAverager`.
        common, advanced: see `gradcomp.ddp.register`.

    Attributes:
        averager: the `gradcomp.GradientAverager`, for `stats`, `describe`, `quality` and `log_to`.
            Use `state_dict` of this class, since the averager's does not distinguish shards.

    Raises:
        TypeError: no module is wrapped by `fully_shard`.
        ValueError, PeerMismatch, PeerLost: see `gradcomp.GradientAverager`.

    GradcompError is raised where FSDP reduces gradients outside of a backward pass, as
    ``torch.distributed.pipelining`` makes it do.
    """

    @takes(CommonOptions)
    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        group: Any,
        codec: Codec | str = "auto",
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        advanced: Advanced | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        parts = [models] if isinstance(models, nn.Module) else list(models)
        sharded = [one for part in parts for one in torch_private.sharded_modules(part)]
        if not sharded:
            raise TypeError(
                "no module of this model is wrapped by torch.distributed.fsdp.fully_shard; without"
                " it there is gradcomp.GradientAverager"
            )
        self._modules = [one.module for one in sharded]
        self._shard = f"shard {sharded[0].group.rank()} of {sharded[0].group.size()}"
        named = [
            (f"{n}.{name}" if n else name, p)
            for n, part in enumerate(parts)
            for name, p in part.named_parameters()
        ]
        comm = TorchCommunicator(group)
        try:
            self.averager = GradientAverager(
                named, codec, optimizer=optimizer, comm=comm, advanced=advanced, **common
            )
        except BaseException:
            comm.close()
            raise
        self._called_back, self._averages = -1, 0
        self._watch = Watch([p for _, p in named], lambda: self._averages, lambda: _MISSED)
        self._hooks: list[Any] = [part.register_forward_pre_hook(self._hold) for part in parts]
        for module in self._modules:
            module.set_all_reduce_hook(self._reduced)

    def close(self) -> None:
        """Remove the hooks and close the averager. Closing twice has no effect."""
        for module in self._modules:
            module.set_all_reduce_hook(None)
        self._modules = []
        remove(self._hooks)
        self._watch.close()
        self.averager.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank needs to resume bit for bit, under the name of its shard,
        so that `torch.distributed.checkpoint` can merge those of all ranks.
        """
        return {self._shard: self.averager.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            ValueError: a state of other shards, or an error of `GradientAverager.load_state_dict`;
                nothing is changed then.
        """
        if self._shard not in state:
            held = ", ".join(state) or "none"
            raise ValueError(f"this rank has {self._shard}, the state {held}")
        self.averager.load_state_dict(state[self._shard])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reduced(self, shard: Tensor) -> None:
        number = torch_private.graph_task()
        if number < 0:
            raise GradcompError(_OUTSIDE)
        if number != self._called_back:
            self._called_back = number
            torch_private.after_backward(self._average)  # runs after FSDP's own callback

    def _hold(self, *_: Any) -> None:
        """As a hook, keep this object alive with the model, even if other hooks are replaced."""

    def _average(self) -> None:
        self._averages += 1
        self.averager.average()
