"""Read `accelerate launch` and deepspeed: torchrun starts the script in their place."""

from collections.abc import Mapping

from ddpjob.convert.launch import NO_LOCAL_RANK, SCRIPT, Launch, set_args, set_processes

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

# The processes of each node. Those of accelerate are the ones of all its machines together.
PROCESSES = ("--num_gpus", "--num_accelerators", "--nproc_per_node")
ALL_PROCESSES = "--num_processes"
NODES = ("--num_machines", "--num_nodes")

# The slots of deepspeed on its nodes: `NAME:0,1@NAME:0,1`.
SLOTS = ("--include", "-i")

MODULE = ("-m", "--module")
PRECISION = "--mixed_precision"

# The other nodes of deepspeed, which it starts by ssh.
HOSTS = ("--hostfile", "-H")

# Flags beside those of NODES by which a launcher can know other nodes.
WITH_OTHERS = (*HOSTS, "--config_file", "--no_ssh")


def read_launcher(launch: Launch, words: list[str]) -> None:
    """Read the flags of accelerate or deepspeed, the script and its arguments."""
    launch.program = words[0].rpartition("/")[2]
    rest = words[2:] if words[1:2] == ["launch"] else words[1:]
    flags = _take_flags(rest, SWITCHES[launch.program])
    given = {_with_underscores(written): value for written, value in flags.items()}
    _set_counts(launch, given)
    launch.starts_others = any(name in given for name in HOSTS)
    is_one = launch.nodes in ("", "1")
    launch.is_alone = is_one and not any(name in given for name in WITH_OTHERS)
    if PRECISION in given:
        launch.draft.add_variable("ACCELERATE_MIXED_PRECISION", given[PRECISION], launch.path)
    read = {*MODULE, *PROCESSES, *NODES, ALL_PROCESSES, PRECISION}
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
        if not is_switch and rest and not SCRIPT.fullmatch(rest[0]):
            value = rest.pop(0)
        found[written] = value
    return found


def _set_counts(launch: Launch, given: Mapping[str, str]) -> None:
    """Set the nodes and the processes of each from the flags of a launcher."""
    counts = {name: launch.resolve(value) for name, value in given.items()}
    nodes = next((counts[name] for name in NODES if name in counts), "")
    if nodes.isdecimal():
        launch.nodes = nodes
    for name in PROCESSES:
        if name in counts:
            set_processes(launch.draft, counts[name], f"{launch.path}: {name}")
    for name in SLOTS:
        slots = {_slots_of(one) for one in counts.get(name, "").split("@")}
        if len(slots) == 1 and all(slots):
            set_processes(launch.draft, slots.pop(), f"{launch.path}: {name}")
    if counts.get(ALL_PROCESSES):
        _set_all_processes(launch, counts[ALL_PROCESSES], nodes or "1")


def _slots_of(node: str) -> int:
    """Return the number of slots of a node of deepspeed: 2 for `NAME:0,1`; 0 for all."""
    _, colon, slots = node.partition(":")
    return len(slots.split(",")) if colon else 0


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
