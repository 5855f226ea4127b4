"""The 1-bit SGD system of 2014: AdaGrad on the aggregate, double buffering, minibatch size, warm
start.

References:
    Seide, Fu, Droppo, Li, Yu 2014, "1-bit stochastic gradient descent and its application to
    data-parallel distributed training of speech DNNs", Interspeech.
"""

from gradcomp.onebit_sgd.adagrad import AggregateAdagrad, LocalAdagrad, MomentumAdagrad
from gradcomp.onebit_sgd.batch_size import find_batch_size
from gradcomp.onebit_sgd.choice import BatchSizeChoice, BatchSizeTrial
from gradcomp.onebit_sgd.comparison import OverlapComparison
from gradcomp.onebit_sgd.double_buffer import DoubleBuffer
from gradcomp.onebit_sgd.report import OverlapReport
from gradcomp.onebit_sgd.warm_start import warm_start_steps

__all__ = [
    "AggregateAdagrad",
    "BatchSizeChoice",
    "BatchSizeTrial",
    "DoubleBuffer",
    "LocalAdagrad",
    "MomentumAdagrad",
    "OverlapComparison",
    "OverlapReport",
    "find_batch_size",
    "warm_start_steps",
]
