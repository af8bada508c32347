"""Convert a script for Slurm's sbatch, with torchrun or srun as its command, into a DDPJob.

The options of `#SBATCH` lines and of srun are in slurm_options.py.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil

from ddpjob.convert.draft import Conversion, Draft
from ddpjob.convert.launch import (
    GPUS_OF_AMD,
    LAUNCH,
    NO_REGISTRY_IMAGE,
    OF_EVERY_SHELL,
    OWN_GPU,
    Launch,
    literals,
    read_command,
    set_processes,
)
from ddpjob.convert.pods import choose_accelerator
from ddpjob.convert.scripts import EVERYWHERE, SHELL_PROGRAMS, Reasons, Script
from ddpjob.convert.settle import refer_to_variables, settle_nodes, settle_processes
from ddpjob.convert.shell import VARIABLE
from ddpjob.convert.slurm_options import (
    ENV,
    SHARED,
    WORKING_DIR,
    Request,
    apply,
    job_name,
    read_options,
    take_image,
)
from ddpjob.convert.trainings import CONTAINERS, SHIFTER
from ddpjob.convert.variables import ONLY_A_SHELL
from ddpjob.core.api.readers import SpecError, quoted

DIRECTIVE = re.compile(r"#SBATCH\s+(.*)")

# Words of a directive between the parts of a job.
HETEROGENEOUS = ("hetjob", "packjob")

# Options of singularity and apptainer with a value of their own: before `exec`, and after it.
BEFORE_EXEC_WITH_VALUE = ("-c", "--config")
CONTAINER_WITH_VALUE = (
    *("-B", "--bind", "--mount", "--env", "--env-file", "--pwd", "--cwd", "-H", "--home"),
    *("-o", "--overlay", "-W", "--workdir", "-S", "--scratch", "--fusemount", "--hostname"),
    *("--dns", "--network", "--network-args", "--security", "--add-caps", "--drop-caps", "--app"),
)

# Options of shifter, which has no `exec`, with a value of their own.
SHIFTER_WITH_VALUE = (
    *("-i", "--image", "-m", "--module", "-V", "--volume", "-e", "--env", "--env-file"),
    *("-w", "--workdir", "-E", "--entrypoint"),
)

# A word of a directive, with its quotes. A comment begins like a word.
WORD = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:\\.|[^"\\])*")+""")

GPU = "nvidia.com/gpu"

# The options for tasks by the unit of their count. The first one decides.
TASKS = {"node": "--ntasks-per-node", "gpu": "--ntasks-per-gpu", "job": "--ntasks"}

NO_IMAGE = (
    "the image of the pods is not known, since a Slurm node has Python itself; give --image IMAGE "
    "with Python, torch and the script"
)

# Variables of the script's shell, on a node of Slurm.
SET_BEFORE = (
    rf"{OF_EVERY_SHELL}|USER|SLURM_(JOB_?ID|PROCID|LOCALID|NODEID|(JOB_)?NODELIST|NNODES|NTASKS|"
    "JOB_NUM_NODES|JOB_PARTITION|JOB_USER|SUBMIT_HOST|CLUSTER_NAME)"
)

# Lines before the training without a use in a pod.
REASONS: Reasons = {
    **EVERYWHERE,
    "cd|pushd|popd": (SHARED, WORKING_DIR),
    "mkdir|rm|cp|mv|ln|rsync|tar|touch|chmod": (
        SHARED,
        "spec.setup for what each pod needs, or a claim in volumes",
    ),
    "docker|enroot|singularity|apptainer": ("the pods have their own image", "--image"),
}
REST = ("it may need files or programs of the Slurm cluster", "spec.setup, if each pod needs it")


