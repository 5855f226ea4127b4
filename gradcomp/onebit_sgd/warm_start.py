"""Warm start: how many exchanges some amount of data is, for ``start_step=``."""

from __future__ import annotations


def warm_start_steps(samples: int, *, samples_per_exchange: int) -> int:
    """Return the exchanges after which `samples` have been seen: what to pass as ``start_step=``.

    Before `start_step` gradients are averaged in fp32; residuals and the states of a transform
    begin, at zero, with the exchange of that number (Seide et al. 2014 trained the first 24 hours
    of data without quantization).

    Args:
        samples: seen by all ranks together before compression starts.
        samples_per_exchange: of all ranks together: a minibatch, or half of one under
            `DoubleBuffer`.

    Raises:
        ValueError: `samples` negative, or `samples_per_exchange` not positive.
    """
    for name, value, least in (
        ("samples", samples, 0),
        ("samples_per_exchange", samples_per_exchange, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return -(-samples // samples_per_exchange)
