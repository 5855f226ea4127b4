"""The optimizers of the table, each with the settings that people use and a usual rate for fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from gradcomp.optim import SplitLAMB

BETAS = 0.9, 0.95


def _decayed(model: nn.Module) -> list[dict[str, object]]:
    """Return groups with a weight decay of 0.1 for matrices and 0 for norms and biases."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def muon(model: nn.Module, lr: float) -> list[Optimizer]:
    """Muon for hidden matrices at `lr`, AdamW for the rest at a tenth of it.

    Raises:
        ValueError: this torch has no Muon.
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


# return the optimizers of a model, whose weights are fp32, at a rate
OPTIMIZERS: dict[str, Callable[[nn.Module, float], list[Optimizer]]] = {
    "sgd": lambda model, lr: [SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)],
    # fused: one pass, several times as fast as torch's loop over operations
    "adamw": lambda model, lr: [AdamW(_decayed(model), lr=lr, betas=BETAS, fused=True)],
    "lamb": lambda model, lr: [SplitLAMB(_decayed(model), lr=lr, betas=BETAS)],  # torch has none
    "adagrad": lambda model, lr: [Adagrad(model.parameters(), lr=lr)],
    "muon": muon,
}
