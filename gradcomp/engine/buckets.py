"""Buckets of named tensors: gradients of a model without DDP, or any other tensors with a `Source`.

Of a DTensor, which tensor parallelism has sharded, only the local shard is averaged. The ranks that
average it must have the same shard.
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
    """Return the local shard of a DTensor, which shares its memory, or any other tensor itself."""
    sharded: Any = tensor
    if not hasattr(sharded, "to_local"):
        return tensor
    local: Tensor = sharded.detach().to_local()
    return local.requires_grad_(tensor.requires_grad)


def shard_of(tensor: Any) -> object:
    """Return a description of this rank's shard of a DTensor, for comparison across ranks; None
    for a tensor that is not sharded.
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
    """Raise UnsupportedTensor unless a parameter's gradient is dense and has the parameter's dtype
    and placements.
    """
    grad: Any = parameter.grad
    placements = getattr(parameter, "placements", None)
    if getattr(grad, "placements", None) != placements:
        placed = getattr(grad, "placements", "nowhere (a plain tensor)")
        raise UnsupportedTensor(
            f"gradient of {name!r} is placed {placed}, its parameter {placements}"
        )
    local = grad.to_local() if placements is not None else grad
    refuse_sparse(local, name)
    check_tensor(local, f"the gradient of {name!r}", contiguous=False)
    if grad.dtype != parameter.dtype:
        raise UnsupportedTensor(
            f"the gradient of {name!r} is {grad.dtype}, its parameter {parameter.dtype}"
        )


def refuse_sparse(gradient: Tensor, name: str) -> None:
    """Raise UnsupportedTensor if the gradient of parameter `name` is sparse."""
    if gradient.layout != torch.strided:
        raise UnsupportedTensor(
            f"the gradient of {name!r} is {gradient.layout}, and gradcomp takes dense ones:"
            f" {_SPARSE}"
        )


def check_layers(model: nn.Module, ignored: Collection[str] = ()) -> None:
    """Raise UnsupportedTensor if a layer of the model will produce sparse gradients, unless the
    name of its parameter is `ignored`.
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
    """Fill every gradient with NaN, so that a local gradient is not mistaken for an average after a
    failed step.
    """
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.layout == torch.strided:
            parameter.grad.fill_(float("nan"))
        else:
            nan = parameter.grad.new_full((), float("nan"), layout=torch.strided)
            parameter.grad = nan.expand(parameter.shape)


class Source(Protocol):
    """A named tensor to average: reads this rank's values, and stores the average.

    Attributes:
        name: name of the tensor, the same on every rank.
        trained: whether the tensor is averaged.
        shard: result of `shard_of`, the same on all ranks that average the tensor.
    """

    name: str
    trained: bool
    shard: object

    @property
    def like(self) -> Tensor:
        """A tensor with the shape, dtype and strides of the values to average. Its own values must
        be the same bits on every rank (`Engine.check_replicas`).
        """

    def load(self, view: Tensor) -> None:
        """Copy this rank's values to `view`, a part of a bucket with the shape of `like`."""

    def store(self, view: Tensor) -> None:
        """Copy the average from `view`."""

    def clear(self) -> None:
        """Remove the values, because no average is available yet."""


class Gradient:
    """The gradient of a parameter, as a `Source`; a missing gradient is averaged as zero.

    Attributes:
        parameter: the parameter, a DTensor if it is sharded.
    """

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name, self.parameter = name, parameter
        self.trained, self.shard = parameter.requires_grad, shard_of(parameter)

    @property
    def like(self) -> Tensor:
        return local_part(self.parameter)

    def load(self, view: Tensor) -> None:
        grad = self.parameter.grad
        if grad is None or not self.parameter.requires_grad:
            view.zero_()
        else:
            view.copy_(local_part(grad))

    def store(self, view: Tensor) -> None:
        if not self.parameter.requires_grad:
            return
        if self.parameter.grad is None:
            self.parameter.grad = _like(self.parameter, view.clone())
        else:
            local_part(self.parameter.grad).copy_(view)

    def clear(self) -> None:
        if self.parameter.requires_grad:
            self.parameter.grad = None


class Bucket:
    """Tensors that are averaged in one exchange, and the flat buffer of their values.

    Args:
        sources: (position, source) pairs, all of one dtype and device.

    Attributes:
        flat: ``(numel,)`` buffer of the sources' dtype and device, averaged in place.
        members: (position of the source, its first element in `flat`) pairs.
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
        """Copy the values of all sources to `flat`."""
        for source, view in self._parts:
            source.load(view)

    @torch.no_grad()
    def store(self) -> None:
        """Copy the averages from `flat` to the sources."""
        for source, view in self._parts:
            source.store(view)

    def clear(self) -> None:
        """Remove the values of all sources."""
        for source, _ in self._parts:
            source.clear()


def fuse(sources: Sequence[Source], bucket_cap_mb: float) -> list[Bucket]:
    """Return buckets of about `bucket_cap_mb` MiB of the trained tensors, each of one dtype and
    device. The last tensors come first: backward computes their gradients first.
    """
    buckets = []
    trained = [(i, source, source.like) for i, source in enumerate(sources) if source.trained]
    for kind in dict.fromkeys((like.dtype, like.device) for _, _, like in trained):
        alike = [entry for entry in trained if (entry[2].dtype, entry[2].device) == kind]
        sizes = [like.numel() * like.element_size() for _, _, like in alike]
        for members in assign_buckets(sizes, int(bucket_cap_mb * 2**20)):
            buckets.append(Bucket([alike[m][:2] for m in members]))
    return buckets


def _like(parameter: Any, local: Tensor) -> Tensor:
    """Return a local tensor as a gradient of `parameter`: a DTensor if `parameter` is one."""
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
