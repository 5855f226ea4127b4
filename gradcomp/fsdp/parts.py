"""The FSDP modules of a model, their parameters, and the layout of all ranks' chunks of a module in
one flat tensor.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradcomp.codecs import Codec
from gradcomp.comm import torch_private
from gradcomp.engine.options import Options
from gradcomp.kernels import check_device
from gradcomp.memory.planes import Planes
from gradcomp.payload.parameters import Parameter, describe_parameters
from gradcomp.payload.pieces import Slot

# the `FsdpState` that compresses the gradients of an FSDP module, by the module's id; the state has
# a reference to the module
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def sharded_modules(model: nn.Module) -> list[torch_private.Sharded]:
    """Return the modules that `fully_shard` has wrapped; TypeError if there are none."""
    sharded = torch_private.sharded_modules(model)
    if not sharded:
        kinds = {type(module).__name__ for module in model.modules()}
        first = (
            "FullyShardedDataParallel is FSDP1: wrap with"
            if "FullyShardedDataParallel" in kinds
            else "no module of this model is wrapped by"
        )
        raise TypeError(
            f"{first} torch.distributed.fsdp.fully_shard; for DDP there is gradcomp.ddp.register"
        )
    devices = {p.device for one in sharded for p in one.parameters}
    for device in devices - {torch.device("meta")}:
        check_device(device, "the model")
    return sharded


def owner_of(module: object) -> Any:
    """Return the state that compresses the gradients of a module, None if there is none."""
    return _owners.get(id(module))


def claim(modules: Sequence[object], state: Any) -> None:
    """Register `state` for these modules; ValueError if another state is registered."""
    for module in modules:
        owner = owner_of(module)
        if owner is not None:
            raise ValueError(
                "gradcomp.fsdp.register has been called for this model"
                f" ({type(module).__name__}) before, with codec {owner.codec!r}: close() the"
                " state that it returned first"
            )
    for module in modules:
        _owners[id(module)] = state


def release(modules: Sequence[object]) -> None:
    """Undo `claim`."""
    for module in modules:
        _owners.pop(id(module), None)


@dataclass(frozen=True)
class Part:
    """One parameter of an FSDP module.

    Attributes:
        parameter: name, unsharded shape, and whether it is compressed; its index is the position of
            its name among all names in sorted order.
        owner: the ``FSDPParam`` of torch.
        chunks: shape of every rank's chunk, the largest first.
        dim: dimension along which the parameter is sharded.
    """

    parameter: Parameter
    owner: Any
    chunks: list[tuple[int, ...]]
    dim: int

    @property
    def sharded(self) -> nn.Parameter:
        """The sharded parameter in ``model.parameters()``, also after ``load_state_dict(...,
        assign=True)``.
        """
        return self.owner.sharded_param  # type: ignore[no-any-return]

    @property
    def padded_numel(self) -> int:
        """Number of elements of every rank's chunk, padding included."""
        return math.prod(self.chunks[0])

    @property
    def slot_indices(self) -> range:
        """Slot positions of the chunks, by rank: index * N + rank."""
        first = self.parameter.index * len(self.chunks)
        return range(first, first + len(self.chunks))

    def joined(self, chunks: Iterable[Tensor]) -> Tensor:
        """Return the chunks of all ranks, ``(numel,)`` each, joined to a new tensor of the
        parameter's shape.
        """
        shaped = [flat.view(shape) for flat, shape in zip(chunks, self.chunks, strict=True)]
        return torch.cat(shaped, self.dim)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return the chunk of each rank of a tensor of the parameter's shape, as views."""
        return list(torch.split(whole, [shape[self.dim] for shape in self.chunks], self.dim))


def described(
    wholes: Iterable[tuple[str, tuple[int, ...]]], codec: Codec, options: Options
) -> dict[str, Parameter]:
    """Return the parameters by name; their indices do not depend on how modules are wrapped."""
    order = sorted(wholes)
    found = describe_parameters(order, codec.group_numel, options.min_numel, options.exempts)
    return {p.name: p for p in found}


def parts_of(
    one: torch_private.Sharded, names: Sequence[str], known: dict[str, Parameter]
) -> list[Part]:
    """Return the parameters of a module, whose `names` are those of `known`."""
    fields = zip(names, one.owners, one.chunks, one.dims, strict=True)
    return [Part(known[name], owner, chunks, dim) for name, owner, chunks, dim in fields]


def number_of(parts: Sequence[Part]) -> int:
    """Return the number in headers of the module with these parameters: at least 1, and independent
    of how other modules are wrapped.
    """
    return 1 + min(part.parameter.index for part in parts)


def slots_of(
    parts: Sequence[Part], world_size: int, residuals: Planes | None = None
) -> list[list[Slot]]:
    """Return for every rank the slots of its chunks, one per parameter. Slots have offsets in a
    flat tensor with the chunks of all ranks in rank order, and in the planes of `residuals`.
    """
    each = sum(part.padded_numel for part in parts)
    out = []
    for rank in range(world_size):
        offset, slots = rank * each, []
        for part in parts:
            p = part.parameter
            index, numel = part.slot_indices[rank], math.prod(part.chunks[rank])
            residual = residuals.offset(index) if residuals is not None and p.compressed else 0
            slots.append(Slot(index, numel, p.group_numel, p.compressed, offset, residual))
            offset += part.padded_numel
        out.append(slots)
    return out
