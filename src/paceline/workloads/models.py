"""The models of the workloads: small enough to read at a glance, and those that the papers train."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from paceline.workloads.sparse_rows import Bags

GROUPS = 2
"""Of a normalisation: a divisor of every even width, and few, because the narrow stages have only a few channels."""


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


class SparseMLP(nn.Module):
    """One hidden layer over sparse rows, and logits for all labels: what the field of extreme classification trains.

    The first layer looks up the features that a row has, and its gradient is sparse: only rows of the matrix that some
    sample has touched.

    Args:
        features, labels: how many there are.
        hidden: width of the hidden layer.

    >>> sum(p.numel() for p in SparseMLP(features=135_909, labels=670_091).parameters())  # Amazon-670k
    103838219
    """

    def __init__(self, features: int, labels: int, hidden: int = 128) -> None:
        super().__init__()
        self.features = nn.EmbeddingBag(features, hidden, mode="sum", sparse=True, include_last_offset=True)
        # With torch's 1 the first layer hardly moves: P@1 0.68 instead of 0.72 after four epochs of EURLex-4K.
        nn.init.normal_(self.features.weight, std=hidden**-0.5)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.output = nn.Linear(hidden, labels)

    def forward(self, rows: Bags) -> Tensor:
        hidden = relu(self.features(rows.indices, rows.starts, rows.values) + self.bias)
        logits: Tensor = self.output(hidden)
        return logits


class LeNet5(nn.Module):
    """LeNet-5 for small images, with ReLU and max-pooling as is usual today (LeCun et al. 1998: tanh, averages).

    Args:
        classes: of the logits.
        channels: of the images.
        size: of the images, 28 or 32.

    >>> sum(p.numel() for p in LeNet5().parameters())
    61706
    >>> sum(p.numel() for p in LeNet5(channels=3, size=32).parameters())
    62006
    """

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=(32 - size) // 2),  # the paper's are 32×32: padding makes up for it
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = MLP((16 * 5 * 5, 120, 84, classes))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # on a CPU nearly twice as fast

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


class ResNet18(nn.Module):
    """ResNet-18 for small images (He et al. 2016): four stages of two basic blocks, of w, 2w, 4w and 8w channels.

    The blocks are the paper's. Reduced or changed are:

    - the stem: a 3×3 convolution without max-pooling, as is usual for images of about 32×32, instead of 7×7 with
      stride 2 and pooling; with `stem_stride=2` it halves the image once instead of twice;
    - the width: the paper's is 64; half of it needs about a quarter of the parameters and of the arithmetic;
    - the normalisation: GroupNorm, not BatchNorm. BatchNorm's gradient depends on who shares a micro-batch with a
      sample, so with micro-batches of unequal and small size a mean over samples would not be a mean any more. And
      every rank would gather running statistics of its own, which are no parameters: after a round ranks with equal
      parameters would still hold different models.

    Args:
        width: channels of the first stage; even.
        classes: of the logits.
        channels: of the images.
        stem_stride: of the first convolution.

    >>> sum(p.numel() for p in ResNet18(width=64, channels=3).parameters())  # as the usual one for CIFAR-10
    11173962
    >>> sum(p.numel() for p in ResNet18(width=8).parameters())
    176258
    """

    def __init__(self, width: int = 64, classes: int = 10, channels: int = 1, stem_stride: int = 1) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        before = width
        for stage, after in enumerate((width, 2 * width, 4 * width, 8 * width)):
            blocks += [BasicBlock(before, after, stride=2 if stage else 1), BasicBlock(after, after)]
            before = after
        self.stem = nn.Sequential(*_convolution(channels, width, 3, stem_stride), nn.ReLU())
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(before, classes)
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.blocks(self.stem(images))
        logits: Tensor = self.classifier(features.mean((2, 3)))
        return logits


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a way that skips them; where the shape changes, the way is a 1×1 convolution."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *_convolution(before, after, 3, stride), nn.ReLU(), *_convolution(after, after, 3)
        )
        same = before == after and stride == 1
        self.skip = nn.Identity() if same else nn.Sequential(*_convolution(before, after, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.residual(x) + self.skip(x))


class VGG19(nn.Module):
    """VGG-19 for small images (Simonyan & Zisserman 2015): 2, 2, 4, 4 and 4 convolutions of 3×3 with max-pooling behind
    each stage, of w, 2w, 4w, 8w and 8w channels. Images of 17 to 32 pixels a side end as one pixel.

    The convolutions are the paper's. Reduced or changed are:

    - the classifier: one linear layer, as is usual for images of about 32×32, instead of three with 4,096 channels
      between them, which would hold most of the parameters; the convolutions make 16 layers, it the 17th;
    - the width: the paper's is 64;
    - the normalisation: GroupNorm; the paper has none, and starts the deep network from a shallower one that is trained
      already. With the first weights of He et al. it begins to learn without, too. At width 8 and rate 0.01, batches of
      32, one seed: on Fashion-MNIST an accuracy of 0.67 after 12,000 samples instead of 0.75 after 10,000; on CIFAR-10
      0.22 after 10,000, and with GroupNorm 0.22 after 7,500 and 0.26 after 15,000, which shows no difference. Not
      BatchNorm, for the reasons given at `ResNet18`.

    Args:
        width: channels of the first stage; even.
        classes: of the logits.
        channels: of the images.

    >>> sum(p.numel() for p in VGG19(width=64, channels=3).parameters())  # for CIFAR-10
    20035018
    >>> sum(p.numel() for p in VGG19(width=8).parameters())
    314866
    """

    def __init__(self, width: int = 64, classes: int = 10, channels: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = channels
        for count, after in ((2, width), (2, 2 * width), (4, 4 * width), (4, 8 * width), (4, 8 * width)):
            for _ in range(count):
                layers += [*_convolution(before, after, 3), nn.ReLU()]
                before = after
            layers.append(nn.MaxPool2d(2, ceil_mode=True))  # 28×28 would vanish if odd sizes were rounded down
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, classes)
        _initialise(self)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # on a CPU a fifth faster

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def _convolution(before: int, after: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """A convolution that keeps the image's size at stride 1, and its normalisation, which makes a bias needless."""
    return nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False), nn.GroupNorm(GROUPS, after)


def _initialise(model: nn.Module) -> None:
    """He et al.'s first weights: behind a ReLU the gradients neither grow nor fade from layer to layer."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
