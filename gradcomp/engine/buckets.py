"""Gradients of a model without DDP, fused into flat tensors.

A parameter that tensor parallelism has sharded (a DTensor) takes part with its local shard: ranks that are averaged hold the
same shard of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.codecs.checks import check_tensor
from gradcomp.errors import UnsupportedTensor
from gradcomp.payload.order import storage_view
from gradcomp.payload.parameters import assign_buckets


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, in the same memory: the shard of a DTensor, any other tensor whole."""
    sharded: Any = tensor
    if not hasattr(sharded, "to_local"):
        return tensor
    local: Tensor = sharded.detach().to_local()
    return local.requires_grad_(tensor.requires_grad)


def shard_place(tensor: Any) -> object:
    """Return which shard of a DTensor this rank holds, for comparison over ranks; None for a whole tensor."""
    if not hasattr(tensor, "to_local"):
        return None
    place = tensor.device_mesh.get_coordinate()
    sizes = tuple(tensor.device_mesh.mesh.shape)
    cut = [axis for axis, p in enumerate(tensor.placements) if not p.is_replicate()]
    return tuple((axis, sizes[axis], place[axis], repr(tensor.placements[axis])) for axis in cut) or None


def check_gradient(name: str, parameter: Tensor) -> None:
    """Raise UnsupportedTensor unless a gradient is a dense CPU tensor of its parameter's dtype, sharded as that is."""
    grad: Any = parameter.grad
    placements = getattr(parameter, "placements", None)
    if getattr(grad, "placements", None) != placements:
        found = getattr(grad, "placements", "nowhere (a plain tensor)")
        raise UnsupportedTensor(f"gradient of {name!r} is placed {found}, its parameter {placements}")
    local = grad.to_local() if placements is not None else grad
    check_tensor(local, "gradient", contiguous=False)
    if grad.dtype != parameter.dtype:
        raise UnsupportedTensor(f"gradient is {grad.dtype}, its parameter {parameter.dtype}")


class Bucket:
    """Parameters that travel together, and the flat tensor that holds their gradients.

    Args:
        parameters: (position, parameter) pairs of one dtype.

    Attributes:
        flat: ``(numel,)``, what is averaged in place.
        members: (position, first element in `flat`) pairs.
    """

    def __init__(self, parameters: Sequence[tuple[int, Tensor]]) -> None:
        self._parameters = [p for _, p in parameters]
        parts = [local_part(p) for p in self._parameters]
        numels = [p.numel() for p in parts]
        self.flat = torch.zeros(sum(numels), dtype=self._parameters[0].dtype)
        self._views = [storage_view(v, p) for v, p in zip(torch.split(self.flat, numels), parts, strict=True)]
        offsets = [sum(numels[:i]) for i in range(len(numels))]
        self.members = tuple((index, offset) for (index, _), offset in zip(parameters, offsets, strict=True))

    @torch.no_grad()
    def load(self) -> None:
        """Copy ``p.grad`` of its parameters to `flat`, zero where there is none."""
        for view, parameter in zip(self._views, self._parameters, strict=True):
            if parameter.grad is None or not parameter.requires_grad:
                view.zero_()
            else:
                view.copy_(local_part(parameter.grad))

    @torch.no_grad()
    def store(self) -> None:
        """Copy `flat` to ``p.grad`` of its parameters."""
        for view, parameter in zip(self._views, self._parameters, strict=True):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = _like(parameter, view.clone())
            else:
                local_part(parameter.grad).copy_(view)

    def clear(self) -> None:
        """Set ``p.grad`` of its parameters to None."""
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.grad = None


def fuse(parameters: Sequence[tuple[int, Tensor]], bucket_cap_mb: float) -> list[Bucket]:
    """Share parameters out over buckets of one dtype each, last parameters first, as backward makes them."""
    buckets = []
    for dtype in dict.fromkeys(p.dtype for _, p in parameters):
        alike = [(i, p) for i, p in parameters if p.dtype == dtype]
        sizes = [local_part(p).numel() * p.element_size() for _, p in alike]
        for members in assign_buckets(sizes, int(bucket_cap_mb * 2**20)):
            buckets.append(Bucket([alike[m] for m in members]))
    return buckets


def _like(parameter: Any, local: Tensor) -> Tensor:
    """Return a local tensor as a gradient of `parameter`: a DTensor for a DTensor."""
    if not hasattr(parameter, "to_local"):
        return local
    shape, stride = parameter.size(), parameter.stride()
    whole: Tensor = type(parameter).from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
    return whole
