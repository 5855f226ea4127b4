"""Named tensors that are averaged, fused into flat ones: gradients of a model without DDP, or
whatever has a source.

A parameter that tensor parallelism has sharded (a DTensor) takes part with its local shard: ranks
that are averaged hold the same shard of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradcomp.codecs.checks import check_tensor
from gradcomp.errors import UnsupportedTensor
from gradcomp.kernels import empty
from gradcomp.payload.order import storage_view
from gradcomp.payload.parameters import assign_buckets

_SPARSE = "make the layer with sparse=False"


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, in the same memory: the shard of a DTensor, any
    other tensor whole.
    """
    sharded: Any = tensor
    if not hasattr(sharded, "to_local"):
        return tensor
    local: Tensor = sharded.detach().to_local()
    return local.requires_grad_(tensor.requires_grad)


def shard_of(tensor: Any) -> object:
    """Return which shard of a DTensor this rank holds, for comparison over ranks; None for a
    whole tensor.
    """
    if not hasattr(tensor, "to_local"):
        return None
    here = tensor.device_mesh.get_coordinate()
    sizes = tuple(tensor.device_mesh.mesh.shape)
    cut = [axis for axis, p in enumerate(tensor.placements) if not p.is_replicate()]
    return (
        tuple((axis, sizes[axis], here[axis], repr(tensor.placements[axis])) for axis in cut)
        or None
    )


def check_gradient(name: str, parameter: Tensor) -> None:
    """Raise UnsupportedTensor unless a gradient is a dense tensor of its parameter's dtype,
    sharded as that is.
    """
    grad: Any = parameter.grad
    placements = getattr(parameter, "placements", None)
    if getattr(grad, "placements", None) != placements:
        found = getattr(grad, "placements", "nowhere (a plain tensor)")
        raise UnsupportedTensor(
            f"gradient of {name!r} is placed {found}, its parameter {placements}"
        )
    local = grad.to_local() if placements is not None else grad
    refuse_sparse(local, name)
    check_tensor(local, f"the gradient of {name!r}", contiguous=False)
    if grad.dtype != parameter.dtype:
        raise UnsupportedTensor(
            f"the gradient of {name!r} is {grad.dtype}, its parameter {parameter.dtype}"
        )


def refuse_sparse(gradient: Tensor, name: str) -> None:
    """Raise UnsupportedTensor for the sparse gradient of parameter `name`."""
    if gradient.layout != torch.strided:
        raise UnsupportedTensor(
            f"the gradient of {name!r} is {gradient.layout}, and gradcomp takes dense ones:"
            f" {_SPARSE}"
        )


def check_layers(model: nn.Module, ignored: Collection[str] = ()) -> None:
    """Raise UnsupportedTensor for a layer whose gradient will be sparse.

    Args:
        ignored: names of parameters whose gradients are not averaged.
    """
    for layer, module in model.named_modules():
        if (
            isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.sparse
            and module.weight.requires_grad
        ):
            name = f"{layer}.weight".lstrip(".")
            if name not in ignored:
                kind = type(module).__name__
                raise UnsupportedTensor(
                    f"parameter {name!r} of an {kind}(sparse=True) gets sparse gradients: {_SPARSE}"
                )


@torch.no_grad()
def poison(parameters: Iterable[Tensor]) -> None:
    """Make every gradient NaN: after a failed step no local one may be taken for an average."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.layout == torch.strided:
            parameter.grad.fill_(float("nan"))
        else:
            nan = parameter.grad.new_full((), float("nan"), layout=torch.strided)
            parameter.grad = nan.expand(parameter.shape)


class Source(Protocol):
    """A named tensor that is averaged: where a rank's values come from, and where the average goes.

    Attributes:
        name: the same on every rank.
        trained: whether it is averaged at all.
        shard: which shard of a sharded tensor this rank holds; the same on all ranks that are
            averaged.
    """

    name: str
    trained: bool
    shard: object

    @property
    def like(self) -> Tensor:
        """A tensor of its shape, dtype and strides, whose bits every rank holds alike
        (`Engine.check_replicas`).
        """

    def load(self, view: Tensor) -> None:
        """Copy this rank's values to `view`, a tensor like `like` inside a bucket."""

    def store(self, view: Tensor) -> None:
        """Take the average that stands in `view`."""

    def clear(self) -> None:
        """Have no values: there is no average yet."""


