"""Read `accelerate launch` and deepspeed: torchrun starts the script in their place."""

import re
from collections.abc import Collection, Mapping

from ddpjob.convert.launch import NO_LOCAL_RANK, SCRIPT, Launch, read_flag, set_args, set_processes
from ddpjob.core.api.torchrun_flags import FLAGS, RENDEZVOUS

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
    *("--elastic_training",),
)
SWITCHES = {"accelerate": ACCELERATE_SWITCHES, "deepspeed": DEEPSPEED_SWITCHES}

# The processes of each node. Those of accelerate are the ones of all its machines together.
PROCESSES = ("--num_gpus", "--num_accelerators", "--nproc_per_node")
ALL_PROCESSES = "--num_processes"
NODES = ("--num_machines", "--num_nodes")

# A file of accelerate with more options.
CONFIG = "--config_file"

# The values that argparse accepts for a flag. They include negative numbers, but no other flag.
VALUE = re.compile(r"([^-].*)?|-[\d.]+|-.*\s.*", re.DOTALL)

MODULE = ("-m", "--module")
PRECISION = "--mixed_precision"

# The other nodes of deepspeed, which it starts by ssh, and its slots on them.
HOSTS = ("--hostfile", "-H", "--deepspeed_hostfile")
SLOTS = ("--include", "-i")
NO_SSH = "--no_ssh"

# Flags that may make a launcher one of several.
WITH_OTHERS = (*NODES, *HOSTS, CONFIG, NO_SSH)


def read_launcher(launch: Launch, words: list[str]) -> None:
    """Read the flags of accelerate or deepspeed, the script and its arguments."""
    launch.program = words[0].rpartition("/")[2]
    rest = words[2:] if words[1:2] == ["launch"] else words[1:]
    flags = _take_flags(rest, SWITCHES[launch.program])
    given = {_with_underscores(written): launch.resolve(value) for written, value in flags.items()}
    _set_counts(launch, given)
    has_hosts = any(name in given for name in HOSTS)
    is_of_several = launch.program == "deepspeed" and launch.nodes not in ("", "1")
    launch.starts_others = (has_hosts or is_of_several) and NO_SSH not in given
    launch.is_alone = launch.nodes == "1" or not any(name in given for name in WITH_OTHERS)
    if PRECISION in given:
        launch.draft.add_variable("ACCELERATE_MIXED_PRECISION", given[PRECISION], launch.path)
    read = {*MODULE, *PROCESSES, *NODES, *SLOTS, ALL_PROCESSES, PRECISION}
    read |= _read_flags_of_torchrun(launch, given, read)
    dropped = [
        f"{written} {value}".strip()
        for written, value in flags.items()
        if _with_underscores(written) not in read
    ]
    if dropped:
        launch.draft.drop(
            f"{launch.path}: flags of {launch.program}",
            dropped,
            "torchrun starts the processes of a DDPJob, and the operator sets their number and how "
            "they meet",
            "give what concerns the training, such as DeepSpeed or FSDP, to the script",
        )
    launch.draft.note(launch.path, f"torchrun starts the script in place of {launch.program}")
    if launch.program == "deepspeed" and "--no_local_rank" not in given:
        launch.draft.note(
            launch.path, "deepspeed gave each process the argument --local_rank", NO_LOCAL_RANK
        )
    is_module = any(name in given for name in MODULE)
    set_args(launch, ["-m", *rest] if is_module else rest, launch.program)


def _take_flags(rest: list[str], switches: tuple[str, ...]) -> dict[str, str]:
    """Remove the flags at the beginning of words, and return them with their values."""
    found = {}
    while rest and rest[0].startswith("-"):
        written, equals, value = rest.pop(0).partition("=")
        is_switch = bool(equals) or _with_underscores(written) in switches
        if not is_switch and rest and VALUE.fullmatch(rest[0]) and not SCRIPT.fullmatch(rest[0]):
            value = rest.pop(0)
        found[written] = value
    return found


def _set_counts(launch: Launch, given: Mapping[str, str]) -> None:
    """Set the nodes and the processes of each from the flags of a launcher."""
    nodes = next((given[name] for name in NODES if name in given), "")
    if nodes.isdecimal():
        launch.nodes = nodes
    for name in PROCESSES:
        if name in given:
            set_processes(launch.draft, given[name], f"{launch.path}: {name}")
    for name in SLOTS:
        if name in given:
            _set_slots(launch, given[name], f"{launch.path}: {name}")
    if given.get(ALL_PROCESSES):
        # A file may have another number of machines than the default.
        machines = nodes or ("" if CONFIG in given else "1")
        _set_all_processes(launch, given[ALL_PROCESSES], machines)


def _read_flags_of_torchrun(
    launch: Launch, given: Mapping[str, str], read: Collection[str]
) -> set[str]:
    """Read the flags that accelerate gives to torchrun, and return their names."""
    found = set()
    for flag in FLAGS if launch.program == "accelerate" else ():
        name = _with_underscores(flag.name)
        if name in given and name not in read and flag.instead != RENDEZVOUS:
            read_flag(launch, flag, given[name])
            found.add(name)
    return found


def _set_slots(launch: Launch, text: str, path: str) -> None:
    """Set the nodes and the processes of each from slots: `NAME:0,1@NAME:0,1`; `NAME` has all.

    Source: `parse_resource_filter` in deepspeed.launcher.runner.
    """
    slots: dict[str, set[str]] = {}
    for node in text.split("@"):
        name, _, chosen = node.partition(":")
        slots.setdefault(name.strip(), set()).update(filter(None, chosen.split(",")))
    counts = {len(chosen) for chosen in slots.values()}
    if len(slots) > 1 and not launch.nodes:
        launch.nodes = str(len(slots))
    if counts == {0}:
        launch.draft.drop(
            path, text, "the number of their slots is not here", "set spec.nprocPerNode"
        )
    elif len(counts) > 1:
        why = "a DDPJob has the same number of processes on all nodes"
        launch.draft.drop(path, text, why, "set spec.nprocPerNode")
    else:
        set_processes(launch.draft, counts.pop(), path)


def _set_all_processes(launch: Launch, processes: str, machines: str) -> None:
    """Set the processes of each node from those of all machines."""
    path = f"{launch.path}: {ALL_PROCESSES}"
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
