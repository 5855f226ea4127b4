"""A warning where training diverges under `TernGrad`, whose unbiased noise narrows the range of
stable learning rates.

Noise that updates cannot average out makes weights wander: their norm grows. On a perceptron that
trains in fp32 and diverges in `TernGrad` (docs/explanation/ternary.md has the figures) the norm of
all compressed tensors grows by a factor of 5.7 and more within 200 steps; where either trains, by
at most 2.6.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

logger = logging.getLogger("gradcomp")

EVERY = 20  # steps from one look to the next
STEPS = 1000  # after which weights may have grown for better reasons
LIMIT = 3.5  # between what was seen with and without a divergence


class Growth:
    """Looks at the norm of weights now and then, and warns once.

    Args:
        weights: what is trained, float32, bfloat16 or float16.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights, self._first, self._begun = weights, 0.0, -1

    def look(self, step: int) -> None:
        """Compare the norm of the weights with that at the first call.

        Args:
            step: number of steps taken; one in `EVERY` is looked at, `STEPS` from the first on.
        """
        if not self._weights or step % EVERY:
            return
        if self._begun < 0:
            self._first, self._begun = self._norm(), step
        elif step > self._begun + STEPS or not self._first:
            self._weights = ()
        elif not (grown := self._norm() / self._first) <= LIMIT:
            self._weights = ()
            logger.warning(
                f"weights have grown {grown:.1f} times in {step - self._begun} steps under"
                " 'terngrad': its noise is too large for this learning rate, and the loss diverges"
                " if it is not falling now. Take codec 'ternary', which trains at the rates of"
                " fp32, or a smaller learning rate"
            )

    @torch.no_grad()
    def _norm(self) -> float:
        norms = [float(torch.linalg.vector_norm(w, dtype=torch.float32)) for w in self._weights]
        return math.hypot(*norms)
