"""Cut a minibatch, whatever containers its tensors are in, into two halves."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def cut(batch: tuple[Any, ...]) -> tuple[list[tuple[Any, ...]], list[float]]:
    """Return the two halves of a minibatch and each one's share of its samples; of an odd number
    the first has one more.

    Args:
        batch: tensors whose first dimension counts samples, None, and tuples, lists and
            dictionaries of these; halves are views of them.

    Raises:
        ValueError: fewer than 2 samples, tensors that disagree on their number, a tensor without
            dimensions, no tensor.
        TypeError: anything else in the minibatch.
    """
    counts: set[int] = set()
    _count(batch, counts)
    if not counts:
        raise ValueError("the minibatch holds no tensor: call step(loss_fn, *batch)")
    if len(counts) != 1:
        raise ValueError(
            f"the tensors of a minibatch hold equally many samples, got {sorted(counts)}"
        )
    (samples,) = counts
    if samples < 2:
        raise ValueError(f"a minibatch of {samples} samples has no two halves")
    first = (samples + 1) // 2
    halves = [_slice(batch, 0, first), _slice(batch, first, samples)]
    return halves, [first / samples, (samples - first) / samples]


def _count(part: Any, counts: set[int]) -> None:
    """Collect the lengths of all tensors."""
    if isinstance(part, Tensor):
        if part.dim() == 0:
            raise ValueError(
                "a tensor of a minibatch has no dimension that counts samples: its shape is ()"
            )
        counts.add(part.shape[0])
    elif isinstance(part, dict):
        for value in part.values():
            _count(value, counts)
    elif isinstance(part, (tuple, list)):
        for value in part:
            _count(value, counts)
    elif part is not None:
        raise TypeError(
            "a minibatch holds tensors, in tuples, lists and dictionaries, got"
            f" {type(part).__name__}"
        )


def _slice(part: Any, first: int, last: int) -> Any:
    """Return the samples from `first` to before `last`, in the same containers."""
    if isinstance(part, Tensor):
        return part[first:last]
    if isinstance(part, dict):
        return {key: _slice(value, first, last) for key, value in part.items()}
    if part is None:
        return None
    sliced = [_slice(value, first, last) for value in part]
    if isinstance(part, tuple):
        return type(part)(*sliced) if hasattr(part, "_fields") else tuple(sliced)
    return sliced
