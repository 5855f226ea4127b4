"""Sparse gradients (embeddings): the rows that they name are taken out, updated as dense ones,
and put back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradcomp.errors import UnsupportedTensor
from gradcomp.optim.entries import GRADIENT_DTYPES, Entry
from gradcomp.optim.interface import Updates
from gradcomp.optim.options import number


def check_sparse(optimizer: Updates, p: nn.Parameter, group: dict[str, Any], name: str) -> None:
    """Raise UnsupportedTensor for sparse gradients that an optimizer cannot take exactly,
    ValueError for another shape.
    """
    gradient = p.grad
    assert gradient is not None
    reason = None
    if (
        not optimizer.takes_sparse
        or gradient.layout != torch.sparse_coo
        or gradient.sparse_dim() != 1
    ):
        reason = (
            f"{type(optimizer).__name__} does not take it (Embedding(sparse=False) makes dense"
            " ones)"
        )
    elif group.get("momentum", 0) or number(group["weight_decay"]):
        reason = "momentum and weight decay change weights that it does not name"
    elif gradient.dtype not in GRADIENT_DTYPES or not p.is_contiguous():
        reason = f"it is {gradient.dtype}, or the parameter is not contiguous"
    if reason:
        raise UnsupportedTensor(f"the gradient of {name} is sparse ({gradient.layout}): {reason}")
    if gradient.shape != p.shape:
        raise ValueError(
            f"the gradient of {name} has shape {tuple(gradient.shape)}, it {tuple(p.shape)}"
        )


def run_sparse(optimizer: Updates, entry: Entry) -> None:
    """Update the rows that a sparse gradient names, and their trails, exactly as a dense update
    would.
    """
    p, state = entry.parameter, entry.state
    assert p.grad is not None
    gradient = p.grad.float().coalesce()  # fp32 before rows that are named twice are added up
    index, values = gradient.indices()[0], gradient.values().contiguous()
    if not values.numel():
        return
    rows = Entry(
        nn.Parameter(p.detach()[index].contiguous(), requires_grad=False),
        entry.group,
        {"step": state["step"]},
    )
    kept = [name for name in ("trail", *optimizer.moments) if name in state]
    for name in kept:
        rows.state[name] = state[name][index].contiguous()
    rows.gradient, rows.step, rows.is_first = values, entry.step, entry.is_first
    optimizer.run([rows])
    p.detach().index_copy_(0, index, rows.parameter.detach())
    for name in kept:
        state[name].index_copy_(0, index, rows.state[name])
