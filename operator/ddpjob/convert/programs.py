"""Read the programs before torchrun or python in a command: wrappers and prefixes."""

import re
from collections.abc import Mapping, Sequence

from ddpjob.convert.launch import LAUNCH, SCRIPT, Launch, Reader, read_command, refuse
from ddpjob.convert.launchers import read_launcher
from ddpjob.core.api.readers import SpecError, quoted

WRAPPERS = "uv|uvx|poetry|pipenv|conda|mamba|numactl|nsys"

# Programs that only start the command after them: their options with a value, and the number of
# their own arguments before the command.
PREFIXES: Mapping[str, tuple[Sequence[str], int]] = {
    "exec": (("-a",), 0),
    "time": (("-f", "-o", "--format", "--output"), 0),
    "nohup": ((), 0),
    "setsid": ((), 0),
    "env": (("-u", "-C", "--unset", "--chdir"), 0),
    "nice": (("-n", "--adjustment"), 0),
    "ionice": (("-c", "-n", "--class", "--classdata"), 0),
    "stdbuf": (("-i", "-o", "-e", "--input", "--output", "--error"), 0),
    "timeout": (("-k", "-s", "--kill-after", "--signal"), 1),
    "tini": (("-p", "-e"), 0),
    "dumb-init": (("-r", "--rewrite"), 0),
}

# The seconds in a duration of timeout.
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def split_prefix(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options and arguments of a prefix such as timeout, and the command after them."""
    with_value, arguments = PREFIXES[_name(words[0])]
    own: list[str] = []
    rest = list(words[1:])
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        own.append(word)
        if word in with_value and rest:
            own.append(rest.pop(0))
    return [*own, *rest[:arguments]], rest[arguments:]


def is_prefix(word: str) -> bool:
    """Return True for a program that only starts the command after it."""
    return _name(word) in PREFIXES


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def _prefix(launch: Launch, words: list[str]) -> None:
    own, rest = split_prefix(words)
    program = _name(words[0])
    if own and program == "timeout":
        _drop_limit(launch, own)
    elif own:
        why = "torchrun starts the processes of a DDPJob, in each pod"
        launch.draft.drop(f"{launch.path}: {program}", " ".join(own), why)
    while program == "env" and rest and "=" in rest[0]:
        name, _, value = rest.pop(0).partition("=")
        launch.add_variable(name, value, launch.path)
    read_command(launch, rest)


def _drop_limit(launch: Launch, own: Sequence[str]) -> None:
    """Remark on the limit of time of the program timeout."""
    found = re.fullmatch(r"(\d+)([smhd]?)", launch.resolve(own[-1]))
    seconds = f": {int(found[1]) * UNITS[found[2]]}" if found else ""
    launch.draft.drop(
        f"{launch.path}: timeout",
        " ".join(own),
        "it limited one start of the processes, and a DDPJob has a limit for all of its attempts",
        f"spec.activeDeadlineSeconds{seconds}",
    )


def _wrapper(launch: Launch, words: list[str]) -> None:
    """Read a program such as `uv run` before torchrun or python. It starts torchrun then."""
    starts = [word for word in words[1:] if LAUNCH.fullmatch(word) or SCRIPT.fullmatch(word)]
    if not starts:
        raise SpecError(
            f"{launch.path}: {quoted(words[0])} starts neither torchrun nor python; write the "
            "command that starts the training"
        )
    index = words.index(starts[0], 1)
    launch.draft.set("torchrun.command", [*words[:index], "torchrun"], launch.path)
    # A program's path would become torchrun.command, so pass its name. A script's path must stay.
    is_script = SCRIPT.fullmatch(starts[0]) is not None
    program = starts[0] if is_script else _name(starts[0])
    read_command(launch, [program, *words[index + 1 :]])


OTHER_PROGRAMS: Sequence[tuple[str, Reader]] = (
    (
        "tune",
        refuse(
            "{command} starts a recipe of torchtune by torchrun; write torchrun with its flags and "
            "the file of the recipe, which tune cp copies"
        ),
    ),
    (
        "podman|podman-hpc|docker|nerdctl",
        refuse(
            "{command} starts a container, and each pod of a DDPJob is one; write the command "
            "after the image, and give the image with --image"
        ),
    ),
    ("accelerate|deepspeed", read_launcher),
    ("|".join(PREFIXES), _prefix),
    (WRAPPERS, _wrapper),
)
