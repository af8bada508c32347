"""Fields of a dataclass as flags of the command line, and their values."""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

# Largest seed accepted by torch on every platform.
LARGEST_INTEGER = 2**63 - 1

# The variables with the folders of SageMaker's channels. `fit(inputs={"train": …})` sets
# SM_CHANNEL_TRAIN, and `fit("s3://…")` sets SM_CHANNEL_TRAINING.
CHANNELS = "SM_CHANNEL_*"

# Limit of numbers. In seconds it is 31 years. The clocks of the system can still count these.
LIMIT = 1e9


def integer(at_least: int) -> Callable[[str], int]:
    """Return a reader of integers from `at_least` on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < at_least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= {at_least}")
        if int(text) > LARGEST_INTEGER:
            raise argparse.ArgumentTypeError(f"{text} is greater than {LARGEST_INTEGER:,}")
        return int(text)

    return read


def positive_number(text: str) -> float:
    """Read a number above 0."""
    number = _number_or_nothing(text)
    if number is None or number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number > 0 and < {LIMIT:,.0f}")
    return number


def non_negative_number(text: str) -> float:
    """Read a number from 0 on."""
    number = _number_or_nothing(text)
    if number is None or number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 0 and < {LIMIT:,.0f}")
    return number


def _number_or_nothing(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    # A NaN is not less than anything.
    return number if abs(number) < LIMIT else None


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


@dataclass(frozen=True)
class Value:
    """A value of a flag: its placeholder in the help text, and the function to read it."""

    placeholder: str
    read: Callable[[str], Any]


COUNT = Value("N", integer(1))
COUNT_FROM_0 = Value("N", integer(0))
PIXELS = Value("N", integer(32))
STEPS = Value("STEPS", integer(1))
POSITIVE = Value("X", positive_number)
NON_NEGATIVE = Value("X", non_negative_number)
FOLDER = Value("FOLDER", Path)
NAME = Value("NAME", str)
URL = Value("URL", str)
FILE_OR_URL = Value("FILE|URL", str)


def flag(
    default: Any,
    meaning: str,
    value: Value | None = None,
    *,
    also: Sequence[str] = (),
    environment: str = "",
) -> Any:
    """Declare a field as a flag with the field's name.

    - `default`: `...` if the flag is required.
    - `value`: None for a switch and for a Literal.
    - `also`: further names of the flag.
    - `environment`: a variable that overrides the default, or CHANNELS.
    """
    metadata = {"meaning": meaning, "value": value, "also": also, "environment": environment}
    if default is ...:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def flag_name(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def default_of(option: "Field[Any]") -> Any:
    """Return the value if the flag is not given; MISSING if it is required."""
    name = option.metadata["environment"]
    text = folder_of_channels(os.environ) if name == CHANNELS else os.environ.get(name)
    return option.metadata["value"].read(text) if text else option.default


def folder_of_channels(environment: Mapping[str, str]) -> str | None:
    """Return the folder with the data of SageMaker's channels, or None if there is none.

    A channel with the name `training` has all data. Others may be parts of them, such as `train`
    and `val`. Several are then in one folder, under their names.
    """
    if environment.get("SM_CHANNEL_TRAINING"):
        return environment["SM_CHANNEL_TRAINING"]
    prefix = CHANNELS.rstrip("*")
    channels = [value for name, value in environment.items() if name.startswith(prefix) and value]
    if len(channels) == 1:
        return channels[0]
    folders = {os.path.dirname(channel.rstrip("/")) for channel in channels}
    return folders.pop() if len(folders) == 1 else None


def own_options_first(kind: type[Any]) -> Iterator["Field[Any]"]:
    """Yield the fields of a dataclass: its own, then the inherited ones."""
    own = set(kind.__annotations__)
    yield from sorted(fields(kind), key=lambda option: option.name not in own)


def add_flag(parser: argparse.ArgumentParser, option: "Field[Any]") -> None:
    """Add the flag of a field to a parser."""
    about = option.metadata
    names = [flag_name(option.name), *about["also"]]
    meaning = about["meaning"].replace("%", "%%")
    if option.type is bool:
        # People write a switch alone. SageMaker passes every hyperparameter as a name and a value.
        parser.add_argument(
            *names,
            nargs="?",
            const=True,
            default=False,
            type=_boolean,
            metavar="true|false",
            help=meaning,
        )
        return
    settings: dict[str, Any] = {"dest": option.name, "default": default_of(option)}
    value = about["value"]
    if value:
        settings["metavar"] = value.placeholder
        settings["type"] = value.read
    else:
        settings["choices"] = get_args(option.type)
    if settings["default"] is MISSING:
        settings["required"] = True
    elif option.default not in (None, MISSING) and "(default" not in meaning:
        meaning += f" (default {option.default})"
    parser.add_argument(*names, help=meaning, **settings)
