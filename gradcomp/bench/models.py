"""The model that the benchmarks train. The parameter lists of published ones are in `gradcomp.plan.models`."""

from __future__ import annotations

from torch import Tensor, nn


class LeNet(nn.Module):
    """The LeNet of the TernGrad paper: conv5x5(20)-pool2-conv5x5(50)-pool2-fc500-fc10, SAME padding, ReLU.

    1,256,080 parameters. The paper's dropout is left out: the noise of the codes regularises already (its section 4).

    References:
        Wen et al. 2017, TernGrad, section 5.1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5, padding=2)
        self.conv2 = nn.Conv2d(20, 50, 5, padding=2)
        self.fc1 = nn.Linear(7 * 7 * 50, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores.

        Args:
            images: `(batch, 1, 28, 28)` float32.

        Returns:
            `(batch, 10)` float32, not normalised.
        """
        x = nn.functional.max_pool2d(self.conv1(images).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        scores: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return scores
