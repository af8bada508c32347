"""The command line: one dataclass of options per workload. Knows nothing of torch, so that --help answers at once."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, NoReturn

DESCRIPTION = """\
Train a model alone, on the processes of one machine, or as a DDPJob; the command line is the same:

  python -m ddp_trainer digits --epochs 20
  torchrun --standalone --nproc-per-node 2 -m ddp_trainer digits --epochs 20
  args: [-m, ddp_trainer, digits, --epochs, "20"]        (in the DDPJob's spec)
"""

EPILOG = """\
Progress comes as one JSON object per line on stdout of rank 0. Started again with the same flags, a run goes on from
its newest checkpoint. SIGTERM and SIGINT stop it after a checkpoint, with exit code 128 + signal; wrong use is exit
code 2. DDP_CHECKPOINT_DIR, DDP_RESULT_FILE and DDP_HEARTBEAT_FILE are read from the environment where they are set.
"""


@dataclass(frozen=True)
class Options:
    """What every workload takes. `batch_size` is per process; `checkpoint_every` and `log_every` count steps."""

    batch_size: int
    learning_rate: float
    seed: int
    checkpoint_dir: Path | None
    checkpoint_every: int
    log_every: int
    threads: int | None


@dataclass(frozen=True)
class ToyOptions(Options):
    steps: int


@dataclass(frozen=True)
class ClassifierOptions(Options):
    epochs: int


@dataclass(frozen=True)
class DigitsOptions(ClassifierOptions):
    pass


@dataclass(frozen=True)
class Cifar10Options(ClassifierOptions):
    data: Path
    stem: Literal["torchvision", "3x3"]
    limit_train: int | None
    limit_test: int | None


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; exits with code 2 and a sentence (on rank 0 only) when it is wrong."""
    parser = _Parser(
        prog="ddp-trainer", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    workloads = parser.add_subparsers(dest="workload", metavar="WORKLOAD", required=True)
    _add_toy(workloads)
    _add_digits(workloads)
    _add_cifar10(workloads)
    parsed = parser.parse_args(arguments)
    kind: type[Options] = parsed.kind
    return kind(**{field.name: getattr(parsed, field.name) for field in fields(kind)})


class _Parser(argparse.ArgumentParser):
    """Of all processes that were started with the same wrong flag, only rank 0 says so."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            super().error(message)
        self.exit(2)


_Workloads = argparse._SubParsersAction  # argparse has no public name for it


def _add_toy(workloads: "_Workloads[_Parser]") -> None:
    parser = workloads.add_parser(
        "toy", help="Linear 10-10-5 on random data: does the launch work?", description="A regression on random data."
    )
    parser.set_defaults(kind=ToyOptions)
    parser.add_argument("--steps", type=_positive, default=500, metavar="N", help="steps to train (default 500)")
    _add_common(parser, batch_size=20, learning_rate=0.05, log_every=100, checkpoint_every=100)


def _add_digits(workloads: "_Workloads[_Parser]") -> None:
    parser = workloads.add_parser(
        "digits",
        help="small convolutional net on 1,797 handwritten digits, which are part of the package",
        description="Recognise handwritten digits of 8 x 8 pixels: 1,437 to train on, 360 to test. Needs no data.",
    )
    parser.set_defaults(kind=DigitsOptions)
    _add_epochs(parser, 20)
    _add_common(parser, batch_size=32, learning_rate=0.05, log_every=10, checkpoint_every=100)


def _add_cifar10(workloads: "_Workloads[_Parser]") -> None:
    parser = workloads.add_parser(
        "cifar10",
        help="ResNet-18 on the 60,000 photographs of CIFAR-10",
        description="Train ResNet-18 on CIFAR-10, evaluated on the test images after every epoch.",
    )
    parser.set_defaults(kind=Cifar10Options)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder at or above CIFAR-10 in one of three forms: image folders {train,test}/<class>/*.jpg or .png, "
        "cifar-10-batches-bin, or cifar-10-batches-py; not there yet? See "
        "https://www.cs.toronto.edu/~kriz/cifar.html and unpack one of its archives",
    )
    parser.add_argument(
        "--stem",
        choices=("torchvision", "3x3"),
        default="torchvision",
        help="torchvision (default): the 7x7 stem of ResNet-18 as published, quick; 3x3: the usual one for small "
        "images, more accurate and about twelve times the work",
    )
    _add_epochs(parser, 2)
    parser.add_argument(
        "--limit-train", type=_positive, metavar="N", help="use N training images, spread evenly (default all)"
    )
    parser.add_argument(
        "--limit-test", type=_positive, metavar="N", help="use N test images, spread evenly (default all)"
    )
    _add_common(parser, batch_size=128, learning_rate=0.1, log_every=20, checkpoint_every=100)


def _add_epochs(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--epochs", type=_positive, default=default, metavar="N", help=f"passes over the data (default {default})"
    )


def _add_common(
    parser: argparse.ArgumentParser, *, batch_size: int, learning_rate: float, log_every: int, checkpoint_every: int
) -> None:
    add = parser.add_argument
    add(
        "--batch-size",
        type=_positive,
        default=batch_size,
        metavar="N",
        help=f"samples per step and process (default {batch_size})",
    )
    add(
        "--learning-rate",
        type=_positive_number,
        default=learning_rate,
        metavar="X",
        help=f"highest learning rate of the schedule (default {learning_rate})",
    )
    add("--seed", type=_not_negative, default=0, metavar="N", help="of weights, order and augmentation (default 0)")
    add(
        "--checkpoint-dir",
        type=Path,
        default=os.environ.get("DDP_CHECKPOINT_DIR") or None,
        metavar="FOLDER",
        help="where checkpoints are written and looked for (default $DDP_CHECKPOINT_DIR; none without it)",
    )
    add(
        "--checkpoint-every",
        type=_positive,
        default=checkpoint_every,
        metavar="STEPS",
        help=f"steps between two checkpoints (default {checkpoint_every}); also at a signal and at the end",
    )
    add(
        "--log-every",
        type=_positive,
        default=log_every,
        metavar="STEPS",
        help=f"steps between two reports of the training loss (default {log_every})",
    )
    add("--threads", type=_positive, metavar="N", help="CPU threads per process (default $OMP_NUM_THREADS or torch's)")


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number
