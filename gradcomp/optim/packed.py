"""`packed_add`: one update of one split weight, for custom update rules."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.errors import UnsupportedTensor
from gradcomp.kernels.rules import Kind
from gradcomp.optim.entries import GRADIENT_DTYPES, Entry, make_rules, run_rules
from gradcomp.optim.split import check_dense, check_dtype, check_rounding


@torch.no_grad()
def packed_add(
    top: Tensor, trail: Tensor, delta: Tensor, *, alpha: float = 1.0, rounding: str = "truncate"
) -> Tensor:
    """Add ``alpha * delta`` to a split weight in place: join, add with one rounding, and split
    again, in one pass.

    Args:
        top, trail: the result of `split`, or a parameter and its trail; bfloat16 and int16, dense,
            on one device, with the same shape and strides.
        delta: shape of `top`, float32 or bfloat16.
        alpha: factor of `delta`, rounded to float32.
        rounding: how tops are made, as in `split`.

    Returns:
        `top`. If an optimizer has the trail, its next step raises ValueError, as after any write
        from outside, unless its `keep_trails()` is called before.

    Raises:
        UnsupportedTensor: a tensor with another dtype, device or layout.
        ValueError: shapes other than `top`'s; a trail with other strides; an unknown `rounding`.

    References:
        Split SGD (Intel Extension for PyTorch), "Operation Fusion".
    """
    check_rounding(rounding)
    check_dtype(top, "top", torch.bfloat16)
    check_dtype(trail, "trail", torch.int16)
    check_dtype(delta, "delta", *GRADIENT_DTYPES)
    for name, tensor in (("top", top), ("trail", trail), ("delta", delta)):
        check_dense(tensor.detach(), name)
        if tensor.device != top.device:
            raise UnsupportedTensor(f"{name} is on {tensor.device}, top on {top.device}")
        if tensor.shape != top.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, top {tuple(top.shape)}")
    if trail.stride() != top.stride():
        raise ValueError(
            f"trail has strides {trail.stride()}, top {top.stride()}: split makes them alike"
        )
    if delta.stride() != top.stride():
        delta = torch.empty_like(top, dtype=delta.dtype).copy_(delta)
    entry = Entry(top.detach(), {"rounding": rounding}, {"trail": trail}, delta.detach())
    run_rules([entry], make_rules(Kind.SGD, [entry], lambda _: {"step_size": alpha}), ())
    torch.autograd.graph.increment_version(top)
    return top
