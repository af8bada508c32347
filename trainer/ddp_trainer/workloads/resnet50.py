"""ResNet-50 on random images: how many a second, by DDP and by the plain loop that it is measured against.

python -m ddp_trainer resnet50
torchrun --standalone --nproc-per-node 2 -m ddp_trainer resnet50 --image-size 224
"""

from ddp_trainer.cli.options import Resnet50Options
from ddp_trainer.progress import Progress
from ddp_trainer.runtime import Runtime
from ddp_trainer.workloads.shared.models import resnet50
from ddp_trainer.workloads.shared.throughput import compare


def train(options: Resnet50Options, runtime: Runtime) -> None:
    """Measure both arms."""
    compare(
        "resnet50",
        resnet50,
        (3, options.image_size, options.image_size),
        options,
        Progress(runtime),
    )
