"""The command line: one dataclass of options per workload, from whose fields the flags are made.

Knows nothing of torch, so that --help answers at once.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

DESCRIPTION = """\
Train a model alone, on the processes of one machine, or as a DDPJob; the command line is the same:

  python -m ddp_trainer digits --epochs 20
  torchrun --standalone --nproc-per-node 2 -m ddp_trainer digits --epochs 20
  args: [-m, ddp_trainer, digits, --epochs, "20"]        (in the DDPJob's spec)

`ddp-trainer launch --help`: any script under torchrun, on SageMaker, Slurm, or this machine.
"""

EPILOG = """\
Progress comes as one JSON object per line on stdout of rank 0. What takes --checkpoint-dir goes on from its newest
checkpoint when it is started again with the same flags, and stops after a checkpoint at SIGTERM and SIGINT, with exit
code 128 + signal. Wrong use is exit code 2. (torchrun itself then ends with 1.) DDP_CHECKPOINT_DIR, DDP_RESULT_FILE,
DDP_HEARTBEAT_FILE and DDP_TENSORBOARD_DIR are read from the environment where they are set.
Flags may be spelt with underscores too: --batch_size is --batch-size.
"""

LARGEST = 2**63 - 1  # that torch takes as a seed on every platform
BOUND = 1e9  # of numbers that are not whole: as seconds they are 31 years, and the system's clocks can still count them


# --- What a flag takes.


def whole(at_least: int) -> Callable[[str], int]:
    """Reads a whole number of at least so much."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < at_least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {at_least}")
        if int(text) > LARGEST:
            raise argparse.ArgumentTypeError(f"{text} is too large: {LARGEST:,} is the most")
        return int(text)

    return read


