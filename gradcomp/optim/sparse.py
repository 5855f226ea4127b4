"""Sparse gradients (embeddings): the rows at their indices are updated as in a dense update."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradcomp.errors import UnsupportedTensor
from gradcomp.optim.entries import GRADIENT_DTYPES, Entry


def check_sparse(optimizer: Any, p: nn.Parameter, group: dict[str, Any], name: str) -> None:
    """Raise UnsupportedTensor unless a split optimizer can apply a sparse gradient exactly."""
    gradient, kind = p.grad, type(optimizer).__name__
    assert gradient is not None
    takes = optimizer.takes_sparse and gradient.layout == torch.sparse_coo
    reason = None
    if not takes or gradient.sparse_dim() != 1:
        reason = f"{kind} does not take it (Embedding(sparse=False) makes dense ones)"
    elif group.get("momentum", 0) or float(group["weight_decay"]):
        reason = "momentum and weight decay change weights that it does not name"
    elif gradient.dtype not in GRADIENT_DTYPES or not p.is_contiguous():
        reason = f"it is {gradient.dtype}, or the parameter is not contiguous"
    if reason:
        raise UnsupportedTensor(f"the gradient of {name} is sparse ({gradient.layout}): {reason}")


def run_sparse(optimizer: Any, entry: Entry) -> None:
    """Update the rows at a sparse gradient's indices, with their state, as a dense update would."""
    p, state = entry.parameter, entry.state
    assert p.grad is not None
    gradient = p.grad.float().coalesce()  # cast first: it sums duplicate rows
    index, values = gradient.indices()[0], gradient.values().contiguous()
    if not values.numel():
        return
    kept = [name for name in ("trail", *optimizer.moments) if name in state]
    rows = {name: state[name][index].contiguous() for name in kept}
    part = nn.Parameter(p.detach()[index].contiguous(), requires_grad=False)
    own = Entry(part, entry.group, rows | {"step": state["step"]}, values)
    own.step, own.is_first = entry.step, entry.is_first
    optimizer.run([own])
    p.detach().index_copy_(0, index, part.detach())
    for name in kept:
        state[name].index_copy_(0, index, rows[name])
