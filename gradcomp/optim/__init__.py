"""Optimizers for weights kept as bf16 tops and 16-bit trails: fp32 training in 4 bytes a weight,
bit for bit.

`split_parameters` splits a model's weights, `SplitSGD`, `SplitAdagrad`, `SplitAdamW` and
`SplitLAMB` train them. `OneBitAdam`, `ZeroOneAdam` and `OneBitLamb` do the same with momenta that
travel instead of gradients.
"""

from gradcomp.optim.adagrad import SplitAdagrad
from gradcomp.optim.adamw import SplitAdamW
from gradcomp.optim.base import SplitOptimizer
from gradcomp.optim.lamb import SplitLAMB
from gradcomp.optim.onebit_adam import OneBitAdam, ZeroOneAdam
from gradcomp.optim.onebit_lamb import OneBitLamb
from gradcomp.optim.packed import packed_add
from gradcomp.optim.sgd import SplitSGD
from gradcomp.optim.split import (
    SplitParameters,
    fp32_state_dict,
    join,
    load_fp32_state_dict,
    split,
    split_parameters,
)

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
