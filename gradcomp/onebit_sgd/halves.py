"""Cut a minibatch, with tensors in any nesting of containers, into two halves."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


def cut(batch: tuple[Any, ...]) -> tuple[list[tuple[Any, ...]], list[float]]:
    """Return the two halves of a minibatch, as views, and each half's share of the samples. The
    first half of an odd number has one sample more.

    Raises:
        ValueError: fewer than 2 samples, tensors with different numbers of samples, a tensor
            without dimensions, no tensor.
        TypeError: a value that is neither a tensor, None, nor a container of torch's pytree.
    """
    leaves = [leaf for leaf in tree_flatten(batch)[0] if leaf is not None]
    if foreign := [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]:
        raise TypeError(
            f"a minibatch holds tensors, in tuples, lists and dictionaries, got {foreign[0]}"
        )
    if not leaves:
        raise ValueError("the minibatch holds no tensor: call step(loss_fn, *batch)")
    if not all(leaf.dim() for leaf in leaves):
        raise ValueError("a tensor of the minibatch has no dimension for samples: its shape is ()")
    samples, *others = sorted({leaf.shape[0] for leaf in leaves})
    if others:
        raise ValueError(
            "all tensors of a minibatch must have the same number of samples, got"
            f" {[samples, *others]}"
        )
    if samples < 2:
        raise ValueError(f"a minibatch of {samples} samples cannot be cut into two halves")
    first = (samples + 1) // 2
    halves = [
        tree_map(lambda leaf, part=part: leaf if leaf is None else leaf[part], batch)
        for part in (slice(first), slice(first, None))
    ]
    return halves, [first / samples, (samples - first) / samples]
