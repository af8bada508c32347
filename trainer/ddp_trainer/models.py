"""The networks: plain torch modules that know nothing of ranks, data or files."""

from typing import Literal

from torch import Tensor, nn

Stem = Literal["torchvision", "3x3"]


class ToyModel(nn.Module):
    """The model of PyTorch's DDP tutorial: Linear(10, 10), ReLU, Linear(10, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        """(N, 10) → (N, 5)."""
        out: Tensor = self.net2(self.relu(self.net1(inputs)))
        return out


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers for images of 8 x 8 pixels; 151,306 parameters, no BatchNorm."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, classes))

    def forward(self, images: Tensor) -> Tensor:
        """(N, 1, 8, 8) → (N, classes), unnormalised log-probabilities."""
        out: Tensor = self.classifier(self.features(images))
        return out


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut around them (He et al. 2016, figure 2)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """(N, channels_in, H, W) → (N, channels, H / stride, W / stride)."""
        shortcut = inputs if self.downsample is None else self.downsample(inputs)
        out = self.relu(self.bn1(self.conv1(inputs)))
        out = self.bn2(self.conv2(out))
        result: Tensor = self.relu(out + shortcut)
        return result


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016), its modules named as in torchvision, so that state dicts are interchangeable.

    `stem="torchvision"` begins with a 7x7 convolution of stride 2 and max pooling, made for large images: fast and less
    accurate on 32 x 32 pixels. `stem="3x3"` begins with a 3x3 convolution of stride 1 and no pooling, as is usual for
    CIFAR: about twelve times the work. Only the shape of `conv1.weight` differs between the two.
    """

    def __init__(self, classes: int = 10, stem: Stem = "torchvision") -> None:
        super().__init__()
        small = stem == "3x3"
        self.conv1 = nn.Conv2d(
            3, 64, 3 if small else 7, stride=1 if small else 2, padding=1 if small else 3, bias=False
        )
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) → (N, classes), unnormalised log-probabilities."""
        out = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        result: Tensor = self.fc(self.avgpool(out).flatten(1))
        return result


def parameter_count(model: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether it normalises by the statistics of the batch, which one sample does not have."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
