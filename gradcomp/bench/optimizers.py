"""The optimizers of the table, each with the settings that people use and a usual rate for fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gradcomp.optim import OneBitAdam, OneBitLamb, SplitLAMB, ZeroOneAdam

Factory = Callable[[nn.Module, float], list[torch.optim.Optimizer]]


def _decayed(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Return groups in which norms and biases are not decayed."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def sgd(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Momentum 0.9, weight decay 5e-4."""
    return [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)]


def adamw(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Betas 0.9 and 0.95, weight decay 0.1."""
    return [torch.optim.AdamW(_decayed(model, 0.1), lr=lr, betas=(0.9, 0.95))]


def lamb(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """This library's, on fp32 weights: torch has none. Betas 0.9 and 0.95, weight decay 0.1."""
    return [SplitLAMB(_decayed(model, 0.1), lr=lr, betas=(0.9, 0.95))]


def adagrad(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """torch's own."""
    return [torch.optim.Adagrad(model.parameters(), lr=lr)]


def muon(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
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
        torch.optim.AdamW(rest, lr=lr / 10, betas=(0.9, 0.95), weight_decay=0.0),
    ]


OPTIMIZERS: dict[str, Factory] = {
    "sgd": sgd,
    "adamw": adamw,
    "lamb": lamb,
    "adagrad": adagrad,
    "muon": muon,
}


def exchanging_momentum(
    optimizers: list[torch.optim.Optimizer], kind: str, warm_up: int
) -> list[torch.optim.Optimizer]:
    """Return the relative of AdamW or LAMB whose momentum travels, with the same settings.

    Args:
        optimizers: of a model; one.
        kind: "frozen" or "renewed", what becomes of the variance.
        warm_up: steps before that.

    Raises:
        ValueError: of another optimizer there is none.
    """
    given = optimizers[0]
    keys = ("params", "lr", "betas", "eps", "weight_decay")
    groups = [{key: group[key] for key in keys if key in group} for group in given.param_groups]
    if len(optimizers) == 1 and isinstance(given, torch.optim.AdamW):
        if kind == "renewed":
            return [ZeroOneAdam(groups, var_freeze_step=warm_up)]
        return [OneBitAdam(groups, freeze_step=warm_up)]
    if len(optimizers) == 1 and isinstance(given, SplitLAMB) and kind == "frozen":
        return [OneBitLamb(groups, freeze_step=warm_up)]
    names = " and ".join(type(one).__name__ for one in optimizers)
    raise ValueError(f"there is no {names} whose momentum travels ({kind})")
