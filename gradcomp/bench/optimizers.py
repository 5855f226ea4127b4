"""Optimizers of the benchmarks, with their usual settings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from gradcomp.optim import SplitLAMB

BETAS = 0.9, 0.95


def _decayed(model: nn.Module) -> list[dict[str, object]]:
    """Return parameter groups: weight decay 0.1 for matrices, 0 for norms and biases."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def muon(model: nn.Module, lr: float) -> list[Optimizer]:
    """Return Muon for hidden matrices, AdamW at a tenth of `lr` for the others; ValueError if this
    torch has no Muon.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"torch {torch.__version__} has no Muon: 2.9 or newer does")
    ends = ("embedding", "position", "head", "stem")
    hidden = [
        p for name, p in model.named_parameters() if p.ndim == 2 and not name.startswith(ends)
    ]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(hidden, lr=lr, weight_decay=0.1),
        AdamW(rest, lr=lr / 10, betas=BETAS, weight_decay=0.0, fused=True),
    ]


# functions of a model with fp32 weights and a learning rate that return its optimizers
OPTIMIZERS: dict[str, Callable[[nn.Module, float], list[Optimizer]]] = {
    "sgd": lambda model, lr: [SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)],
    # fused: one pass over memory, several times as fast as torch's loop over operations
    "adamw": lambda model, lr: [AdamW(_decayed(model), lr=lr, betas=BETAS, fused=True)],
    "lamb": lambda model, lr: [SplitLAMB(_decayed(model), lr=lr, betas=BETAS)],  # torch has none
    "adagrad": lambda model, lr: [Adagrad(model.parameters(), lr=lr)],
    "muon": muon,
}
