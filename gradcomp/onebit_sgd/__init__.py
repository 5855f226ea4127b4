"""The 1-bit SGD system of 2014: AdaGrad in the exchange, double buffering, minibatch size search.

References:
    Seide, Fu, Droppo, Li, Yu 2014, "1-bit stochastic gradient descent and its application to
    data-parallel distributed training of speech DNNs", Interspeech.
"""

from gradcomp.onebit_sgd.adagrad import AggregateAdagrad, LocalAdagrad, MomentumAdagrad
from gradcomp.onebit_sgd.batch_size import BatchSizeChoice, BatchSizeTrial, find_batch_size
from gradcomp.onebit_sgd.double_buffer import DoubleBuffer, OverlapComparison, OverlapReport


def __getattr__(name: str) -> object:
    more = ": use math.ceil(samples / samples_per_exchange)" if name == "warm_start_steps" else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{more}")


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
]
