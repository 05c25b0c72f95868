"""The models of the workloads: small enough to read at a glance, and those that the papers train."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Sequential):
    """Linear layers with ReLU between them, over inputs of any shape.

    >>> sum(p.numel() for p in MLP((64, 128, 10)).parameters())
    9610
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for width, next_width in pairwise(sizes):
            layers += [nn.Linear(width, next_width), nn.ReLU()]
        super().__init__(*layers[:-1])  # logits: no ReLU after the last layer


class LeNet5(nn.Module):
    """LeNet-5 for 1×28×28 images, with ReLU and max-pooling as is usual today (LeCun et al. 1998: tanh, averages).

    >>> sum(p.numel() for p in LeNet5().parameters())
    61706
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2),  # the paper's images are 32×32: padding makes up for it
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = MLP((16 * 5 * 5, 120, 84, classes))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits
