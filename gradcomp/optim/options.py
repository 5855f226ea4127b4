"""Hyperparameters: numbers or tensors of one element, and what is refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def number(value: Any) -> float:
    """Return a hyperparameter, which may be a tensor of one element, as a float."""
    return float(value.item()) if isinstance(value, Tensor) else float(value)


def check_number(name: str, value: Any, low: float = 0.0, below: float = float("inf")) -> None:
    """Raise ValueError unless ``low <= value < below``."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} as a tensor must have one element, got {value.numel()}")
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float, Tensor))
        or not low <= number(value) < below
    ):
        limit = f"at least {low:g}" + (
            f" and below {below:g}" if below != float("inf") else " and finite"
        )
        raise ValueError(f"{name} must be a number of {limit}, got {value!r}")


def check_betas(betas: Any) -> None:
    """Raise ValueError unless `betas` is two numbers of at least 0 and below 1."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, got {betas!r}")
    for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
        check_number(name, beta, below=1.0)
