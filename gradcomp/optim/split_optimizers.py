"""SGD, Adagrad, AdamW and LAMB on split weights, with the options of torch.optim; `packed_add` for
custom update rules.

References:
    Duchi, Hazan, Singer 2011 (Adagrad).
    Loshchilov and Hutter 2019, algorithm 2 (AdamW).
    You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2 (LAMB). As published:
    phi is the identity, every parameter adapts (also without weight decay), gradients are not
    clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.arguments import check_number
from gradcomp.errors import GradcompError, UnsupportedTensor
from gradcomp.kernels.rules import Flag, Kind
from gradcomp.optim.base import SplitOptimizer
from gradcomp.optim.entries import GRADIENT_DTYPES, Entry, make_rules, run_rules
from gradcomp.optim.split import check_dense, check_dtype, check_rounding

Ranges = dict[str, Callable[[str, Any], None]]


def check_option(name: str, value: Any, low: float = 0.0, high: float = inf) -> None:
    """Raise ValueError unless a number, or tensor of one element, is in [low, high) and finite."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} as a tensor must have one element, got {value.numel()}")
        value = value.item()
    check_number(name, value, low, high)


def check_betas(name: str, betas: Any) -> None:
    """Raise ValueError unless `betas` is two numbers, each at least 0 and below 1."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{name} must be two numbers, got {betas!r}")
    for place, beta in enumerate(betas):
        check_option(f"{name}[{place}]", beta, high=1.0)


def check_variant(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a variant of LAMB."""
    if value not in ("lamb", "nvlamb"):
        raise ValueError(f"{name} must be 'lamb' or 'nvlamb', got {value!r}")


class SplitSGD(SplitOptimizer):
    """Stochastic gradient descent with momentum on weights split into bf16 tops and trails.

    N steps equal N steps of ``torch.optim.SGD(foreach=False)`` on the joined fp32 weights and
    ``grad.float()``, bit for bit, for every option (where torch's CPU capability is AVX2 or above).
    Memory per weight: 4 bytes, and 4 more for momentum.

    Args:
        params: parameters, groups, or the result of `split_parameters`; float32 or bfloat16.
        lr: learning rate, a number or a tensor of one element.
        momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD.

    Raises:
        ValueError: an option out of its range.
        UnsupportedTensor: parameters of another dtype.

    References:
        Split SGD (Intel Extension for PyTorch), "Operation Fusion": packed_add is this optimizer
        without momentum.
    """

    kind = Kind.SGD
    ranges: ClassVar[Ranges] = {
        **dict.fromkeys(("lr", "momentum", "weight_decay"), check_option),
        "dampening": partial(check_option, low=-inf),
    }
    moments = ("momentum_buffer",)
    takes_sparse = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float | Tensor = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        given = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        super().__init__(params, given | {"weight_decay": weight_decay, "maximize": maximize})

    def check_options(self, group: dict[str, Any]) -> None:
        super().check_options(group)
        momentum, dampening = group["momentum"], group["dampening"]
        if group["nesterov"] and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"nesterov needs momentum above 0 and no dampening, got {momentum} and {dampening}"
            )

    def wanted_moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.moments if group["momentum"] else ()

    def numbers(self, entry: Entry) -> dict[str, float]:
        group = entry.group
        flags = entry.is_first * Flag.FIRST | bool(group["nesterov"]) * Flag.NESTEROV
        return {
            "flags": flags | bool(group["maximize"]) * Flag.MAXIMIZE,
            "step_size": -float(group["lr"]),
            "momentum": group["momentum"],
            "keep": 1 - group["dampening"],
            "weight_decay": float(group["weight_decay"]),
        }


class SplitAdagrad(SplitOptimizer):
    """Adagrad on weights split into bf16 tops and trails. Memory per weight: 8 bytes.

    Args:
        params, lr: as in `SplitSGD`, with the same errors.
        lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in torch.optim.Adagrad.
    """

    kind = Kind.ADAGRAD
    ranges: ClassVar[Ranges] = dict.fromkeys(
        ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"), check_option
    )
    moments = ("sum",)
    takes_sparse = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        given = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        given |= {"initial_accumulator_value": initial_accumulator_value, "maximize": maximize}
        super().__init__(params, given)

    def numbers(self, entry: Entry) -> dict[str, float]:
        group = entry.group
        return {
            "flags": bool(group["maximize"]) * Flag.MAXIMIZE,
            "step_size": -(float(group["lr"]) / (1 + (entry.step - 1) * group["lr_decay"])),
            "weight_decay": float(group["weight_decay"]),
            "eps": group["eps"],
        }