def convert(text: str, image: str, name: str) -> Conversion:
    """Return the DDPJob of a script. Raises SpecError.

    `image` is the image of the pods, or empty. `name` is the name of the file, for a job without a
    name.
    """
    draft = Draft.with_image(image)
    request = Request(draft)
    _read_directives(request, text)
    draft.metadata.setdefault("name", job_name(name))
    launch = Launch(draft, "the script", programs=_programs(request), set_before=SET_BEFORE)
    launch.values = _values(request)
    script = Script(launch, REASONS, keeps_rest=False, rest=REST)
    script.read(text)
    # Without srun, python runs once, on the first node.
    _settle(request, launch, is_local=launch.is_single and not request.is_step)
    _set_image(request)
    draft.note(
        "the script",
        f"the files of the Slurm cluster, such as {_program(draft)}, must be in the image or in a "
        "volume",
        "ddpjob submit --script sends a script or a folder",
    )
    return Conversion(f"sbatch script {name}", draft.document(), tuple(draft.remarks))


def _read_directives(request: Request, text: str) -> None:
    """Read the options of the #SBATCH lines. Raises SpecError."""
    for line, words in _directives(request.draft, text):
        path = f"line {line}: #SBATCH"
        if words and words[0] in HETEROGENEOUS:
            raise SpecError(
                f"{path} {words[0]}: the job has parts of different sizes, and all pods of a "
                "DDPJob are equal; convert a script of one part"
            )
        options, rest = read_options(request.draft, words, path)
        for option, value in options:
            apply(request, option, value, f"{path} {option}")
        if rest:
            request.draft.drop(path, " ".join(rest), "it is no option of sbatch")


