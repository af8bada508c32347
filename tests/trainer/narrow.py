"""The trainer with a small network in place of ResNet-18: python -m trainer.narrow cifar10 ...

It has BatchNorm, and two buckets of DDP: the first bucket has 1 MiB. ResNet-18 needs 20 times the
CPU time. DDP_TEST_PAUSE=SECONDS makes each step longer, for a test that interrupts it.
"""

import os
import sys
import time

from torch import Tensor, nn

from ddp_trainer.cli import main
from ddp_trainer.workloads import cifar10

PAUSE = float(os.environ.get("DDP_TEST_PAUSE", 0))


class Narrow(nn.Sequential):
    """Two convolutions with BatchNorm, and two linear layers for images of 32 x 32 pixels."""

    def __init__(self, classes: int) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=2, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, 400),
            nn.ReLU(),
            nn.Linear(400, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            time.sleep(PAUSE)
        logits: Tensor = super().forward(images)
        return logits


if __name__ == "__main__":
    cifar10.resnet18 = lambda classes, *_: Narrow(classes)
    sys.exit(main.main())
