"""The options of each workload, as dataclasses. Their fields are the flags."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ddp_trainer.cli.flags import (
    CHANNELS,
    COUNT,
    COUNT_FROM_0,
    FILE_OR_URL,
    FOLDER,
    NAME,
    NON_NEGATIVE,
    PIXELS,
    POSITIVE,
    STEPS,
    URL,
    flag,
)

# Flags of several workloads, with different defaults


def _batch_size(default: int) -> Any:
    return flag(default, "samples per step and process", COUNT)


def _learning_rate(default: float, meaning: str = "highest learning rate of the schedule") -> Any:
    return flag(default, meaning, POSITIVE)


def _epochs(default: int, meaning: str = "passes over the data") -> Any:
    return flag(default, meaning, COUNT, also=("--num-epochs",))


def _log_every(default: int) -> Any:
    return flag(default, "steps between two reports of the training loss", STEPS)


def _steps(default: int) -> Any:
    return flag(default, "steps to train", COUNT)


@dataclass(frozen=True)
class Useless:
    """Names of options without effect, and the reason."""

    names: Sequence[str] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every workload: its processes, and what they share."""

    seed: int = flag(
        0,
        "seed of weights, order and augmentation",
        COUNT_FROM_0,
        also=("--random-seed",),
    )
    threads: int | None = flag(
        None, "CPU threads per process (default $OMP_NUM_THREADS or torch's)", COUNT
    )
    timeout: float | None = flag(
        None,
        "seconds that the processes wait for each other, in a step or while one loads data "
        "(default torch's: 1,800)",
        POSITIVE,
    )
    spawn: int | None = flag(
        None,
        "start N processes on this machine with torch.multiprocessing, without torchrun",
        COUNT,
    )
    local_rank: int | None = flag(
        None,
        "number of the process on its node, as torch.distributed.launch passes it; torchrun sets "
        "LOCAL_RANK instead",
        COUNT_FROM_0,
    )
    device: Literal["auto", "cpu", "cuda", "xla", "neuron"] = flag(
        "auto",
        "device to train on: auto is GPUs if there are any, else Trainium, else the CPU; xla is "
        "torch_xla on the device in PJRT_DEVICE; neuron is TorchNeuron",
    )
    init_method: str = flag(
        "env://",
        "how the processes meet: env:// uses torchrun's variables; file:///PATH uses a new file "
        "that all processes see, with RANK and WORLD_SIZE set; xla:// needs --device xla",
        URL,
    )

    @property
    def processes_alone(self) -> int:
        """Return the number of processes to spawn if no launcher started several."""
        return 1

    @property
    def useless(self) -> Useless:
        """Return the options without effect, given the others."""
        return Useless()


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Options of a resumable training. `batch_size` is per process."""

    batch_size: int = _batch_size(32)
    global_batch_size: int | None = flag(
        None,
        "samples per step over all processes (default: --batch-size times the number of processes)",
        COUNT,
    )
    on_resize: Literal["keep", "change", "refuse"] = flag(
        "keep",
        "if the checkpoint was made with another number of samples per step over all processes, as "
        "after a change of the number of processes: keep that number, change to the one of this "
        "run, or refuse to start",
    )
    log_every: int = _log_every(10)
    checkpoint_dir: Path | None = flag(
        None,
        "folder of the checkpoints (default $DDP_CHECKPOINT_DIR; without it, none are written)",
        FOLDER,
        environment="DDP_CHECKPOINT_DIR",
    )
    checkpoint_every: int = flag(
        100,
        "steps between two checkpoints; there is also one after each epoch, after a signal and at "
        "the end",
        STEPS,
    )

    def samples_per_step(self, processes: int) -> int:
        """Return the samples per step over all processes."""
        return self.global_batch_size or self.batch_size * processes


@dataclass(frozen=True, kw_only=True)
class ToyOptions(Options):
    """A regression on random numbers, to test the launch.

    After every step the ranks compare their parameters, bit by bit.
    """

    model: Literal["small", "wide"] = flag(
        "small", "small: Linear 10-10-5; wide: Linear 10-1,000,000-5, whose gradients take 64 MB"
    )
    no_bucket_view: bool = flag(
        False,
        "let DDP copy every gradient into its buckets; the gradients then take twice the memory",
    )
    steps: int = _steps(100)
    batch_size: int = _batch_size(20)
    learning_rate: float | None = flag(
        None, "learning rate of SGD (default 0.001; for the wide model 0.000001)", POSITIVE
    )


@dataclass(frozen=True, kw_only=True)
class SkewedOptions(Common):
    """Ranks of unequal speed: a timeout that names the slow rank, and uneven inputs with Join.

    In every step, the last rank sleeps for --skew seconds, rank 0 does not sleep, and the others
    sleep for a time in between. If --skew is longer than --timeout, the run ends with a message
    that names the slow rank. With --uneven, no rank sleeps. The last rank then has three times the
    inputs of rank 0, and DDP's Join lets the ranks that have finished wait for it.
    """

    steps: int = _steps(20)
    batch_size: int = _batch_size(20)
    skew: float = flag(0.1, "seconds that the last rank sleeps in each step", NON_NEGATIVE)
    uneven: bool = flag(False, "the last rank has three times the inputs of rank 0")
    log_every: int = _log_every(5)

    @property
    def useless(self) -> Useless:
        return Useless(("skew", "log_every"), "with --uneven") if self.uneven else Useless()

    @property
    def processes_alone(self) -> int:
        return 2


@dataclass(frozen=True, kw_only=True)
class ModelParallelOptions(Common):
    """One model on two devices, inside DDP, with its batches in a pipeline of micro-batches.

    On GPUs each process uses two, so start half as many processes as there are GPUs. With
    TorchNeuron on Trainium, start half as many as there are cores. On a CPU both parts of the model
    share the processor.
    """

    steps: int = _steps(100)
    batch_size: int = _batch_size(20)
    micro_batches: int = flag(4, "number of parts into which the pipeline splits a batch", COUNT)
    learning_rate: float = _learning_rate(0.001, "learning rate of SGD")
    log_every: int = _log_every(10)


@dataclass(frozen=True, kw_only=True)
class MessagesOptions(Common):
    """Point-to-point and collective messages, each checked. With two processes, their speed.

    send and recv, isend and irecv; broadcast, reduce, scatter, gather, all_reduce, all_gather; sum,
    product, maximum and minimum; a group of the even ranks.
    """

    repeat: int = flag(20, "number of messages of each size when speed is measured", COUNT)
    largest: int = flag(16, "largest message whose speed is measured, in MiB", COUNT)

    @property
    def processes_alone(self) -> int:
        return 4


@dataclass(frozen=True, kw_only=True)
class ClassifierOptions(Options):
    """Options of the image classifiers."""

    epochs: int = _epochs(20)
    sync_batch_norm: bool = flag(
        False,
        "compute BatchNorm's statistics over the whole batch, not over each process's part; slower",
    )
    model_dir: Path | None = flag(
        None,
        "folder of the model's weights, which are written after each epoch (default: the folder of "
        "the checkpoints; on SageMaker $SM_MODEL_DIR); if neither --checkpoint-dir nor "
        "$DDP_CHECKPOINT_DIR is set, checkpoints are written to it too",
        FOLDER,
        environment="SM_MODEL_DIR",
    )
    model_filename: str = flag("model.pth", "file name of the weights", NAME)
    resume: bool = flag(
        False,
        "require a checkpoint to resume from; by default a run resumes if there is one",
    )


@dataclass(frozen=True, kw_only=True)
class DigitsOptions(ClassifierOptions):
    """A small convolutional network on 1,797 handwritten digits, which are part of the package.

    It trains on 1,437 digits and tests on 360. It needs no data.
    """

    learning_rate: float = _learning_rate(0.05)


@dataclass(frozen=True, kw_only=True)
class Cifar10Options(ClassifierOptions):
    """ResNet-18 on the 60,000 photographs of CIFAR-10, with a test after every epoch."""

    data: Path = flag(
        ...,
        "folder that contains CIFAR-10, at any depth, as image folders "
        "{train,test}/<class>/*.jpg or .png, as cifar-10-batches-bin or as cifar-10-batches-py; "
        "https://www.cs.toronto.edu/~kriz/cifar.html has archives of it",
        FOLDER,
        environment=CHANNELS,
    )
    stem: Literal["torchvision", "3x3"] = flag(
        "torchvision",
        "torchvision: the 7x7 stem of the published ResNet-18, which is fast; 3x3: the usual stem "
        "for small images, more accurate, with about twelve times the work",
    )
    recipe: Literal["tutorial", "fast"] = flag(
        "tutorial",
        "tutorial: 5 epochs, batch 256 per process, SGD with learning rate 0.1, momentum 0.9 and "
        "weight decay 0.00001; fast: 1 epoch, batch 32, a learning rate that rises to 0.1 and "
        "falls to 0, Nesterov, weight decay 0.0005, only flips, and bf16 if the hardware computes "
        "in it",
    )
    precision: Literal["recipe", "auto", "bf16", "fp32"] = flag(
        "recipe",
        "precision of convolutions: auto is bf16 if the hardware computes in it, else fp32; recipe "
        "is fp32 with the tutorial recipe and auto with the fast one; weights and sums are always "
        "fp32",
    )
    epochs: int = flag(
        0, "passes over the data (default: the recipe's)", COUNT, also=("--num-epochs",)
    )
    batch_size: int = flag(0, "samples per step and process (default: the recipe's)", COUNT)
    learning_rate: float | None = flag(
        None, "highest learning rate (default: the recipe's)", POSITIVE
    )
    log_every: int = _log_every(20)
    limit_train: int | None = flag(
        None, "use only N training images, spread evenly (default: all)", COUNT
    )
    limit_test: int | None = flag(
        None, "use only N test images, spread evenly (default: all)", COUNT
    )


@dataclass(frozen=True, kw_only=True)
class HymenopteraOptions(ClassifierOptions):
    """Fine-tuning of a pretrained ResNet-18 on 397 photographs of ants and bees.

    The last layer is replaced. The other layers begin with --weights, and are trained too unless
    --frozen is given. The weights of the best epoch are kept in --model-dir.
    """

    data: Path = flag(
        ...,
        "folder that contains train/<class>/ and val/<class>/ with photographs, at any depth; "
        "https://download.pytorch.org/tutorial/hymenoptera_data.zip has them",
        FOLDER,
        environment=CHANNELS,
    )
    weights: str | None = flag(
        None,
        "state dict of a ResNet-18 in torchvision's format: a file, such as a cifar10 run writes "
        "to its --model-dir, or a URL, such as "
        "https://download.pytorch.org/models/resnet18-f37072fd.pth (default: a random start)",
        FILE_OR_URL,
    )
    frozen: bool = flag(False, "train only the new last layer")
    image_size: int = flag(224, "height and width in pixels", PIXELS)
    epochs: int = _epochs(25)
    batch_size: int = _batch_size(4)
    learning_rate: float = _learning_rate(
        0.001, "learning rate of SGD, divided by ten every 7 epochs"
    )


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(Common):
    """Options of the measurements of speed on random data."""

    batch_size: int = _batch_size(128)
    rounds: int = flag(8, "rounds in which DDP and the plain loop are each measured", COUNT)
    steps: int = flag(10, "steps per round", COUNT)

    @property
    def processes_alone(self) -> int:
        return 2


@dataclass(frozen=True, kw_only=True)
class MnistOptions(ThroughputOptions, ClassifierOptions):
    """MNIST with the network of PyTorch/XLA's examples: accuracy, or speed on random data.

    With --data it trains and tests. With --fake it measures DDP and a plain loop (the backward
    pass, then one all-reduce of all gradients) on random images, in turns.
    """

    data: Path | None = flag(
        None,
        "folder that contains MNIST's IDX files, at any depth; with only the 10,000 test images, "
        "it trains on 8,000 of them",
        FOLDER,
    )
    fake: bool = flag(
        False, "do not train; measure the speed of DDP and of a plain loop on random images"
    )
    arm: Literal["ddp", "native"] = flag(
        "ddp",
        "how gradients are averaged on real data: ddp is DistributedDataParallel; native is one "
        "all-reduce after the backward pass",
    )
    epochs: int = _epochs(30)
    batch_size: int = _batch_size(128)
    learning_rate: float | None = flag(
        None,
        "learning rate of SGD (default 0.01 for every --batch-size samples of a step over all "
        "processes)",
        POSITIVE,
    )

    @property
    def processes_alone(self) -> int:
        return 2 if self.fake else 1

    @property
    def useless(self) -> Useless:
        if not self.fake:
            return Useless(("rounds", "steps"), "without --fake")
        used = {"fake"} | {option.name for option in fields(ThroughputOptions)}
        names = [option.name for option in fields(self) if option.name not in used]
        return Useless(names, "with --fake, which only measures the speed")


@dataclass(frozen=True, kw_only=True)
class Resnet50Options(ThroughputOptions):
    """ResNet-50 on random images: images per second of DDP and of a plain loop, in turns.

    The plain loop runs the backward pass, then one all-reduce of all gradients in a flat tensor.
    """

    image_size: int = flag(64, "height and width in pixels; ImageNet's is 224", PIXELS)
    batch_size: int = _batch_size(16)
    rounds: int = flag(6, "rounds in which DDP and the plain loop are each measured", COUNT)
    steps: int = flag(4, "steps per round", COUNT)


WORKLOADS: dict[str, type[Common]] = {
    "toy": ToyOptions,
    "skewed": SkewedOptions,
    "model_parallel": ModelParallelOptions,
    "messages": MessagesOptions,
    "digits": DigitsOptions,
    "cifar10": Cifar10Options,
    "hymenoptera": HymenopteraOptions,
    "mnist": MnistOptions,
    "resnet50": Resnet50Options,
}
