"""ResNet-50 on random images: images per second of DDP and of a plain loop.

python -m ddp_trainer resnet50
torchrun --standalone --nproc-per-node 2 -m ddp_trainer resnet50 --image-size 224
"""

from ddp_trainer.cli.options import Resnet50Options
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.progress import Progress
from ddp_trainer.workloads.shared.models import resnet50
from ddp_trainer.workloads.shared.throughput import Benchmark, compare


def train(options: Resnet50Options, runtime: Runtime) -> None:
    """Measure both arms. Raises UserError if there is only one process."""
    image_shape = (3, options.image_size, options.image_size)
    compare(Benchmark("resnet50", resnet50, image_shape), options, Progress(runtime))
