"""Dynamic loss scaling: the scale of NNabla's mixed-precision updater, with torch's growth rule as
an alternative.

Deviations from NNabla: gradients of several ranks are averaged, not summed; so are the losses of
accumulated batches; the scale keeps within bounds; ranks agree on the verdict; the 101st overflow
in a row is an error, not a step left out in silence.

References:
    NNabla, "Mixed Precision Training" tutorial, DynamicLossScalingUpdater.
    Micikevicius et al. 2018, "Mixed Precision Training" (arXiv 1710.03740), section 3.2.
"""

from gradcomp.amp.scaler import DynamicLossScaler
from gradcomp.amp.updater import DynamicLossScalingUpdater

__all__ = ["DynamicLossScaler", "DynamicLossScalingUpdater"]