class _Adam(SplitOptimizer):
    """Base class of AdamW and LAMB, which have two moments."""

    ranges: ClassVar[Ranges] = {
        **dict.fromkeys(("lr", "eps", "weight_decay"), check_option),
        "betas": check_betas,
    }
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def numbers(self, entry: Entry) -> dict[str, float]:
        """Return the common fields. bias1 corrects the first moment, bias2 the second's root."""
        beta1, beta2 = (float(b) for b in entry.group["betas"])
        return {
            "flags": bool(entry.group["maximize"]) * Flag.MAXIMIZE,
            "keep": 1 - beta1,
            "keep2": 1 - beta2,
            "beta2": beta2,
            "bias1": 1 - beta1**entry.step,
            "bias2": (1 - beta2**entry.step) ** 0.5,
            "eps": entry.group["eps"],
        }


class SplitAdamW(_Adam):
    """Adam with decoupled weight decay on weights split into bf16 tops and trails. Memory per
    weight: 12 bytes.

    One step from the same state is within 1 ulp of ``torch.optim.AdamW(foreach=False)``.

    Args:
        params, lr: as in `SplitSGD`, with the same errors.
        betas, eps, weight_decay, maximize: as in torch.optim.AdamW.
    """

    kind = Kind.ADAMW

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, given | {"maximize": maximize})

    def numbers(self, entry: Entry) -> dict[str, float]:
        lr, made = float(entry.group["lr"]), super().numbers(entry)
        decay = 1 - lr * float(entry.group["weight_decay"])
        return made | {"step_size": -(lr / made["bias1"]), "decay": decay}


class SplitLAMB(_Adam):
    """LAMB on weights split into bf16 tops and trails. Memory per weight: 12 bytes.

    For each parameter, u = m / (sqrt(v) + eps) + weight_decay * w with Adam's bias-corrected
    moments m and v, and w = w - lr * (||w|| / ||u||) * u. The ratio is 1 where either norm is 0.

    Args:
        params, lr: as in `SplitSGD`, with the same errors.
        betas, eps, weight_decay: as in Adam.
        variant: "lamb" is LAMB as published; "nvlamb" first divides all gradients of this optimizer
            by max(1, g), where g is their joint L2 norm. It does not update from payloads, since
            the norm needs the gradients twice.
        maximize: maximize the loss instead of minimizing it.
    """

    kind = Kind.LAMB_START
    ranges: ClassVar[Ranges] = _Adam.ranges | {"variant": check_variant}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        variant: str = "lamb",
        maximize: bool = False,
    ) -> None:
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, given | {"variant": variant, "maximize": maximize})

    @property
    def takes_packed(self) -> bool:  # type: ignore[override]
        """Whether every group can be updated straight from payloads."""
        return all(group["variant"] == "lamb" for group in self.param_groups)

    def numbers(self, entry: Entry) -> dict[str, float]:
        self.check_options(entry.group)  # a misspelt variant would be plain LAMB
        made = super().numbers(entry)
        made["weight_decay"] = float(entry.group["weight_decay"])
        # the kernel's m * bias1 / (sqrt(v) + eps): numerator and denominator times bias2
        made["bias1"], made["eps"] = made["bias2"] / made["bias1"], made["eps"] * made["bias2"]
        return made

    def run(self, entries: Sequence[Entry]) -> None:
        rules = self.rules(entries)
        self._prescale(entries, rules)
        if any(entry.packed is not None for entry in entries):  # norms need whole parameters
            rules["kind"] = Kind.MOMENTS
            run_rules(entries, rules, self.moments)
            rules["kind"] = Kind.LAMB_NORMS
            norms = run_rules(entries, rules, self.moments, gradients=False)
        else:
            norms = run_rules(entries, rules, self.moments)
        rules["kind"] = Kind.LAMB_APPLY
        for rule, entry, (weight, update) in zip(rules, entries, norms, strict=True):
            trust = float(weight) / float(update) if weight > 0 and update > 0 else 1.0
            rule["step_size"] = -float(entry.group["lr"]) * trust
        run_rules(entries, rules, self.moments, gradients=False)

    def _prescale(self, entries: Sequence[Entry], rules: NDArray[Any]) -> None:
        """Make the rules of NVLAMB groups divide gradients by max(1, their joint L2 norm)."""
        nvlamb = [k for k, e in enumerate(entries) if e.group["variant"] == "nvlamb"]
        if not nvlamb:
            return
        chosen, squares = [entries[k] for k in nvlamb], rules[nvlamb]
        if any(entry.packed is not None for entry in chosen):
            raise GradcompError(
                "variant 'nvlamb' needs gradients twice, but they are packed: call"
                " materialize_gradients() of gradcomp's state before step(), or set it before"
                " register"
            )
        squares["kind"] = Kind.SQUARES
        norms = run_rules(chosen, squares, self.moments)[:, 0]
        total = float(np.sqrt(sum(float(n) ** 2 for n in norms)))
        if total > 1:
            rules["flags"][nvlamb] |= np.uint32(Flag.PRESCALE)
            rules["prescale"][nvlamb] = 1 / total


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
