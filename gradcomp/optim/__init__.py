"""Optimizers for weights kept as bf16 tops and 16-bit trails: fp32 training in 4 bytes per weight,
bit for bit.

`split_parameters` splits a model's weights; `SplitSGD`, `SplitAdagrad`, `SplitAdamW` and
`SplitLAMB` train them. `OneBitAdam`, `ZeroOneAdam` and `OneBitLamb` also exchange momenta in place
of gradients.
"""

from gradcomp.optim.base import SplitOptimizer
from gradcomp.optim.onebit import OneBitAdam, OneBitLamb, ZeroOneAdam
from gradcomp.optim.packed import packed_add
from gradcomp.optim.split import (
    SplitParameters,
    fp32_state_dict,
    join,
    load_fp32_state_dict,
    split,
    split_parameters,
)
from gradcomp.optim.split_optimizers import SplitAdagrad, SplitAdamW, SplitLAMB, SplitSGD

__all__ = [
    "OneBitAdam",
    "OneBitLamb",
    "SplitAdagrad",
    "SplitAdamW",
    "SplitLAMB",
    "SplitOptimizer",
    "SplitParameters",
    "SplitSGD",
    "ZeroOneAdam",
    "fp32_state_dict",
    "join",
    "load_fp32_state_dict",
    "packed_add",
    "split",
    "split_parameters",
]