class Gradient:
    """The gradient of a parameter, as a `Source`; a missing one counts as zero."""

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name, self._parameter = name, parameter
        self.trained, self.shard = parameter.requires_grad, shard_of(parameter)

    @property
    def like(self) -> Tensor:
        return local_part(self._parameter)

    def load(self, view: Tensor) -> None:
        grad = self._parameter.grad
        if grad is None or not self._parameter.requires_grad:
            view.zero_()
        else:
            view.copy_(local_part(grad))

    def store(self, view: Tensor) -> None:
        if not self._parameter.requires_grad:
            return
        if self._parameter.grad is None:
            self._parameter.grad = _like(self._parameter, view.clone())
        else:
            local_part(self._parameter.grad).copy_(view)

    def clear(self) -> None:
        if self._parameter.requires_grad:
            self._parameter.grad = None


class Bucket:
    """Tensors that travel together, and the flat one that holds their values.

    Args:
        sources: (position, source) pairs of one dtype and device.

    Attributes:
        flat: ``(numel,)``, what is averaged in place.
        members: (position, first element in `flat`) pairs.
    """

    def __init__(self, sources: Sequence[tuple[int, Source]]) -> None:
        likes = [source.like for _, source in sources]
        numels = [like.numel() for like in likes]
        self.flat = empty(sum(numels), likes[0].dtype, likes[0].device).zero_()
        views = [
            storage_view(v, like)
            for v, like in zip(torch.split(self.flat, numels), likes, strict=True)
        ]
        self._parts = [(source, view) for (_, source), view in zip(sources, views, strict=True)]
        offsets = [sum(numels[:i]) for i in range(len(numels))]
        self.members = tuple(
            (index, offset) for (index, _), offset in zip(sources, offsets, strict=True)
        )

    @torch.no_grad()
    def load(self) -> None:
        """Copy the values of its tensors to `flat`."""
        for source, view in self._parts:
            source.load(view)

    @torch.no_grad()
    def store(self) -> None:
        """Hand `flat` to its tensors."""
        for source, view in self._parts:
            source.store(view)

    def clear(self) -> None:
        """Leave its tensors without values."""
        for source, _ in self._parts:
            source.clear()


def fuse(sources: Sequence[Source], bucket_cap_mb: float) -> list[Bucket]:
    """Share trained tensors out over buckets of one dtype and device each, last ones first, as
    backward makes gradients.
    """
    buckets, trained = (
        [],
        [(i, source, source.like) for i, source in enumerate(sources) if source.trained],
    )
    for kind in dict.fromkeys((like.dtype, like.device) for _, _, like in trained):
        alike = [one for one in trained if (one[2].dtype, one[2].device) == kind]
        sizes = [like.numel() * like.element_size() for _, _, like in alike]
        for members in assign_buckets(sizes, int(bucket_cap_mb * 2**20)):
            buckets.append(Bucket([alike[m][:2] for m in members]))
    return buckets


def _like(parameter: Any, local: Tensor) -> Tensor:
    """Return a local tensor as a gradient of `parameter`: a DTensor for a DTensor."""
    if not hasattr(parameter, "to_local"):
        return local
    shape, stride = parameter.size(), parameter.stride()
    whole: Tensor = type(parameter).from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )
    return whole


def check_optimizer(optimizer: Any, parameters: Iterable[Tensor]) -> None:
    """Raise ValueError if an optimizer updates none of a model's parameters."""
    known = {id(p) for p in parameters}
    if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "optimizer updates no parameter of this model; pass the optimizer that trains it"
        )
