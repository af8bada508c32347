"""Convert a script for Slurm's sbatch, with torchrun or srun as its command, into a DDPJob.

The options of `#SBATCH` lines and of srun are in slurm_options.py.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil

from ddpjob.convert.draft import Conversion, Draft
from ddpjob.convert.launch import (
    Launch,
    read_command,
    refer_to_variables,
    set_processes,
    settle_nodes,
    settle_processes,
)
from ddpjob.convert.pods import choose_accelerator
from ddpjob.convert.scripts import CONTAINERS, EVERYWHERE, SHELL_PROGRAMS, Reasons, Script
from ddpjob.convert.slurm_options import (
    OPTIONS,
    SHARED,
    Request,
    job_name,
    read_options,
    take_image,
)
from ddpjob.core.api.readers import SpecError, quoted

DIRECTIVE = re.compile(r"#SBATCH\s+(.*)")

GPU = "nvidia.com/gpu"

NO_IMAGE = (
    "the image of the pods is not known, since a Slurm node has Python itself; give --image IMAGE "
    "with Python, torch and the script"
)

# Lines before the training without a use in a pod.
REASONS: Reasons = {
    **EVERYWHERE,
    "cd|pushd|popd": (SHARED, "workingDir of the container trainer in podTemplate"),
    "mkdir|rm|cp|mv|ln|rsync|tar|touch|chmod": (
        SHARED,
        "spec.setup for what each pod needs, or a claim in volumes",
    ),
    "scontrol|sinfo|squeue|scancel|sacct|sbcast": ("it is a command of Slurm", ""),
    "srun": ("it is a step beside the training", "a job of its own, or spec.setup"),
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
    for line, words in _directives(text):
        options, rest = read_options(draft, words, f"line {line}: #SBATCH")
        for option, value in options:
            OPTIONS[option].read(request, value, f"line {line}: #SBATCH {option}")
        if rest:
            draft.drop(f"line {line}: #SBATCH", " ".join(rest), "it is no option of sbatch")
    draft.metadata.setdefault("name", job_name(name))
    launch = Launch(draft, "the script", programs=_programs(request))
    launch.values = _values(request)
    script = Script(launch, REASONS, keeps_rest=False, rest=REST)
    script.read(text)
    # Without srun, python runs once, on the first node.
    _settle(request, launch, is_local=launch.is_single and not request.is_step)
    _set_image(request)
    draft.note(
        "the script",
        f"the files of the Slurm cluster, such as {draft.spec['args'][0]}, must be in the image or "
        "in a volume",
        "ddpjob submit --script sends a script or a folder",
    )
    return Conversion(f"sbatch script {name}", draft.document(), tuple(draft.remarks))


def _directives(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the words of each #SBATCH line with its number. Raises SpecError."""
    for number, line in enumerate(text.splitlines(), 1):
        found = DIRECTIVE.match(line.strip())
        if not found:
            continue
        try:
            yield number, shlex.split(found[1], comments=True)
        except ValueError as error:
            raise SpecError(f"line {number}: {quoted(line)} has an open quote; close it") from error


# The command


def _programs(request: Request) -> Sequence[tuple[str, Callable[[Launch, list[str]], None]]]:
    """Return the programs used on a Slurm cluster to start a training."""

    def srun(launch: Launch, words: list[str]) -> None:
        options, rest = read_options(request.draft, words[1:], f"{launch.path}: srun")
        for option, value in options:
            OPTIONS[option].read(request, launch.resolve(value), f"{launch.path}: srun {option}")
        request.is_step = True
        read_command(launch, rest)

    def container(launch: Launch, words: list[str]) -> None:
        rest = words[2:]
        dropped = []
        while rest and rest[0].startswith("-"):
            word = rest.pop(0)
            with_value = "=" not in word and word in ("-B", "--bind", "--env", "--pwd", "-H")
            dropped.append(f"{word} {rest.pop(0)}" if with_value and rest else word)
        image = rest.pop(0) if rest else ""
        take_image(request, launch.resolve(image), f"{launch.path}: {words[0]}")
        if dropped:
            launch.draft.drop(f"{launch.path}: options of {words[0]}", dropped, SHARED, "volumes")
        read_command(launch, rest)

    return (("srun", srun), (CONTAINERS, container), *SHELL_PROGRAMS)