def _directives(draft: Draft, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the words of each #SBATCH line with its number. Raises SpecError.

    Slurm reads them at the beginning of lines, up to the first command. Remark on the others.
    """
    command = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not command and line.strip() and not line.strip().startswith("#"):
            command = number
        found = DIRECTIVE.match(line.strip())
        if not found:
            continue
        reason = ""
        if command:
            reason = f"Slurm ignores it after the first command, in line {command}"
        elif line[0] != "#":
            reason = "Slurm ignores it after a space"
        if reason:
            draft.drop(f"line {number}: #SBATCH", found[1], reason)
            continue
        try:
            yield number, split_directive(found[1])
        except ValueError as error:
            raise SpecError(f"line {number}: {quoted(line)} has an open quote; close it") from error


def split_directive(text: str) -> list[str]:
    """Return the words of a directive up to its comment. Raises ValueError for an open quote."""
    for word in WORD.finditer(text):
        if word[0].startswith("#"):
            return shlex.split(text[: word.start()])
    return shlex.split(text)


# The command


def _program(draft: Draft) -> str:
    """Return the script, or the module after -m."""
    args: list[str] = draft.spec["args"]
    return args[1] if args[0] == "-m" else args[0]


def _programs(request: Request) -> Sequence[tuple[str, Callable[[Launch, list[str]], None]]]:
    """Return the programs used on a Slurm cluster to start a training."""

    def srun(launch: Launch, words: list[str]) -> None:
        given = _without_unknown(launch, words[1:])
        options, rest = read_options(request.draft, given, f"{launch.path}: srun")
        for option, value in options:
            path = f"{launch.path}: srun {option}"
            _read_option_of_step(request, option, launch.resolve(value), path)
        request.is_step = True
        read_command(launch, rest)

    def options_of_container(
        launch: Launch, rest: list[str], with_value: Sequence[str]
    ) -> list[str]:
        """Read the options at the beginning of words, and return the dropped ones."""
        dropped = []
        while rest and rest[0].startswith("-"):
            name, _, value = rest.pop(0).partition("=")
            if not value and name in with_value and rest:
                value = rest.pop(0)
            if name in ("--nv", "--rocm"):
                request.uses_gpus = True
                if name == "--rocm":
                    launch.draft.note(f"{launch.path}: {name}", GPUS_OF_AMD, "spec.resources")
            elif name == "--image":
                take_image(request, launch.resolve(value), f"{launch.path}: {name}")
            elif name == "--env":
                _add_variables(launch, value)
            elif name == "--env-file":
                launch.draft.drop(f"{launch.path}: {name}", value, "its lines are not here", ENV)
            elif name in ("--pwd", "--cwd"):
                launch.draft.trainer["workingDir"] = launch.resolve(value)
            else:
                dropped.append(f"{name} {value}".strip())
        return dropped

    def container(launch: Launch, words: list[str]) -> None:
        rest = words[1:]
        dropped = options_of_container(launch, rest, BEFORE_EXEC_WITH_VALUE)
        del rest[:1]  # exec or run
        dropped += options_of_container(launch, rest, CONTAINER_WITH_VALUE)
        image = rest.pop(0) if rest else ""
        _take_image_or_file(request, launch.resolve(image), f"{launch.path}: {words[0]}")
        if dropped:
            launch.draft.drop(f"{launch.path}: options of {words[0]}", dropped, SHARED, "volumes")
        read_command(launch, rest)

    def shifter(launch: Launch, words: list[str]) -> None:
        rest = words[1:]
        dropped = options_of_container(launch, rest, SHIFTER_WITH_VALUE)
        if dropped:
            launch.draft.drop(f"{launch.path}: options of {words[0]}", dropped, SHARED, "volumes")
        read_command(launch, rest)

    programs = (("srun", srun), (CONTAINERS, container), (SHIFTER, shifter))
    return (*programs, *SHELL_PROGRAMS)


def _take_image_or_file(request: Request, source: str, path: str) -> None:
    """Take the image of singularity. Without a scheme such as `docker:`, it is a file or folder."""
    if ":" in source:
        take_image(request, source, path)
    else:
        request.draft.drop(path, source, NO_REGISTRY_IMAGE, "--image IMAGE")


def _add_variables(launch: Launch, text: str) -> None:
    """Set the variables of the pods from `NAME=value,NAME=value`."""
    for pair in text.split(","):
        name, equals, value = pair.partition("=")
        if equals:
            launch.add_variable(name, launch.resolve(value), f"{launch.path}: --env")
        else:
            launch.draft.drop(f"{launch.path}: --env", pair, "it sets no value")


def _without_unknown(launch: Launch, words: list[str]) -> list[str]:
    """Return the words of srun without unknown variables in the place of options.

    AWS' scripts for HyperPod have one for an option that other clusters do not know.
    """
    rest = list(words)
    while len(rest) > 1 and VARIABLE.fullmatch(launch.resolve(rest[0])):
        if not (rest[1].startswith("-") or LAUNCH.fullmatch(launch.resolve(rest[1]))):
            break
        launch.draft.drop(f"{launch.path}: srun", rest.pop(0), "its value is not known")
    return rest


def _read_option_of_step(request: Request, option: str, value: str, path: str) -> None:
    """Read an option of srun, or remark on one with an unknown variable. Raises SpecError."""
    if option == "--job-name":
        request.draft.drop(path, value, "it is the name of a step")
        return
    try:
        apply(request, option, value, path)
    except SpecError:
        if "$" not in value and "`" not in value:
            raise
        request.draft.drop(path, value, ONLY_A_SHELL, "the option with its value")


def _values(request: Request) -> dict[str, str]:
    """Return the values of Slurm's variables decided by the options."""
    nodes = request.draft.get("nodes") or _nodes_of_tasks(request) or 1
    gpus = _gpus_per_node(request, nodes)
    tasks = nodes * _tasks_per_node(request, nodes) if request.tasks else None
    found = {
        # The script gets the name as written.
        "SLURM_JOB_NAME": request.name or request.draft.metadata.get("name"),
        # sbatch starts the script in the folder of its call, and a pod in that of its image.
        "SLURM_SUBMIT_DIR": ".",
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS_PER_NODE": request.tasks.get("node"),
        "SLURM_NTASKS_PER_GPU": request.tasks.get("gpu"),
        "SLURM_GPUS": request.gpus.get("job"),
        "SLURM_GPUS_ON_NODE": gpus,
        "SLURM_GPUS_PER_NODE": gpus,
        "SLURM_GPUS_PER_TASK": request.gpus.get("task"),
        "SLURM_CPUS_PER_TASK": request.cpus.get("task"),
        "SLURM_CPUS_PER_GPU": request.cpus.get("gpu"),
    }
    return {key: str(value) for key, value in found.items() if value}


# What follows from all options


def _per_node(counts: Mapping[str, int], request: Request, nodes: int) -> int:
    """Return the number on each node from counts per node, task, GPU or job."""
    if "gpu" in counts:
        return counts["gpu"] * _gpus_per_node(request, nodes)
    if "task" in counts:
        return counts["task"] * _tasks_per_node(request, nodes)
    return counts.get("node") or ceil(counts.get("job", 0) / nodes)


def _gpus_per_node(request: Request, nodes: int) -> int:
    """Return the GPUs of each node. Without an option for them, they follow from the tasks."""
    per_gpu = request.tasks.get("gpu")
    if per_gpu and not request.gpus:
        others = {unit: count for unit, count in request.tasks.items() if unit != "gpu"}
        return ceil(_per_node(others, request, nodes) / per_gpu)
    return _per_node(request.gpus, request, nodes)


def _tasks_per_node(request: Request, nodes: int) -> int:
    """Return the tasks of each node. Slurm's default is one."""
    tasks = request.tasks
    if "gpu" in tasks and "node" not in tasks and "task" not in request.gpus:
        return _per_node({"gpu": tasks["gpu"]}, request, nodes) or 1
    of_job = ceil(tasks.get("job", 0) / nodes)
    # With both, the number of the node is a maximum (sbatch(1), --ntasks-per-node).
    return min(filter(None, (tasks.get("node"), of_job)), default=1)


def _nodes_of_tasks(request: Request) -> int:
    """Return the number of nodes for the tasks, or 0."""
    tasks, per_node = request.tasks.get("job"), request.tasks.get("node")
    return ceil(tasks / per_node) if tasks and per_node else 0


def _settle(request: Request, launch: Launch, *, is_local: bool) -> None:
    """Set the size of the job and the resources of a pod. Raises SpecError."""
    draft = request.draft
    _set_nodes(request, launch)
    nodes = draft.get("nodes")
    resources: dict[str, dict[str, object]] = {}
    gpus = _gpus_per_node(request, nodes)
    if gpus:
        resources.setdefault("limits", {})[GPU] = gpus
    elif request.uses_gpus or "CUDA_VISIBLE_DEVICES" in literals(draft):
        draft.note(
            "the options of Slurm",
            "none of them requests GPUs, which the script uses; the pods have none",
            "set spec.accelerator to gpu, and their number in spec.resources.limits",
            is_first=True,
        )
    _remark_on_other_gpus(request, nodes, gpus)
    cpus = _per_node(request.cpus, request, nodes)
    if cpus:
        resources.setdefault("requests", {})["cpu"] = str(cpus)
    # The default of Slurm is one CPU for each task.
    memory = _memory_per_node(request, cpus or _tasks_per_node(request, nodes), gpus)
    if memory:
        for kind in ("requests", "limits"):
            resources.setdefault(kind, {})["memory"] = memory
    if resources:
        draft.set("resources", resources, "the options of Slurm")
    devices = choose_accelerator(draft)
    if launch.is_single and not is_local:
        _set_tasks(request, launch, nodes)
    elif _tasks_per_node(request, nodes) > 1:
        unit = next(unit for unit in TASKS if unit in request.tasks)
        draft.drop(
            TASKS[unit],
            request.tasks[unit],
            "torchrun starts the processes of a node",
            "set spec.nprocPerNode",
        )
    if nodes > 1 and not request.is_step and not launch.starts_others:
        _note_one_start(draft, launch, nodes)
    if not launch.is_single and _tasks_per_node(request, nodes) == 1:
        launch.of_nodes = ("SLURM_PROCID",)
    settle_processes(launch, devices)
    refer_to_variables(launch)


def _remark_on_other_gpus(request: Request, nodes: int, gpus: int) -> None:
    """Remark on numbers of GPUs in other options that do not agree with those of a node."""
    for unit, count in request.gpus.items():
        if _per_node({unit: count}, request, nodes) != gpus:
            why = f"the other options give each node {gpus} GPUs"
            request.draft.drop(f"the GPUs per {unit}", count, why)


def _note_one_start(draft: Draft, launch: Launch, nodes: int) -> None:
    """Note that the script started its command on the first of several nodes."""
    what = "one process" if launch.is_single else f"{launch.program} once"
    draft.note(
        launch.path,
        f"without srun, the script started {what}, on the first of {nodes} nodes; a DDPJob starts "
        "torchrun on each of them",
        "set spec.nodes to 1, if the training is not for several nodes",
    )


def _set_nodes(request: Request, launch: Launch) -> None:
    """Set the number of nodes, unless an option has set it."""
    draft = request.draft
    nodes = _nodes_of_tasks(request)
    if draft.get("nodes") is None and nodes:
        draft.set("nodes", nodes, "--ntasks")
    elif draft.get("nodes") is None and launch.nodes:
        draft.set("nodes", int(launch.nodes), launch.path)
    elif draft.get("nodes") is None:
        draft.set("nodes", 1, "the default of Slurm")
        if request.tasks.get("job", 1) > 1:
            draft.note(
                "--ntasks",
                "Slurm chose the number of nodes for the tasks; it is 1",
                "set spec.nodes",
            )
    nodes = draft.get("nodes")
    if request.is_step and launch.is_alone and nodes > 1:
        draft.note(
            launch.path,
            f"{launch.program} trained on each of the {nodes} nodes by itself, since its flags are "
            "for one node; a DDPJob is one training on all of them",
            "a DDPJob of one node for each training",
            is_first=True,
        )
        return
    settle_nodes(launch, nodes)


def _set_tasks(request: Request, launch: Launch, nodes: int) -> None:
    """Set the processes of each node from the tasks of srun."""
    each = _tasks_per_node(request, nodes)
    set_processes(request.draft, each, "the tasks of srun")
    if "task" in request.gpus:
        request.draft.note("--gpus-per-task", *OWN_GPU)
    total = request.tasks.get("job", nodes * each)
    if total != nodes * each:
        request.draft.note(
            "--ntasks",
            f"Slurm started {total} tasks; {nodes} nodes with {each} processes each start "
            f"{nodes * each}",
            "set spec.nodes and spec.nprocPerNode",
            is_first=True,
        )
    request.draft.note(
        launch.path,
        "torchrun starts the processes in place of srun, so SLURM_PROCID, SLURM_LOCALID and "
        "SLURM_NTASKS are not set",
        "read RANK, LOCAL_RANK and WORLD_SIZE in the script",
    )


def _memory_per_node(request: Request, cpus: int, gpus: int) -> str:
    """Return the memory of a pod as a quantity, or an empty string."""
    factors = {"node": 1, "cpu": cpus, "gpu": gpus}
    kilobytes = sum(size * factors[unit] for unit, size in request.memory.items())
    if request.memory and not kilobytes:
        why = "the job has no GPUs, so the memory is not known"
        request.draft.drop("--mem-per-gpu", f"{request.memory['gpu']}K", why, "resources")
    for unit, size in (("Gi", 1024**2), ("Mi", 1024)):
        if kilobytes and kilobytes % size == 0:
            return f"{kilobytes // size}{unit}"
    return f"{kilobytes}Ki" if kilobytes else ""


def _set_image(request: Request) -> None:
    """Set the image given in the script, if any. Raises SpecError if no image is known."""
    if request.image:
        request.draft.set("image", request.image, request.image_path)
    if request.draft.get("image") is None:
        raise SpecError(NO_IMAGE)
