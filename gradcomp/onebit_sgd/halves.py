"""Cut a minibatch, whatever containers its tensors are in, into two halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def cut(batch: tuple[Any, ...]) -> tuple[list[tuple[Any, ...]], list[float]]:
    """Return the two halves of a minibatch, and the share of its samples that each has.

    Args:
        batch: tensors whose first dimension counts samples, None, and tuples, lists and
            dictionaries of these. Halves are views; of an odd number the first has one more.

    Raises:
        ValueError: fewer than 2 samples, tensors with different numbers of samples, a tensor
            without dimensions, no tensor.
        TypeError: anything else in the minibatch.
    """
    shapes: list[tuple[int, ...]] = []
    _visit(batch, lambda tensor: shapes.append(tuple(tensor.shape)))
    if not shapes:
        raise ValueError("the minibatch holds no tensor: call step(loss_fn, *batch)")
    if () in shapes:
        raise ValueError("a tensor of the minibatch has no dimension for samples: its shape is ()")
    samples, *others = sorted({shape[0] for shape in shapes})
    if others:
        raise ValueError(
            "all tensors of a minibatch must have the same number of samples, got"
            f" {[samples, *others]}"
        )
    if samples < 2:
        raise ValueError(f"a minibatch of {samples} samples cannot be cut into two halves")
    first = (samples + 1) // 2
    halves = [_visit(batch, lambda t: t[:first]), _visit(batch, lambda t: t[first:])]
    return halves, [first / samples, (samples - first) / samples]


def _visit(part: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return the same containers with `function` of each tensor in its place."""
    if part is None:
        return None
    if isinstance(part, Tensor):
        return function(part)
    if isinstance(part, dict):
        return {key: _visit(value, function) for key, value in part.items()}
    if not isinstance(part, (tuple, list)):
        raise TypeError(
            "a minibatch holds tensors, in tuples, lists and dictionaries, got"
            f" {type(part).__name__}"
        )
    values = [_visit(value, function) for value in part]
    if hasattr(part, "_fields"):
        return type(part)(*values)
    return tuple(values) if isinstance(part, tuple) else values
