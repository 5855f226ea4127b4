"""Dynamic loss scaling with the growth rule of NNabla's mixed-precision updater, or with torch's.

Deviations from NNabla: gradients of ranks and losses of accumulated batches are averaged, not
summed. The scale has bounds. Ranks agree on whether a step overflowed. The 101st overflow in a row
is an error instead of a silently skipped step.

References:
    NNabla, "Mixed Precision Training" tutorial, DynamicLossScalingUpdater.
    Micikevicius et al. 2018, "Mixed Precision Training" (arXiv 1710.03740), section 3.2.
"""

from gradcomp.amp.scaler import DynamicLossScaler
from gradcomp.amp.updater import DynamicLossScalingUpdater

__all__ = ["DynamicLossScaler", "DynamicLossScalingUpdater"]
