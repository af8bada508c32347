"""Read the programs before torchrun or python in a command: launchers, wrappers and prefixes."""

import re
from collections.abc import Mapping, Sequence

from ddpjob.convert.launch import (
    LAUNCH,
    SCRIPT,
    Launch,
    Reader,
    read_command,
    set_args,
    set_processes,
)
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

# Options without a value of `accelerate launch` (1.15) and deepspeed (0.19), and of older versions
# of accelerate. Both write `_`; accelerate knows `-` too.
ACCELERATE_SWITCHES = (
    *("-h", "--help", "-q", "--quiet", "--cpu", "--multi_gpu", "--tpu", "--enable_cpu_affinity"),
    *("--dynamo_use_fullgraph", "--dynamo_use_dynamic", "--dynamo_use_regional_compilation"),
    *("--use_deepspeed", "--use_fsdp", "--use_parallelism_config", "--use_megatron_lm"),
    *("--same_network", "-m", "--module", "--no_python", "--tpu_cluster", "--no_tpu_cluster"),
    *("--tpu_use_sudo", "--downcast_bf16", "--fp8_use_autocast_during_eval", "--debug"),
    *("--use_cpu", "--use_xpu", "--use_mps_device", "--mps", "--ipex", "--fp8"),
)
DEEPSPEED_SWITCHES = (
    *("-h", "--help", "-q", "--quiet", "--module", "--no_python", "--no_local_rank", "--no_ssh"),
    *("--no_ssh_check", "--force_multi", "--save_pid", "--bind_cores_to_rank"),
)
SWITCHES = {"accelerate": ACCELERATE_SWITCHES, "deepspeed": DEEPSPEED_SWITCHES}
PROCESSES = ("--num_gpus", "--num_accelerators", "--nproc_per_node")

# The numbers of accelerate: its processes are those of all machines together.
ALL_PROCESSES = "--num_processes"
MACHINES = "--num_machines"


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
        launch.draft.add_variable(name, value, launch.path)
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


def _launcher(launch: Launch, words: list[str]) -> None:
    """Read `accelerate launch` or deepspeed: torchrun starts the script in its place."""
    program = _name(words[0])
    rest = words[2:] if words[1:2] == ["launch"] else words[1:]
    is_module = False
    dropped: list[str] = []
    counts: dict[str, str] = {}
    while rest and rest[0].startswith("-"):
        written, equals, value = rest.pop(0).partition("=")
        name = _with_underscores(written)
        is_switch = bool(equals) or name in SWITCHES[program]
        if not is_switch and rest and not SCRIPT.fullmatch(rest[0]):
            value = rest.pop(0)
        if name in ("-m", "--module"):
            is_module = True
        elif name == "--mixed_precision":
            launch.draft.add_variable("ACCELERATE_MIXED_PRECISION", value, launch.path)
        elif name in PROCESSES:
            set_processes(launch.draft, launch.resolve(value), f"{launch.path}: {written}")
        elif name in (ALL_PROCESSES, MACHINES):
            counts[name] = launch.resolve(value)
        else:
            dropped.append(f"{written} {value}".strip())
    _set_counts(launch, counts)
    if dropped:
        launch.draft.drop(
            f"{launch.path}: flags of {program}",
            dropped,
            "torchrun starts the processes of a DDPJob, and the operator sets their number and how "
            "they meet",
            "give what concerns the training, such as DeepSpeed or FSDP, to the script",
        )
    launch.draft.note(launch.path, f"torchrun starts the script in place of {program}")
    set_args(launch, ["-m", *rest] if is_module else rest, program)


def _set_counts(launch: Launch, counts: Mapping[str, str]) -> None:
    """Set the nodes and the processes of each from the numbers of accelerate."""
    machines, processes = counts.get(MACHINES, "1"), counts.get(ALL_PROCESSES, "")
    path = f"{launch.path}: {ALL_PROCESSES}"
    if MACHINES in counts and machines.isdecimal():
        launch.nodes = machines
    if not processes:
        return
    if not (processes.isdecimal() and machines.isdecimal()):
        why = "it is the number of all nodes together, and is not known for one"
        launch.draft.drop(path, processes, why, "set spec.nprocPerNode")
        return
    each, rest = divmod(int(processes), max(1, int(machines)))
    if rest or not each:
        why = f"they are no whole number for each of {machines} machines"
        launch.draft.drop(path, processes, why, "set spec.nprocPerNode")
    else:
        set_processes(launch.draft, each, path)


def _with_underscores(flag: str) -> str:
    """Return a flag in the way in which accelerate and deepspeed declare it."""
    return f"--{flag[2:].replace('-', '_')}" if flag.startswith("--") else flag


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
    ("accelerate|deepspeed", _launcher),
    ("|".join(PREFIXES), _prefix),
    (WRAPPERS, _wrapper),
)
