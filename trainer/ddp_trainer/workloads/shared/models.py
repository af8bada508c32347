"""Networks as plain torch modules. They do not depend on ranks, data or files."""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

Stem = Literal["torchvision", "3x3"]


class ToyModel(nn.Module):
    """Model of PyTorch's DDP tutorial: Linear(10, hidden), ReLU, Linear(hidden, 5).

    In the tutorial `hidden` is 10.
    """

    def __init__(self, hidden: int = 10) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, hidden)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(hidden, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, 10) to outputs (N, 5)."""
        out: Tensor = self.net2(self.relu(self.net1(inputs)))
        return out


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers for images of 8 x 8 pixels.

    It has 151,306 parameters and no BatchNorm.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 1, 8, 8) to logits (N, classes)."""
        out: Tensor = self.classifier(self.features(images))
        return out


class MnistNet(nn.Module):
    """Network of PyTorch/XLA's MNIST examples: two convolutions, each with BatchNorm.

    It has 21,900 parameters.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.bn1 = nn.BatchNorm2d(10)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.bn2 = nn.BatchNorm2d(20)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 1, 28, 28) to logits (N, classes)."""
        out = self.bn1(F.relu(F.max_pool2d(self.conv1(images), 2)))
        out = self.bn2(F.relu(F.max_pool2d(self.conv2(out), 2)))
        result: Tensor = self.fc2(F.relu(self.fc1(out.flatten(1))))
        return result


def _downsample(channels_in: int, channels: int, stride: int) -> nn.Module | None:
    """Return the module that fits a block's input to its output, or None if it fits already."""
    if stride == 1 and channels_in == channels:
        return None
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut around them (He et al. 2016, figure 2)."""

    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        # Convolutions before a BatchNorm need no bias, because BatchNorm adds its own.
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = _downsample(channels_in, channels, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """Return the normalisation before the shortcut is added."""
        return self.bn2

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (N, channels_in, H, W) to (N, channels, H / stride, W / stride)."""
        shortcut = inputs if self.downsample is None else self.downsample(inputs)
        out = self.relu(self.bn1(self.conv1(inputs)))
        out = self.bn2(self.conv2(out))
        result: Tensor = self.relu(out + shortcut)
        return result


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution with a shortcut (He et al. 2016, figure 5).

    The stride is in the 3x3 convolution, as in torchvision ("ResNet v1.5").
    """

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        wide = channels * self.expansion
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, wide, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(channels_in, wide, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """Return the normalisation before the shortcut is added."""
        return self.bn3

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (N, channels_in, H, W) to (N, 4 * channels, H / stride, W / stride)."""
        shortcut = inputs if self.downsample is None else self.downsample(inputs)
        out = self.relu(self.bn1(self.conv1(inputs)))
        out = self.relu(self.bn2(self.conv2(out)))
        result: Tensor = self.relu(self.bn3(self.conv3(out)) + shortcut)
        return result


Block = BasicBlock | Bottleneck


def _layer(
    block: type[Block], channels_in: int, channels: int, depth: int, stride: int
) -> nn.Sequential:
    """Return `depth` blocks. Only the first has the stride."""
    later = [block(channels * block.expansion, channels, 1) for _ in range(depth - 1)]
    return nn.Sequential(block(channels_in, channels, stride), *later)


class ResNet(nn.Module):
    """Residual network (He et al. 2016) with torchvision's module names.

    State dicts can be exchanged with torchvision's models.

    `stem="torchvision"` begins with a 7x7 convolution of stride 2 and max pooling. It was made for
    large images: on 32 x 32 pixels it is fast and less accurate. `stem="3x3"` begins with a 3x3
    convolution of stride 1 and has no pooling, as is usual for CIFAR. It takes about twelve times
    the work. Only the shape of `conv1.weight` differs between the two.

    With `zero_init_residual` each block initially returns its shortcut alone. This helps a short
    training (Goyal et al. 2017).
    """

    def __init__(
        self,
        block: type[Block],
        depths: Sequence[int],
        classes: int,
        stem: Stem = "torchvision",
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        self.maxpool: nn.Module
        if stem == "3x3":
            self.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
            self.maxpool = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _layer(block, 64, 64, depths[0], stride=1)
        self.layer2 = _layer(block, 64 * block.expansion, 128, depths[1], stride=2)
        self.layer3 = _layer(block, 128 * block.expansion, 256, depths[2], stride=2)
        self.layer4 = _layer(block, 256 * block.expansion, 512, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * block.expansion, classes)
        self._initialise(zero_init_residual)

    def _initialise(self, zero_init_residual: bool) -> None:
        for module in self.modules():
            # As in torchvision (He et al. 2015).
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            # With a factor of 0, the block adds nothing to its shortcut.
            if zero_init_residual and isinstance(module, Block):
                nn.init.zeros_(module.last_norm.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, classes)."""
        out = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        result: Tensor = self.fc(self.avgpool(out).flatten(1))
        return result


def resnet18(
    classes: int = 10, stem: Stem = "torchvision", zero_init_residual: bool = False
) -> ResNet:
    """Return a ResNet-18: 11,689,512 parameters with 1,000 classes and torchvision's stem."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, stem, zero_init_residual)


def resnet50(classes: int = 1000) -> ResNet:
    """Return a ResNet-50: 25,557,032 parameters with 1,000 classes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes)


def parameter_count(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def has_batch_norm(model: nn.Module) -> bool:
    """Return True if a module of `model` normalises by the statistics of the batch."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
