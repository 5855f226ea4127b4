"""Optimizers for weights split into bf16 tops and int16 trails: fp32 training, bit for bit, in 4
bytes per weight.

`split_parameters` splits a model's weights; `SplitSGD`, `SplitAdagrad`, `SplitAdamW` and
`SplitLAMB` train them.
"""

from gradcomp.optim.base import SplitOptimizer
from gradcomp.optim.split import (
    SplitParameters,
    fp32_state_dict,
    join,
    load_fp32_state_dict,
    split,
    split_parameters,
)
from gradcomp.optim.split_optimizers import (
    SplitAdagrad,
    SplitAdamW,
    SplitLAMB,
    SplitSGD,
    packed_add,
)

__all__ = [
    "SplitAdagrad",
    "SplitAdamW",
    "SplitLAMB",
    "SplitOptimizer",
    "SplitParameters",
    "SplitSGD",
    "fp32_state_dict",
    "join",
    "load_fp32_state_dict",
    "packed_add",
    "split",
    "split_parameters",
]


def __getattr__(name: str) -> object:
    why = ""
    if name in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam"):
        why = (
            ", which is gone: keep your own optimizer, with gradcomp.EntropyCoded(1.25) and"
            " precondition=True (docs/howto/from-onebit-adam.md)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{why}")
