"""Split weights and their optimizers in NumPy: what `gc_update`, `gc_split`, `gc_join` must equal.

Everything but norms is float32; every operation rounds once, `fma` included. The header states the
same rules for C. References: Kingma and Ba 2015; Duchi et al. 2011; Loshchilov and Hutter 2019; You
et al. 2020; "Split SGD" (IPEX).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.codec import SUM_LANES, padded, sum_in_lanes

Array = NDArray[Any]
Floats = NDArray[np.float32]
TRUNCATE, NEAREST = "truncate", "nearest"


def split(w: Floats, rounding: str = TRUNCATE) -> tuple[Array, Array]:
    """Return (top, trail), uint16 each: the halves of fp32 numbers, or the top half rounded."""
    bits = w.view(np.uint32)
    top, trail = bits >> 16, bits & 0xFFFF
    if rounding == NEAREST:
        top = np.where(np.isnan(w), top | 0x0040, top + (trail >> 15))
    return top.astype(np.uint16), trail.astype(np.uint16)


def join(top: Array, trail: Array, rounding: str = TRUNCATE) -> Floats:
    """Return the fp32 numbers that `split` was given (after NEAREST every NaN is quiet)."""
    high, low = top.astype(np.uint32), trail.astype(np.uint32)
    if rounding == NEAREST:
        high = np.where((high & 0x7FFF) > 0x7F80, high, high - (low >> 15))
    return (high << 16 | low).view(np.float32)


def fma(a: Any, b: Any, c: Any) -> Floats:
    """Return a * b + c of float32 numbers, rounded once.

    The product is exact in float64; the sum is rounded to odd there, after which rounding to
    float32 is the only one that counts (Boldo and Melquiond 2008, "Emulation of FMA and correctly
    rounded sums").
    """
    with np.errstate(all="ignore"):
        x, y, z = np.broadcast_arrays(
            *(np.asarray(v, np.float32).astype(np.float64) for v in (a, b, c))
        )
        product = x * y
        total = np.array(product + z)
        back = total - product
        error = (product - (total - back)) + (z - back)
        even = (total.view(np.int64) & 1) == 0
        towards = np.where(error > 0, np.inf, -np.inf)
        inexact = np.isfinite(total) & (error != 0) & even
        return np.where(inexact, np.nextafter(total, towards), total).astype(np.float32)


def quiet(x: Floats) -> Floats:
    """Return x with every NaN as 0x7FC00000, which is how updates store it."""
    return np.where(np.isnan(x), np.uint32(0x7FC00000).view(np.float32), x).astype(np.float32)


def packed_add(
    top: Array, trail: Array, delta: Floats, alpha: float, rounding: str = TRUNCATE
) -> tuple[Array, Array]:
    """Return (top, trail) of the weight plus ``alpha * delta``: one rounding."""
    return split(quiet(fma(np.float32(alpha), delta, join(top, trail, rounding))), rounding)


def sgd(
    w: Floats,
    g: Floats,
    buffer: Floats | None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first: bool = False,
) -> tuple[Floats, Floats | None]:
    """Return new weights and momentum buffer after one step as torch.optim.SGD rounds it."""
    g = -g if maximize else g
    if weight_decay:
        g = fma(weight_decay, w, g)
    if momentum and buffer is not None:
        buffer = quiet(g if first else fma(1 - dampening, g, np.float32(momentum) * buffer))
        g = fma(momentum, buffer, g) if nesterov else buffer
    return quiet(fma(-lr, g, w)), buffer


def adagrad(
    w: Floats,
    g: Floats,
    total: Floats,
    step: int,
    *,
    lr: float,
    lr_decay: float,
    weight_decay: float,
    eps: float,
) -> tuple[Floats, Floats]:
    """Return new weights and sums of squares after step `step` (from 1) (Duchi et al. 2011)."""
    if weight_decay:
        g = fma(weight_decay, w, g)
    total = quiet(fma(g, g, total))
    size = np.float32(-lr / (1 + (step - 1) * lr_decay))
    with np.errstate(all="ignore"):
        return quiet(w + (size * g) / (np.sqrt(total) + np.float32(eps))), total


def moments(
    first: Floats, second: Floats, g: Floats, betas: tuple[float, float]
) -> tuple[Floats, Floats]:
    """Return the running means of g and g^2 (Kingma and Ba 2015, algorithm 1)."""
    keep = np.float32(1 - betas[0])
    with np.errstate(all="ignore"):
        change = g - first
        first = fma(keep, change, first) if keep < 0.5 else fma(keep - np.float32(1), change, g)
        scaled = np.float32(1 - betas[1]) * g
        return quiet(first), quiet(fma(scaled, g, second * np.float32(betas[1])))


def adamw(
    w: Floats,
    g: Floats,
    first: Floats,
    second: Floats,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> tuple[Floats, Floats, Floats]:
    """Return new weights and moments after step `step` (Loshchilov and Hutter, algorithm 2)."""
    if weight_decay:
        w = w * np.float32(1 - lr * weight_decay)
    first, second = moments(first, second, g, betas)
    size = np.float32(-lr / (1 - betas[0] ** step))
    with np.errstate(all="ignore"):
        below = np.sqrt(second) / np.float32((1 - betas[1] ** step) ** 0.5) + np.float32(eps)
        return quiet(w + (size * first) / below), first, second


NORM_NUMEL = 1 << 16  # squares of so many elements are added in lanes, these sums in order


def norm(x: Floats) -> float:
    """Return the L2 norm in float64; lanes are added as those of a block of sums."""
    starts = range(0, len(x), NORM_NUMEL)
    return float(np.sqrt(sum((squares(x[first : first + NORM_NUMEL]) for first in starts), 0.0)))


def squares(x: Floats) -> float:
    """Return the sum of squares in float64, added in lanes."""
    wide = x.astype(np.float64)
    return float(sum_in_lanes(padded(wide * wide, SUM_LANES).reshape(-1, SUM_LANES)))


def lamb(
    w: Floats,
    g: Floats,
    first: Floats,
    second: Floats,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    prescale: float = 1.0,
) -> tuple[Floats, Floats, Floats]:
    """Return new weights and moments after step `step` (You et al. 2020, algorithm 2, phi = id).

    `prescale` multiplies the gradient first: 1 / max(1, norm of all gradients) makes it NVLAMB.
    """
    g = g if prescale == 1.0 else g * np.float32(prescale)
    first, second = moments(first, second, g, betas)
    root = (1 - betas[1] ** step) ** 0.5  # above and below the fraction: one division fewer
    with np.errstate(all="ignore"):
        below = np.sqrt(second) + np.float32(eps * root)
        u = (np.float32(root / (1 - betas[0] ** step)) * first) / below
    if weight_decay:
        u = fma(weight_decay, w, u)
    above, under = norm(w), norm(u)
    trust = above / under if above > 0 and under > 0 else 1.0
    return quiet(fma(np.float32(-lr * trust), u, w)), first, second