def _values(request: Request) -> dict[str, str]:
    """Return the values of Slurm's variables decided by the options."""
    nodes = request.draft.get("nodes") or 1
    gpus = _per_node(request.gpus, request, nodes)
    tasks = request.tasks.get("node")
    name = str(request.draft.metadata.get("name"))
    found = {
        "SLURM_JOB_NAME": name,
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_GPUS_ON_NODE": str(gpus) if gpus else "",
        "SLURM_GPUS_PER_NODE": str(gpus) if gpus else "",
        "SLURM_NTASKS_PER_NODE": str(tasks) if tasks else "",
        "SLURM_CPUS_PER_TASK": str(request.cpus.get("task") or ""),
    }
    return {key: value for key, value in found.items() if value}


# What follows from all options


def _per_node(counts: Mapping[str, int], request: Request, nodes: int) -> int:
    """Return the number on each node from counts per node, task, GPU or job."""
    tasks = request.tasks.get("node") or ceil(request.tasks.get("job", 0) / nodes) or 1
    if "gpu" in counts:
        return counts["gpu"] * _per_node(request.gpus, request, nodes)
    if "task" in counts:
        return counts["task"] * tasks
    return counts.get("node") or ceil(counts.get("job", 0) / nodes)


def _settle(request: Request, launch: Launch, *, is_local: bool) -> None:
    """Set the size of the job and the resources of a pod. Raises SpecError."""
    draft = request.draft
    _set_nodes(request, launch)
    nodes = draft.get("nodes")
    resources: dict[str, dict[str, object]] = {}
    gpus = _per_node(request.gpus, request, nodes)
    if gpus:
        resources.setdefault("limits", {})[GPU] = gpus
    cpus = _per_node(request.cpus, request, nodes)
    if cpus:
        resources.setdefault("requests", {})["cpu"] = str(cpus)
    memory = _memory_per_node(request, cpus, gpus)
    if memory:
        for kind in ("requests", "limits"):
            resources.setdefault(kind, {})["memory"] = memory
    if resources:
        draft.set("resources", resources, "the options of Slurm")
    devices = choose_accelerator(draft)
    if launch.is_single and not is_local:
        _set_tasks(request, launch, nodes)
    elif request.tasks.get("node", 1) > 1:
        draft.drop(
            "--ntasks-per-node",
            request.tasks["node"],
            "torchrun starts the processes of a node",
            "set spec.nprocPerNode",
        )
    settle_processes(launch, devices)
    refer_to_variables(draft, launch.path)


def _set_nodes(request: Request, launch: Launch) -> None:
    """Set the number of nodes, unless an option has set it."""
    draft = request.draft
    tasks, per_node = request.tasks.get("job"), request.tasks.get("node")
    if draft.get("nodes") is None and tasks and per_node:
        draft.set("nodes", ceil(tasks / per_node), "--ntasks")
    elif draft.get("nodes") is None and launch.nodes:
        draft.set("nodes", int(launch.nodes), launch.path)
    elif draft.get("nodes") is None:
        draft.set("nodes", 1, "the default of Slurm")
        if tasks and tasks > 1:
            draft.note(
                "--ntasks",
                "Slurm chose the number of nodes for the tasks; it is 1",
                "set spec.nodes",
            )
    settle_nodes(launch, draft.get("nodes"))


def _set_tasks(request: Request, launch: Launch, nodes: int) -> None:
    """Set the processes of each node from the tasks of srun."""
    tasks = request.tasks.get("node") or ceil(request.tasks.get("job", nodes) / nodes)
    set_processes(request.draft, tasks, "the tasks of srun")
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
