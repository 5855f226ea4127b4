"""Random rotations of scale groups, and the factor that makes 1-bit codes of them unbiased.

Vargaftik et al. 2021, "DRIVE: one-bit distributed mean estimation", sections 3 and 4.2; Suresh et
al. 2017, "Distributed mean estimation with limited communication", section 3: random signs, then
Hadamard's transform. Two rounds here: one leaves a bias of a fifth where a few values are large.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.codec import Key, padded, random_words, sum_in_lanes

WINDOW, ROUNDS = 1024, 2
Values = NDArray[np.float32]


def signs(first: int, numel: int, key: Key) -> Values:
    """Return -1 or 1 for elements [first, first + numel) of a parameter."""
    element = np.arange(first, first + numel)
    words = random_words(element // 128, key)[np.arange(numel), element // 32 % 4]
    return np.where(words >> (element % 32).astype(np.uint32) & 1, -1, 1).astype(np.float32)


def hadamard(x: Values) -> Values:
    """Return the orthonormal transform of a power of two of values."""
    size, half = len(x), 1
    while half < size:
        pairs = x.reshape(-1, 2, half)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
        half *= 2
    log = size.bit_length() - 1
    return x * np.float32(0.5 ** (log // 2) * (np.float32(0.70710678) if log % 2 else 1))


def runs(numel: int, group_numel: int, first: int) -> list[slice]:
    """Return the slice of every group in values that begin at element `first`."""
    out, at = [], 0
    while at < numel:
        count = min(group_numel - (first + at) % group_numel, numel - at)
        out.append(slice(at, at + count))
        at += count
    return out


def rotate(x: Values, group_numel: int, first: int, key: Key, *, back: bool = False) -> Values:
    """Return the rotation of values, or undo it."""
    out: Values = x.astype(np.float32).copy()
    for run in runs(len(x), group_numel, first):
        n = run.stop - run.start
        size = min(WINDOW, 1 << (n.bit_length() - 1))
        windows = [slice(run.start + i, run.start + i + size) for i in range(0, n - size + 1, size)]
        if n % size:
            windows.append(slice(run.stop - size, run.stop))
        for r in range(ROUNDS)[:: -1 if back else 1]:
            flips = signs(first + run.start, n, key._replace(stream=key.stream + r))
            if not back:
                out[run] *= flips
            for window in windows[::-1] if back else windows:
                out[window] = hadamard(out[window])
            if back:
                out[run] *= flips
    return out


def unbias(x: Values, group_numel: int, first: int) -> Values:
    """Return values whose class means in 1-bit codes are `x` on average over rotations."""
    out: Values = x.astype(np.float32).copy()
    for run in runs(len(x), group_numel, first):
        values = out[run].astype(np.float64)
        above = values > 0
        addends = [np.where(above, values, 0.0), np.where(above, 0.0, values), values * values]
        rows = padded(np.stack(addends, 1), 8).reshape(-1, 8, 3)
        plus, minus, squares = sum_in_lanes(rows)
        count = int(above.sum())
        explained = plus * plus / count if count else 0.0
        if count < len(values):
            explained += minus * minus / (len(values) - count)
        if explained > 0.0:
            out[run] *= np.float32(squares / explained)
    return out
