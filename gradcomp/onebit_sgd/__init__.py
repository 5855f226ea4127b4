"""The 1-bit SGD system of 2014: AdaGrad on the aggregate, double buffering, minibatch size, warm start.

References:
    Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent", Interspeech 2014.
"""

from gradcomp.onebit_sgd.adagrad import AggregateAdagrad, LocalAdagrad, MomentumAdagrad
from gradcomp.onebit_sgd.warm_start import warm_start_steps

__all__ = ["AggregateAdagrad", "LocalAdagrad", "MomentumAdagrad", "warm_start_steps"]
