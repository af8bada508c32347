"""The networks, variants and experiments of bench/training_speed.py."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.workloads.shared.gradient_arms import Native
from ddp_trainer.workloads.shared.models import MnistNet, resnet18


class SmallNet(nn.Sequential):
    """Five convolutions with BatchNorm, 0.2 M parameters, for images of shape (3, 32, 32)."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for width, stride in ((32, 1), (64, 2), (64, 2), (96, 2), (96, 2)):
            layers.append(nn.Conv2d(channels, width, 3, stride, 1, bias=False))
            layers.append(nn.BatchNorm2d(width))
            layers.append(nn.ReLU())
            channels = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


@dataclass(frozen=True)
class Case:
    """A network, the shape of an image, images per step and rank, and steps per turn."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    steps: int


def resnet18_3x3() -> nn.Module:
    return resnet18(stem="3x3")


def resnet18_torchvision() -> nn.Module:
    return resnet18(stem="torchvision")


CASES = {
    "scaling": {
        "ResNet-18, 3x3 stem, batch 32": Case(resnet18_3x3, (3, 32, 32), 32, 2),
        "ResNet-18, torchvision stem, batch 32": Case(resnet18_torchvision, (3, 32, 32), 32, 12),
    },
    # 320 images per turn.
    "small": {
        "MNIST net, batch 8": Case(MnistNet, (1, 28, 28), 8, 40),
        "MNIST net, batch 32": Case(MnistNet, (1, 28, 28), 32, 10),
        "0.2 M net, batch 8": Case(SmallNet, (3, 32, 32), 8, 40),
        "0.2 M net, batch 32": Case(SmallNet, (3, 32, 32), 32, 10),
    },
}


# --- Ways to average the gradients.


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Step:
    """A step's module, the context around its passes, and a call after each backward pass."""

    module: nn.Module
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    after_backward: Callable[[], None] = _nothing


def plain(model: nn.Module, _: Runtime) -> Step:
    """Use DDP as tutorials do."""
    return Step(DistributedDataParallel(model))


def with_bucket_view(model: nn.Module, _: Runtime) -> Step:
    """Use plain DDP with gradients as views of the buckets."""
    return Step(DistributedDataParallel(model, gradient_as_bucket_view=True))


def ours(model: nn.Module, runtime: Runtime) -> Step:
    """Use DDP as the trainer does."""
    return Step(runtime.wrap(model))


def static_graph(model: nn.Module, runtime: Runtime) -> Step:
    """Use ours, and promise DDP an unchanging graph."""
    return Step(runtime.wrap(model, static_graph=True))


def small_buckets(model: nn.Module, runtime: Runtime) -> Step:
    """Use ours with buckets of 0.1 MB."""
    return Step(runtime.wrap(model, bucket_cap_mb=0.1))


def fp16_hook(model: nn.Module, runtime: Runtime) -> Step:
    """Use ours with PyTorch's hook for sending gradients as fp16: half the bytes, less exact.

    The hook for bf16 needs NCCL.
    """
    ddp = runtime.wrap(model)
    assert isinstance(ddp, DistributedDataParallel)
    ddp.register_comm_hook(None, fp16_compress_hook)
    return Step(ddp)


def no_sync(model: nn.Module, runtime: Runtime) -> Step:
    """Use ours without any communication: the upper limit of any gain."""
    ddp = runtime.wrap(model)
    assert isinstance(ddp, DistributedDataParallel)
    return Step(ddp, context=ddp.no_sync)


def one_flat_all_reduce(model: nn.Module, runtime: Runtime) -> Step:
    """Use no DDP, but one all-reduce over all gradients after the backward pass."""
    arm = Native(model, runtime)
    return Step(model, after_backward=arm.synchronise)


def independent(model: nn.Module, _: Runtime) -> Step:
    """Train each rank separately, at the same time."""
    return Step(model)


# --- Variants and experiments.


@dataclass(frozen=True)
class Variant:
    """A way to average the gradients, and the other optimisations of the trainer."""

    make: Callable[[nn.Module, Runtime], Step]
    batch_scheduling: bool = True
    # The memory layout of images and weights.
    channels_last: bool = True
    fused_optimizer: bool = True


TUTORIALS = {"batch_scheduling": False, "channels_last": False, "fused_optimizer": False}
SMALL_WITHOUT_FREED_MEMORY = {
    "plain DDP": Variant(plain, **TUTORIALS),
    "plain DDP again": Variant(plain, **TUTORIALS),
    "+ bucket view": Variant(with_bucket_view, **TUTORIALS),
    "+ buffers only where read": Variant(ours, **TUTORIALS),
    "+ batch scheduling": Variant(ours, channels_last=False, fused_optimizer=False),
    "+ channels last": Variant(ours, fused_optimizer=False),
    "+ fused optimizer": Variant(ours),
}
SMALL_IN_ANOTHER_PAIR = {"+ fused optimizer again": Variant(ours)}
SMALL = {
    "+ freed memory kept (ours)": Variant(ours),
    "ours with static graph": Variant(static_graph),
    "ours with buckets of 0.1 MB": Variant(small_buckets),
    "ours with gradients sent as fp16": Variant(fp16_hook),
    "one flat all-reduce": Variant(one_flat_all_reduce),
    "ours in no_sync": Variant(no_sync),
}
SCALING = {
    "independent processes": Variant(independent),
    "independent processes again": Variant(independent),
    "DDP (ours)": Variant(ours),
    "ours with static graph": Variant(static_graph),
    "one flat all-reduce": Variant(one_flat_all_reduce),
    "plain DDP": Variant(plain, **TUTORIALS),
}


@dataclass(frozen=True)
class Part:
    """Variants measured in turns by one pair of processes.

    Settings of malloc apply to a whole process, so they cannot differ between variants of a part.
    """

    variants: Mapping[str, Variant]
    keeps_freed_memory: bool = True
    # Keep each rank on a core of its own.
    pinned: bool = False


EXPERIMENTS = {
    "scaling": [Part(SCALING, pinned=True)],
    "small": [
        Part(SMALL_WITHOUT_FREED_MEMORY, keeps_freed_memory=False),
        Part(SMALL_IN_ANOTHER_PAIR, keeps_freed_memory=False),
        Part(SMALL),
    ],
}
