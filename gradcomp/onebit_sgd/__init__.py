"""The system around 1-bit gradients of 2014: exchanges behind computation, and minibatches as large as training allows.

References:
    Seide, Fu, Droppo, Li, Yu 2014, "1-bit stochastic gradient descent and its application to data-parallel distributed
    training of speech DNNs", Interspeech.
"""

from gradcomp.onebit_sgd.batch_size import find_batch_size
from gradcomp.onebit_sgd.choice import BatchSizeChoice, BatchSizeTrial
from gradcomp.onebit_sgd.double_buffer import DoubleBuffer
from gradcomp.onebit_sgd.report import OverlapReport

__all__ = ["BatchSizeChoice", "BatchSizeTrial", "DoubleBuffer", "OverlapReport", "find_batch_size"]
