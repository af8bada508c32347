"""Speed of ResNet-50 on NVIDIA GPUs, measured in turns within one run.

    torchrun --standalone --nproc-per-node gpu -m bench.gpu_speed
    torchrun --standalone --nproc-per-node 2 -m bench.gpu_speed --device cpu --image-size 32

Trains on random images. Compares DDP with a plain loop, once with PyTorch's defaults and once with
bf16, channels_last and a fused optimizer. In the plain loop each rank trains by itself. Each of the
three options is also added to it alone. With one GPU, DDP has a group of one rank over NCCL. Prints
a table in markdown, and what this machine cannot show. The second command only tries the script.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_trainer.ranks.data_parallel import DistributedModel, ddp_settings
from ddp_trainer.ranks.group import process_group
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.workloads.shared.models import resnet50

# Turns before the first measured one.
DROPPED = 2

# The target of DDP: its least share of the plain loop's speed.
TARGET = 0.98


@dataclass(frozen=True)
class Variant:
    """How a model is trained. Without `ddp`, each rank trains by itself."""

    ddp: bool = False
    bf16: bool = False
    channels_last: bool = False
    fused: bool = False


PLAIN = "plain loop"
DDP = "DDP (ours)"
FAST_PLAIN = "plain loop, all three"
FAST_DDP = "DDP (ours), all three"

VARIANTS = {
    PLAIN: Variant(),
    "plain loop again": Variant(),
    DDP: Variant(ddp=True),
    "+ bf16": Variant(bf16=True),
    "+ channels_last": Variant(channels_last=True),
    "+ fused optimizer": Variant(fused=True),
    FAST_PLAIN: Variant(bf16=True, channels_last=True, fused=True),
    FAST_DDP: Variant(ddp=True, bf16=True, channels_last=True, fused=True),
}


class Trainer:
    """A variant with a model and an optimizer of its own."""

    def __init__(self, variant: Variant, runtime: Runtime, image_size: int) -> None:
        torch.manual_seed(0)
        self._runtime = runtime
        self._bf16 = variant.bf16
        self._layout = torch.channels_last if variant.channels_last else torch.contiguous_format
        model = resnet50().to(runtime.device)
        model.to(memory_format=self._layout)  # type: ignore[call-overload]
        self._model: nn.Module = model
        if variant.ddp:
            self._model = DistributedModel(model, **ddp_settings(model))
        self._optimizer = torch.optim.SGD(
            model.parameters(), lr=1e-3, momentum=0.9, fused=variant.fused
        )
        runtime.warm_up(
            self._model, torch.randn(2, 3, image_size, image_size, device=runtime.device)
        )

    def take_turn(self, images: Tensor, labels: Tensor, steps: int) -> float:
        """Train `steps` steps on one batch and return the seconds per step of the slowest rank."""
        runtime = self._runtime
        images = images.to(memory_format=self._layout)
        runtime.hardware.wait()
        runtime.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            with torch.autocast(runtime.device.type, torch.bfloat16, enabled=self._bf16):
                loss = F.cross_entropy(self._model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            runtime.step(self._optimizer)
        runtime.hardware.wait()
        took = torch.tensor((time.perf_counter() - began) / steps, dtype=torch.float64)
        return float(runtime.maximum(took))


def measure(runtime: Runtime, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds per step of each variant in each turn."""
    size = options.image_size
    trainers = {name: Trainer(variant, runtime, size) for name, variant in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(DROPPED + options.turns):
        images = torch.randn(options.batch_size, 3, size, size, device=runtime.device)
        labels = torch.randint(0, 1000, (options.batch_size,), device=runtime.device)
        # The order changes from turn to turn, so no variant always follows the same one.
        names = list(trainers) if turn % 2 else list(reversed(trainers))
        for name in names:
            took = trainers[name].take_turn(images, labels, options.steps)
            if turn >= DROPPED:
                seconds[name].append(took)
    return seconds


def table(seconds: Mapping[str, list[float]], images: int) -> Iterator[str]:
    """Yield a table in markdown: medians, and their ratio to the first.

    `images` is the number of images per step.
    """
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    first = medians[PLAIN]
    yield "| | ms a step | images/s | times the first | fastest to slowest turn, ms |"
    yield "|---|---|---|---|---|"
    for name, median in medians.items():
        spread = f"{min(seconds[name]) * 1e3:.1f} to {max(seconds[name]) * 1e3:.1f}"
        yield (
            f"| {name} | {median * 1e3:.1f} | {images / median:.0f} | {first / median:.2f} "
            f"| {spread} |"
        )
    yield ""
    for slow, fast in ((DDP, PLAIN), (FAST_DDP, FAST_PLAIN)):
        share = medians[fast] / medians[slow]
        verdict = "reached" if share >= TARGET else "missed"
        yield f"{slow}: {share:.1%} of the speed of {fast}. Target {TARGET:.0%}: {verdict}."


def describe_device(runtime: Runtime) -> str:
    if runtime.device.type != "cuda":
        return "This machine's CPU"
    return torch.cuda.get_device_name(runtime.device)


def find_gaps(runtime: Runtime) -> list[str]:
    """Return what this run cannot show."""
    gaps = []
    if runtime.device.type != "cuda":
        gaps.append("anything of a GPU: the device is not cuda")
    if runtime.world_size == 1:
        gaps.append("communication: there is one rank, so an all-reduce has no peer")
    if runtime.world_size == int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        gaps.append("a network between nodes: all ranks are on one node")
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank (default 64)")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=20, help="steps per turn (default 20)")
    parser.add_argument("--turns", type=int, default=10, help="turns per variant (default 10)")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("Nothing was measured: PyTorch finds no GPU on this machine.")
        return
    with process_group(device=options.device, tune_cpu=True) as runtime:
        seconds = measure(runtime, options)
        if runtime.is_main:
            images = options.batch_size * runtime.world_size
            print(
                f"{describe_device(runtime)}, PyTorch {torch.__version__}, {runtime.backend}, "
                f"ranks: {runtime.world_size}, batch per rank: {options.batch_size}\n"
            )
            print("\n".join(table(seconds, images)))
            for gap in find_gaps(runtime):
                print(f"Not measured: {gap}.")


if __name__ == "__main__":
    main()
