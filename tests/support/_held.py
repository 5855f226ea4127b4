"""What a whole process holds, counted: earlier tests in it may give back what was theirs at any
time, so counts begin `steady`.
"""

import gc
import os
import time

from gradcomp.comm.gloo import _sweep

PATIENCE_S = 20


def descriptors():
    """Return how many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def settled(count, wanted):
    """Return count() once it is `wanted` or less, or after a while."""
    deadline = time.monotonic() + PATIENCE_S
    while count() > wanted and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return count()


def steady(count):
    """Return count() once it has been the same for a while: a warm process still gives back what
    earlier tests held.
    """
    seen, deadline = [], time.monotonic() + PATIENCE_S
    while (len(seen) < 10 or len(set(seen[-10:])) > 1) and time.monotonic() < deadline:
        _sweep()  # groups that were left in the middle of a collective, which has ended by now
        gc.collect()
        time.sleep(0.03)
        seen.append(count())
    return seen[-1]
