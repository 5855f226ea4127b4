"""Number of nodes at which computing a minibatch takes as long as exchanging its gradients.

Implements Seide, Fu, Droppo, Li, Yu 2014, "1-bit stochastic gradient descent", section 3. On K
nodes, a node computes for T_calc(K) = (N/2 * T_frm + C * T_post) / K + T_upd and exchanges for
T_comm = T_comm_fp32 / Z at the same time. Half a minibatch takes max(T_calc(K), T_comm), so the
best K is the smallest with T_calc(K) <= T_comm:

    K^ = (N/2 * T_frm + C * T_post) / (T_comm_fp32 / Z - T_upd)

Deviation: the paper's K^ is a real number; here it is rounded up. The arithmetic is exact (with
fractions equal to the given floats), so an integer K^ is not rounded up to the next one.
"""

from __future__ import annotations

import math
from fractions import Fraction
from numbers import Rational, Real


def optimal_nodes(
    *,
    minibatch: float,
    t_frame: float,
    t_post: float,
    t_comm_fp32: float,
    t_update: float,
    compression_ratio: float = 32.0,
    parallel_post: float = 1.0,
    double_buffering: bool = True,
) -> int | float:
    """Return the smallest number of nodes with the shortest step.

    Args:
        minibatch: N, samples per step over all nodes together; positive.
        t_frame: T_frm, seconds of forward and backward of one sample on one node; positive.
        t_post: T_post, seconds of post-processing a gradient (momentum, AdaGrad), divided over the
            nodes.
        t_comm_fp32: T_comm_fp32, seconds of exchanging one gradient in fp32; the same for any
            number of nodes.
        t_update: T_upd, seconds of a model update, the same on every node.
        compression_ratio: Z, fp32 bytes divided by bytes sent; positive.
        parallel_post: C, number of times that `t_post` is spent.
        double_buffering: a minibatch is exchanged in two halves, each while the other one is
            computed; False: N replaces N/2, as if computing a whole minibatch hid the exchange.

    Returns:
        max(1, ceil(K^)), or ``math.inf`` if an exchange takes no longer than an update
        (t_comm_fp32 / Z <= t_update), because then every additional node makes a step shorter.

    Raises:
        TypeError: an argument is not a real number.
        ValueError: an argument is negative or not finite, `minibatch`, `t_frame` or
            `compression_ratio` is zero, or `double_buffering` is not a bool.
    """
    if double_buffering not in (True, False):
        raise ValueError(f"double_buffering must be True or False, got {double_buffering!r}")
    frames = exact("minibatch", minibatch, positive=True) * exact("t_frame", t_frame, positive=True)
    post = exact("parallel_post", parallel_post) * exact("t_post", t_post)
    ratio = exact("compression_ratio", compression_ratio, positive=True)
    comm, update = exact("t_comm_fp32", t_comm_fp32) / ratio, exact("t_update", t_update)
    calc = frames / (2 if double_buffering else 1) + post
    return max(1, math.ceil(calc / (comm - update))) if comm > update else math.inf


def exact(name: str, value: float, *, positive: bool = False) -> Fraction:
    """Return a number as an exact fraction.

    Raises:
        TypeError, ValueError: it is no real number, not finite, negative, or 0 if `positive`.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    finite = isinstance(value, Rational) or math.isfinite(value)
    if not finite or value < 0 or (positive and value == 0):
        least = "positive" if positive else "at least 0"
        raise ValueError(f"{name} must be {least} and finite, got {value!r}")
    return Fraction(value) if isinstance(value, (int, float, Fraction)) else Fraction(float(value))
