"""Arguments of the update kernels: rules (`gc_rule`), targets (`gc_target`), kinds
and flags (gradcomp.h).
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

import numpy as np

RULE = np.dtype(
    [(name, "<u4") for name in ("kind", "flags", "rounding")]
    + [
        (name, "<f4")
        for name in (
            "step_size",
            "weight_decay",
            "decay",
            "momentum",
            "keep",
            "keep2",
            "beta2",
            "bias1",
            "bias2",
            "eps",
            "prescale",
        )
    ]
)
TARGET = np.dtype(
    [(name, "<u8") for name in ("weight", "trail", "gradient", "state0", "state1")]
    + [("rule", "<u4"), ("gradient_dtype", "<u4")]
)
NO_RULE = 2**32 - 1  # rule of a target whose segments are skipped


class Kind(IntEnum):
    """The kind of an update; native/include/gradcomp.h defines the arithmetic."""

    SGD = 0
    ADAGRAD = 1
    ADAMW = 2
    MOMENTS = 3
    LAMB_START = 4
    LAMB_NORMS = 5
    LAMB_APPLY = 6
    SQUARES = 7


class Flag(IntFlag):
    """Flags of an update rule."""

    MAXIMIZE = 1
    FIRST = 2
    NESTEROV = 4
    PRESCALE = 8
