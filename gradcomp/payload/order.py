"""Memory order of a tensor's elements, which defines "element i" of a gradient in memory and in
payloads.

Gradients are encoded in the order of DDP's buckets. DDP uses the strides of a parameter that is
dense in memory (row-major, channels-last, transposed), and row-major order for any other tensor,
e.g. a slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


def storage_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return a tensor's dimensions from the outermost in memory to the innermost; () for row-major
    order.

    Dimensions of size 1 have no place in memory: dimension 0 stays first, others come last.
    """
    dims = sorted(
        range(len(shape)), key=lambda d: (shape[d] == 1 and d > 0, shape[d] != 1, -strides[d])
    )
    wide = [d for d in dims if shape[d] != 1]
    inner = [math.prod(shape[d] for d in wide[n + 1 :]) for n in range(len(wide))]
    fills = all(strides[d] == stride for d, stride in zip(wide, inner, strict=True))
    return tuple(dims) if fills and wide != sorted(wide) and 0 not in shape else ()


def storage_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's shape with its dimensions in `storage_order`; scale groups are cut along
    the first.
    """
    shape = tuple(tensor.shape)
    return tuple(shape[d] for d in storage_order(shape, tensor.stride())) or shape


def storage_view(flat: Tensor, like: Tensor) -> Tensor:
    """Return a view of `flat`, ``(numel,)`` in the `storage_order` of `like`, with the shape of
    `like`.
    """
    if storage_order(like.shape, like.stride()):
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset())
    return flat.view(like.shape)