def positive_number(text: str) -> float:
    """Reads a number above 0."""
    number = _number(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 and below {BOUND:,.0f}")
    return number


def not_negative_number(text: str) -> float:
    """Reads a number of at least 0."""
    number = _number(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on and below {BOUND:,.0f}")
    return number


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return float("-inf")
    return number if abs(number) < BOUND else float("-inf")


_READERS: dict[str, Callable[[str], Any]] = {"N": whole(1), "STEPS": whole(1), "X": positive_number}
"""What a placeholder in the help text stands for, where the field brings no reader of its own."""


def flag(
    default: Any,
    meaning: str,
    takes: str = "",
    *,
    read: Callable[[str], Any] | None = None,
    also: Sequence[str] = (),
    environment: str = "",
) -> Any:
    """A field that is a flag of the same name. `default` may be `...`: the flag must be given.

    `takes` is the placeholder of its value, none for a switch and for a field of type Literal; `also` are other names
    of the flag; `environment` is a variable that gives the default.
    """
    metadata = {"meaning": meaning, "takes": takes, "read": read, "also": also, "from": environment}
    if default is ...:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def _batch_size(default: int) -> Any:
    return flag(default, "samples per step and process", "N")


def _learning_rate(default: float, meaning: str = "highest learning rate of the schedule") -> Any:
    return flag(default, meaning, "X")


def _epochs(default: int, meaning: str = "passes over the data") -> Any:
    return flag(default, meaning, "N", also=("--num-epochs",))


def _log_every(default: int) -> Any:
    return flag(default, "steps between two reports of the training loss", "STEPS")


def _steps(default: int) -> Any:
    return flag(default, "steps to train", "N")


# --- The options.


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every workload takes: how its processes are started and what they share."""

    seed: int = flag(
        0, "of weights, order and augmentation", "N", read=whole(0), also=("--random-seed",)
    )
    threads: int | None = flag(
        None, "CPU threads per process (default $OMP_NUM_THREADS or torch's)", "N"
    )
    timeout: float | None = flag(
        None,
        "seconds that the processes wait for each other, in a step or while one loads data (default torch's: 1,800)",
        "X",
    )
    spawn: int | None = flag(
        None,
        "start N processes on this machine by torch.multiprocessing, where no torchrun does",
        "N",
    )
    local_rank: int | None = flag(
        None,
        "the process's number on its node, as torch.distributed.launch passes it; torchrun sets LOCAL_RANK instead",
        "N",
        read=whole(0),
    )

    device: Literal["auto", "cpu", "cuda", "xla", "neuron"] = flag(
        "auto",
        "what to compute on: auto is GPUs where there are some, else Trainium, else the CPU; xla is torch_xla on what "
        "PJRT_DEVICE names, neuron TorchNeuron",
    )
    init_method: str = flag(
        "env://",
        "how the processes meet: env://, what torchrun gives them; file:///PATH, a file that all see and that is not there "
        "yet, with RANK and WORLD_SIZE set; xla:// with --device xla",
        "URL",
        read=str,
    )

    @property
    def processes_alone(self) -> int:
        """How many processes it spawns where nothing has started several; 1 where it makes sense as a single one."""
        return 1

    @property
    def in_vain(self) -> "InVain":
        """Which options do nothing, as others are."""
        return InVain((), "")


@dataclass(frozen=True)
class InVain:
    """Names of options that do nothing, and with what."""

    names: Sequence[str]
    because: str


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """A training that reports its loss and can be resumed. `batch_size` is per process."""

    batch_size: int = _batch_size(32)
    log_every: int = _log_every(10)
    checkpoint_dir: Path | None = flag(
        None,
        "where checkpoints are written and looked for (default $DDP_CHECKPOINT_DIR; none without it)",
        "FOLDER",
        read=Path,
        environment="DDP_CHECKPOINT_DIR",
    )
    checkpoint_every: int = flag(
        100,
        "steps between two checkpoints; also after each epoch, at a signal and at the end",
        "STEPS",
    )


@dataclass(frozen=True, kw_only=True)
class ToyOptions(Options):
    """A regression on random numbers: does the launch work?

    After every step the ranks compare their parameters, bit by bit.
    """

    model: Literal["small", "wide"] = flag(
        "small", "small: Linear 10-10-5; wide: Linear 10-1,000,000-5, whose gradients take 64 MB"
    )
    no_bucket_view: bool = flag(
        False,
        "let DDP copy every gradient into its buckets instead of keeping it there; costs the gradients' memory",
    )
    steps: int = _steps(100)
    batch_size: int = _batch_size(20)
    learning_rate: float | None = flag(
        None, "learning rate of SGD (default 0.001; for the wide model 0.000001)", "X"
    )


@dataclass(frozen=True, kw_only=True)
class SkewedOptions(Common):
    """Ranks of unequal speed: time-outs that name the slow rank, and uneven inputs with Join.

    Every rank sleeps in every step, rank 0 not at all and the last one for --skew seconds. Where that is longer than
    --timeout, the run ends with a message that names the slow rank. With --uneven the last rank has three times the
    inputs of rank 0 instead, and DDP's Join lets those that have finished wait for it.
    """

    steps: int = _steps(20)
    batch_size: int = _batch_size(20)
    skew: float = flag(
        0.1, "seconds that the last rank sleeps in each step", "X", read=not_negative_number
    )
    uneven: bool = flag(False, "the last rank has three times the inputs of rank 0")
    log_every: int = _log_every(5)

    @property
    def in_vain(self) -> InVain:
        """See Common."""
        return InVain(("skew", "log_every") if self.uneven else (), "with --uneven")

    @property
    def processes_alone(self) -> int:
        """See Common."""
        return 2


@dataclass(frozen=True, kw_only=True)
class ModelParallelOptions(Common):
    """One model over two devices, inside DDP: its first half on one, its second on the other, in micro-batches.

    On GPUs a process has two of them, so start half as many processes as there are GPUs (on Trainium by TorchNeuron, half as
    many as cores). On a CPU two stand-ins take their place, which fail like a GPU where a tensor was not moved.
    """

    steps: int = _steps(100)
    batch_size: int = _batch_size(20)
    micro_batches: int = flag(4, "parts of a batch that are in the pipeline at the same time", "N")
    learning_rate: float = _learning_rate(0.001, "learning rate of SGD")
    log_every: int = _log_every(10)


@dataclass(frozen=True, kw_only=True)
class MessagesOptions(Common):
    """Point-to-point and collective messages, each checked; with two processes their speed as well.

    send and recv, isend and irecv; broadcast, reduce, scatter, gather, all_reduce, all_gather; sum, product, maximum
    and minimum; a group of the even ranks.
    """

    repeat: int = flag(20, "how often each size is sent when speed is measured", "N")
    largest: int = flag(16, "largest message whose speed is measured, in MiB", "N")

    @property
    def processes_alone(self) -> int:
        """See Common."""
        return 4


@dataclass(frozen=True, kw_only=True)
class ClassifierOptions(Options):
    """What the image classifiers share."""

    epochs: int = _epochs(20)
    sync_batch_norm: bool = flag(
        False,
        "BatchNorm's statistics over the whole batch instead of each process's part; slower, also on CPUs",
    )
    model_dir: Path | None = flag(
        None,
        "where the model's weights alone are written after an epoch (default beside the checkpoints); also the checkpoints' "
        "place where --checkpoint-dir and $DDP_CHECKPOINT_DIR name none; on SageMaker the default is its model folder",
        "FOLDER",
        read=Path,
        environment="SM_MODEL_DIR",
    )
    model_filename: str = flag("model.pth", "name of that file", "NAME", read=str)
    resume: bool = flag(
        False,
        "insist on a checkpoint to go on from; without this a run goes on where there is one and else begins",
    )


@dataclass(frozen=True, kw_only=True)
class DigitsOptions(ClassifierOptions):
    """A small convolutional net on 1,797 handwritten digits, which are part of the package.

    1,437 to train on, 360 to test. Needs no data.
    """

    learning_rate: float = _learning_rate(0.05)


@dataclass(frozen=True, kw_only=True)
class Cifar10Options(ClassifierOptions):
    """ResNet-18 on the 60,000 photographs of CIFAR-10, evaluated on the test images after every epoch."""

    data: Path = flag(
        ...,
        "folder at or above CIFAR-10 in one of three forms: image folders {train,test}/<class>/*.jpg or .png, "
        "cifar-10-batches-bin, or cifar-10-batches-py; not there yet? See "
        "https://www.cs.toronto.edu/~kriz/cifar.html and unpack one of its archives",
        "FOLDER",
        read=Path,
        environment="SM_CHANNEL_TRAINING",
    )
    stem: Literal["torchvision", "3x3"] = flag(
        "torchvision",
        "torchvision: the 7x7 stem of ResNet-18 as published, quick; 3x3: the usual one for small images, more "
        "accurate and about twelve times the work",
    )
    recipe: Literal["tutorial", "fast"] = flag(
        "tutorial",
        "tutorial: 5 epochs, batch 256 per process, SGD with learning rate 0.1, momentum 0.9, weight decay 0.00001; "
        "fast: 1 epoch, batch 32, a learning rate that rises to 0.1 and falls to 0, Nesterov, weight decay 0.0005, "
        "flips only, bf16 where the hardware computes in it",
    )
    precision: Literal["recipe", "auto", "bf16", "fp32"] = flag(
        "recipe",
        "what convolutions compute in: auto is bf16 where the hardware computes in it, else fp32; recipe is fp32 with the "
        "tutorial recipe and auto with the fast one; weights and sums are fp32 in any case",
    )
    epochs: int = flag(
        0, "passes over the data (default the recipe's)", "N", also=("--num-epochs",)
    )
    batch_size: int = flag(0, "samples per step and process (default the recipe's)", "N")
    learning_rate: float | None = flag(None, "highest learning rate (default the recipe's)", "X")
    log_every: int = _log_every(20)
    limit_train: int | None = flag(None, "use N training images, spread evenly (default all)", "N")
    limit_test: int | None = flag(None, "use N test images, spread evenly (default all)", "N")


@dataclass(frozen=True, kw_only=True)
class HymenopteraOptions(ClassifierOptions):
    """Fine-tuning a pretrained ResNet-18 to tell ants from bees, on 397 photographs.

    The last layer is replaced; the others go on from --weights, and are trained too unless --frozen. The weights of the
    best epoch are kept in --model-dir.
    """

    data: Path = flag(
        ...,
        "folder at or above train/<class>/ and val/<class>/ with photographs; not there yet? Unpack "
        "https://download.pytorch.org/tutorial/hymenoptera_data.zip",
        "FOLDER",
        read=Path,
        environment="SM_CHANNEL_TRAINING",
    )
    weights: str | None = flag(
        None,
        "a ResNet-18's state dict in torchvision's format: a file, such as --model-dir of a cifar10 run wrote, or a URL, "
        "such as https://download.pytorch.org/models/resnet18-f37072fd.pth (default none: a random start)",
        "FILE|URL",
        read=str,
    )
    frozen: bool = flag(False, "train only the new last layer")
    image_size: int = flag(224, "height and width in pixels", "N", read=whole(32))
    epochs: int = _epochs(25)
    batch_size: int = _batch_size(4)
    learning_rate: float = _learning_rate(0.001, "learning rate of SGD, a tenth every 7 epochs")


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(Common):
    """What the measurements of speed on random data share."""

    batch_size: int = _batch_size(128)
    rounds: int = flag(8, "turns that each arm is measured for, on random images", "N")
    steps: int = flag(10, "steps in each of them", "N")

    @property
    def processes_alone(self) -> int:
        """See Common."""
        return 2


@dataclass(frozen=True, kw_only=True)
class MnistOptions(ThroughputOptions, ClassifierOptions):
    """MNIST with the network of PyTorch/XLA's examples: accuracy on real data, speed on random data.

    With --data it trains and tests. With --fake it measures, on random images, DDP beside a plain loop (backward, then
    one all-reduce of all gradients), in turns.
    """

    data: Path | None = flag(
        None,
        "folder at or above MNIST's IDX files; where only the 10,000 test images are, 8,000 of them are trained on",
        "FOLDER",
        read=Path,
    )
    fake: bool = flag(False, "measure both arms on random images instead")
    arm: Literal["ddp", "native"] = flag("ddp", "how real data are trained on")
    epochs: int = _epochs(30)
    batch_size: int = _batch_size(128)
    learning_rate: float | None = flag(
        None, "learning rate of SGD (default 0.01 times the number of processes)", "X"
    )

    @property
    def processes_alone(self) -> int:
        """See Common."""
        return 2 if self.fake else 1

    @property
    def in_vain(self) -> InVain:
        """See Common."""
        if not self.fake:
            return InVain(("rounds", "steps"), "without --fake")
        used = {"fake"} | {option.name for option in fields(ThroughputOptions)}
        return InVain(
            [option.name for option in fields(self) if option.name not in used],
            "with --fake, which keeps nothing",
        )


@dataclass(frozen=True, kw_only=True)
class Resnet50Options(ThroughputOptions):
    """ResNet-50 on random images: images per second of DDP beside a plain loop, in turns.

    The plain loop runs backward first and then one all-reduce of all gradients in a flat tensor.
    """

    image_size: int = flag(64, "height and width in pixels; ImageNet's is 224", "N", read=whole(32))
    batch_size: int = _batch_size(16)
    rounds: int = flag(6, "turns that each arm is measured for", "N")
    steps: int = flag(4, "steps in each of them", "N")


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
"""Each workload's options; the first line of their docstring is its line in the list, the rest its description."""


@dataclass(frozen=True)
class Command:
    """A parsed command line."""

    workload: str
    options: Common


def parse(arguments: Sequence[str] | None = None) -> Command:
    """Read the command line; exits with code 2 and a sentence (on rank 0 only) when it is wrong."""
    parser = _Parser(
        prog="ddp-trainer",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    workloads = parser.add_subparsers(dest="workload", metavar="WORKLOAD", required=True)
    for name, kind in WORKLOADS.items():
        what, _, more = (kind.__doc__ or "").partition("\n")
        subparser = workloads.add_parser(
            name,
            aliases=[name.replace("_", "-")] if "_" in name else [],
            help=what.rstrip("."),
            description=f"{what} {' '.join(more.split())}",
            allow_abbrev=False,
        )
        for option in _in_order(kind):
            _add(subparser, option)
    words = sys.argv[1:] if arguments is None else arguments
    parsed = vars(parser.parse_args(_local_rank_last([_hyphens(word) for word in words])))
    workload = parsed["workload"].replace("-", "_")
    kind = WORKLOADS[workload]
    options = kind(**{option.name: parsed[option.name] for option in fields(kind)})
    if flags := _given_in_vain(options):
        workloads.choices[workload].error(
            f"leave out {', '.join(flags)}: no effect {options.in_vain.because}"
        )
    return Command(workload, options)


def _given_in_vain(options: Common) -> list[str]:
    """The flags that were given and do nothing. What the environment says of them is not meant for this run alone."""
    return [
        _flag(option.name)
        for option in fields(options)
        if option.name in options.in_vain.names
        and getattr(options, option.name) != _default(option)
    ]


class _Parser(argparse.ArgumentParser):
    """Of all processes that were started with the same wrong flag, only rank 0 says so."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit."""
        if os.environ.get("RANK", "0") == "0":
            super().error(message)
        self.exit(2)


def _local_rank_last(words: list[str]) -> list[str]:
    """torch.distributed.launch puts its --local-rank=N before everything else, so before the workload."""
    if not words or words[0].partition("=")[0] != "--local-rank":
        return words
    count = 1 if "=" in words[0] else 2
    return words[count:] + words[:count]


def _hyphens(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _default(option: "Field[Any]") -> Any:
    """Its value where the flag is not given; MISSING where it has to be."""
    told = os.environ.get(option.metadata["from"])
    return option.metadata["read"](told) if told else option.default


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _in_order(kind: type[Common]) -> Iterator[Field[Any]]:
    """A workload's own flags before those that it shares with others."""
    own = set(kind.__annotations__)
    yield from sorted(fields(kind), key=lambda option: option.name not in own)


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _add(parser: argparse.ArgumentParser, option: "Field[Any]") -> None:
    about = option.metadata
    names = [_flag(option.name), *about["also"]]
    meaning = about["meaning"].replace("%", "%%")
    if option.type is bool:
        # Alone, as people write it, or with a value: SageMaker passes every hyperparameter as a name and a value.
        parser.add_argument(
            *names,
            nargs="?",
            const=True,
            default=False,
            type=_truth,
            metavar="true|false",
            help=meaning,
        )
        return
    settings: dict[str, Any] = {"dest": option.name}
    if choices := get_args(option.type) if not about["takes"] else ():
        settings["choices"] = choices
    else:
        settings |= {"metavar": about["takes"], "type": about["read"] or _READERS[about["takes"]]}
    settings["default"] = _default(option)
    if settings["default"] is MISSING:
        settings["required"] = True
    else:
        if option.default not in (None, MISSING) and "(default" not in meaning:
            meaning += f" (default {option.default})"
    parser.add_argument(*names, help=meaning, **settings)
