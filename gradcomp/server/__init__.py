"""A parameter server: workers push values or compressed gradients by key, and pull the reduction of
all workers' pushes.

References:
    Li et al. 2014, "Scaling distributed machine learning with the parameter server"; Wen et al.
    2017, TernGrad, for the averages of compressed gradients.
"""

from gradcomp.server.calls import Pending
from gradcomp.server.client import ParameterClient
from gradcomp.server.loop import ServerStats, serve

__all__ = ["ParameterClient", "Pending", "ServerStats", "serve"]
