"""A script for Slurm's sbatch, whose command is torchrun or srun, as a DDPJob.

The options of `#SBATCH` lines and of srun are rows of one table.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from ddpjob.convert.draft import Conversion, Draft
from ddpjob.convert.launch import (
    LAUNCH,
    Launch,
    read_command,
    refer_to_variables,
    set_processes,
    settle_nodes,
    settle_processes,
)
from ddpjob.convert.pods import choose_accelerator
from ddpjob.convert.scripts import EVERYWHERE, SHELL_PROGRAMS, Reasons, Script
from ddpjob.core.api import names
from ddpjob.core.api.readers import SpecError, did_you_mean, quoted

DIRECTIVE = re.compile(r"#SBATCH\s+(.*)")

GPU = "nvidia.com/gpu"

# Of the grace period of a pod, the workers have all but so many seconds.
REPORT_SECONDS = 15

NO_IMAGE = (
    "the image of the pods is not known, since a Slurm node has Python itself; give --image IMAGE "
    "with Python, torch and the script"
)

SLURM_ONLY = "it is about the Slurm cluster"
PLACES = "nodeSelector or affinity, with the labels of your nodes"
NO_LOG_FILE = "the log of a pod has the output; ddpjob logs prints it"
SHARED = "a pod has no shared home or working directory"

# Lines before the training that nothing in a pod needs.
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


@dataclass
class Request:
    """What the options ask for, until all of them are read.

    - `gpus`, `tasks`, `cpus`, `memory`: options of these names, by how they are counted: `node`,
      `task`, `gpu`, `cpu` or `job`. `is_step`: srun starts the training, once for each task.
    """

    draft: Draft
    gpus: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)
    cpus: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    image: str = ""
    image_path: str = ""
    is_step: bool = False


Option = Callable[[Request, str, str], None]


@dataclass(frozen=True)
class Row:
    """An option of sbatch or srun: what becomes of it, its letter, and if it takes a value."""

    read: Option
    letter: str = ""
    takes_value: bool = True


def convert(text: str, image: str, name: str) -> Conversion:
    """Return the DDPJob of a script. Raises SpecError.

    `image` is that of the pods, or empty. `name` is that of the file, for a job without a name.
    """
    draft = Draft()
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
    _set_image(request, image)
    draft.note(
        "the script",
        f"the files of the Slurm cluster, such as {draft.spec['args'][0]}, must be in the image or "
        "in a volume",
        "ddpjob submit --script sends a script or a folder",
    )
    return Conversion(f"sbatch script {name}", draft.document(), tuple(draft.remarks))


def job_name(text: str) -> str:
    """Return a text as the name of a job."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name or not name[0].isalpha():
        name = f"job-{name}".rstrip("-")
    return name[: names.MAX_JOB_NAME].rstrip("-")


# Options


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


def read_options(
    draft: Draft, words: Sequence[str], path: str
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the known options at the beginning of words with their values, and the other words.

    Remark on options that are not known.
    """
    found = []
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            name, value = LETTERS.get(word[:2], word[:2]), word[2:].removeprefix("=")
            equals = value
        row = OPTIONS.get(name)
        if row is None:
            is_value = not equals and rest and not rest[0].startswith("-")
            is_value = is_value and not _begins_command(rest[0])
            value = rest.pop(0) if is_value else value
            hint = did_you_mean(name, OPTIONS)
            draft.drop(f"{path} {name}", value or True, f"it is an unknown option of Slurm{hint}")
            continue
        if row.takes_value and not equals and rest:
            value = rest.pop(0)
        found.append((name, value))
    return found, rest


def _begins_command(word: str) -> bool:
    return "$" in word or LAUNCH.fullmatch(word) is not None or word.endswith((".py", "sh"))


def _drop(why: str, instead: str = "") -> Option:
    """Return what reads an option that a DDPJob has no place for."""

    def read(request: Request, value: str, path: str) -> None:
        request.draft.drop(path, value or True, why, instead)

    return read


def _ignore(_request: Request, _value: str, _path: str) -> None:
    """Read an option that changes nothing in a pod."""


def _count(value: str, path: str) -> int:
    """Return the number in `8`, `gpu:8` or `gpu:a100:8`. Raises SpecError."""
    text = value.rpartition(":")[2].partition("(")[0]
    if text.isdecimal():
        return int(text)
    # `--gres=gpu` and `--gpus-per-node=a100` are one GPU.
    if text and ":" not in value and not any(map(str.isdigit, value.partition("-")[0][:1])):
        return 1
    raise SpecError(f"{path}: must be a number, got {quoted(value)}; write the number")


def _nodes(request: Request, value: str, path: str) -> None:
    least, dash, most = value.partition("-")
    request.draft.set("nodes", _count(most or least, path), path)
    if dash:
        request.draft.drop(
            path,
            value,
            "a DDPJob has one number of nodes, here the larger one",
            "change spec.nodes while the job runs",
        )


def _tasks(unit: str) -> Option:
    def read(request: Request, value: str, path: str) -> None:
        request.tasks[unit] = _count(value, path)

    return read


def _gpus(unit: str) -> Option:
    def read(request: Request, value: str, path: str) -> None:
        for part in value.split(","):
            if path.endswith("--gres") and not part.startswith("gpu"):
                request.draft.drop(path, part, SLURM_ONLY, "resources")
                continue
            request.gpus[unit] = _count(part, path)
            kind = [one for one in part.split(":")[:-1] if one != "gpu"]
            if kind:
                why = "a pod asks for GPUs and not for a kind of them"
                request.draft.drop(path, kind[0], why, PLACES)

    return read


def _cpus(unit: str) -> Option:
    def read(request: Request, value: str, path: str) -> None:
        request.cpus[unit] = _count(value, path)

    return read


def _memory(unit: str) -> Option:
    def read(request: Request, value: str, path: str) -> None:
        found = re.fullmatch(r"(\d+)([KMGT]?)B?", value.upper())
        if not found:
            raise SpecError(f"{path}: must be a size such as 64G, got {quoted(value)}")
        if int(found[1]) == 0:
            request.draft.drop(path, value, "a pod has no word for all memory", "resources")
            return
        request.memory[unit] = int(found[1]) * 1024 ** "KMGT".index(found[2] or "M")

    return read


def _time(request: Request, value: str, path: str) -> None:
    if value.upper() not in ("0", "INFINITE", "UNLIMITED"):
        request.draft.set("activeDeadlineSeconds", seconds_of(value, path), path)


def seconds_of(value: str, path: str) -> int:
    """Return the seconds of a time of Slurm, such as 30, 1:30:00 or 2-12. Raises SpecError."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", value)
    if not found:
        raise SpecError(f"{path}: must be a time such as 2-12:00:00, got {quoted(value)}")
    days, *numbers = (int(part) if part else None for part in found.groups())
    first, second, third = numbers
    if days is not None:
        units = (3600, 60, 1)
    else:
        units = (3600, 60, 1) if third is not None else (60, 1, 0)
    parts = zip((first, second, third), units, strict=True)
    return 86400 * (days or 0) + sum((part or 0) * unit for part, unit in parts)


def _name(request: Request, value: str, path: str) -> None:
    request.draft.metadata["name"] = job_name(value)
    if job_name(value) != value:
        why = f"the name of a job has lower-case letters, digits and '-': {job_name(value)}"
        request.draft.drop(path, value, why)


def _no_requeue(request: Request, _value: str, path: str) -> None:
    request.draft.set("failurePolicy.maxRestarts", 0, path)
    request.draft.set("failurePolicy.maxDisruptions", 0, path)


def _signal(request: Request, value: str, path: str) -> None:
    name, _, seconds = value.removeprefix("B:").removeprefix("R:").partition("@")
    grace = int(seconds) if seconds.isdecimal() else 60
    request.draft.pod["terminationGracePeriodSeconds"] = grace + REPORT_SECONDS
    if name.upper() not in ("TERM", "SIGTERM", "15"):
        request.draft.drop(
            path,
            value,
            f"pods get SIGTERM, and {grace} s for their workers, when they must end",
            "handle SIGTERM in the script",
        )


def _image(request: Request, value: str, path: str) -> None:
    """Take the image of `--container-image`, in which enroot has # for the first /."""
    if value.startswith(("/", ".")) or value.endswith((".sqsh", ".sif")):
        request.draft.drop(path, value, "it is a file of the Slurm cluster", "--image IMAGE")
    else:
        request.image = value.removeprefix("docker://").replace("#", "/", 1)
        request.image_path = path


def _workdir(request: Request, value: str, path: str) -> None:
    request.draft.trainer["workingDir"] = value


OPTIONS: Mapping[str, Row] = {
    # The size.
    "--nodes": Row(_nodes, "-N"),
    "--ntasks": Row(_tasks("job"), "-n"),
    "--ntasks-per-node": Row(_tasks("node")),
    "--tasks-per-node": Row(_tasks("node")),
    "--ntasks-per-gpu": Row(_tasks("gpu")),
    "--gpus": Row(_gpus("job"), "-G"),
    "--gpus-per-node": Row(_gpus("node")),
    "--gpus-per-task": Row(_gpus("task")),
    "--gres": Row(_gpus("node")),
    "--cpus-per-task": Row(_cpus("task"), "-c"),
    "--cpus-per-gpu": Row(_cpus("gpu")),
    "--mem": Row(_memory("node")),
    "--mem-per-cpu": Row(_memory("cpu")),
    "--mem-per-gpu": Row(_memory("gpu")),
    # The life of the job.
    "--job-name": Row(_name, "-J"),
    "--time": Row(_time, "-t"),
    "--time-min": Row(_drop(SLURM_ONLY)),
    "--deadline": Row(_drop("a DDPJob has no point in time", "activeDeadlineSeconds")),
    "--requeue": Row(
        _drop("a lost pod begins a new attempt anyway", "failurePolicy.maxDisruptions"),
        takes_value=False,
    ),
    "--no-requeue": Row(_no_requeue, takes_value=False),
    "--signal": Row(_signal),
    "--kill-on-bad-exit": Row(_ignore, "-K", takes_value=False),
    "--array": Row(_drop("a DDPJob is one training", "a job for each index"), "-a"),
    "--dependency": Row(_drop("a DDPJob waits for no other one", "ddpjob wait"), "-d"),
    "--begin": Row(_drop("a DDPJob has no start time", "suspend: true and ddpjob resume"), "-b"),
    "--priority": Row(_drop(SLURM_ONLY, "priorityClassName")),
    "--nice": Row(_drop(SLURM_ONLY, "priorityClassName")),
    # The place.
    "--partition": Row(_drop(SLURM_ONLY, PLACES), "-p"),
    "--constraint": Row(_drop(SLURM_ONLY, PLACES), "-C"),
    "--nodelist": Row(_drop(SLURM_ONLY, PLACES), "-w"),
    "--exclude": Row(_drop(SLURM_ONLY, PLACES), "-x"),
    "--exclusive": Row(
        _drop("pods share a node", "request all its GPUs or CPUs"), takes_value=False
    ),
    "--switches": Row(_drop(SLURM_ONLY, "scheduling.topology")),
    "--account": Row(_drop(SLURM_ONLY, "the label kueue.x-k8s.io/queue-name"), "-A"),
    "--qos": Row(_drop(SLURM_ONLY, "the label kueue.x-k8s.io/priority-class"), "-q"),
    "--reservation": Row(_drop(SLURM_ONLY, PLACES)),
    "--licenses": Row(_drop(SLURM_ONLY), "-L"),
    # Input and output.
    "--output": Row(_drop(NO_LOG_FILE), "-o"),
    "--error": Row(_drop(NO_LOG_FILE), "-e"),
    "--input": Row(_drop("a pod has no input"), "-i"),
    "--open-mode": Row(_drop(NO_LOG_FILE)),
    "--label": Row(_ignore, "-l", takes_value=False),
    "--unbuffered": Row(_ignore, "-u", takes_value=False),
    "--mail-type": Row(_drop("the operator sends no mail", "an alert on its metrics")),
    "--mail-user": Row(_drop("the operator sends no mail", "an alert on its metrics")),
    "--comment": Row(_drop(SLURM_ONLY, "an annotation")),
    "--wckey": Row(_drop(SLURM_ONLY, "a label")),
    # The environment and the processes.
    "--export": Row(_drop("pods have only the variables of the job", "spec.env")),
    "--chdir": Row(_drop(SHARED, "workingDir of the container trainer in podTemplate"), "-D"),
    "--hint": Row(_drop(SLURM_ONLY)),
    "--distribution": Row(_drop("torchrun numbers the processes"), "-m"),
    "--cpu-bind": Row(_drop("torchrun starts the processes")),
    "--gpu-bind": Row(_drop("LOCAL_RANK chooses the GPU of a process")),
    "--mpi": Row(_drop("torchrun starts the processes")),
    "--overlap": Row(_ignore, takes_value=False),
    "--jobid": Row(_ignore),
    "--wait": Row(_drop("the operator waits for all nodes"), "-W"),
    "--wait-all-nodes": Row(_ignore),
    "--get-user-env": Row(_ignore, takes_value=False),
    "--parsable": Row(_ignore, takes_value=False),
    # Containers, by the plugin pyxis.
    "--container-image": Row(_image),
    "--container-workdir": Row(_workdir),
    "--container-mounts": Row(_drop(SHARED, "volumes and volumeMounts, with a claim")),
    "--container-name": Row(_ignore),
    "--container-mount-home": Row(_drop(SHARED), takes_value=False),
    "--no-container-mount-home": Row(_ignore, takes_value=False),
    "--container-writable": Row(_ignore, takes_value=False),
}
LETTERS = {row.letter: name for name, row in OPTIONS.items() if row.letter}


# The command


def _programs(request: Request) -> Sequence[tuple[str, Callable[[Launch, list[str]], None]]]:
    """Return the programs that start a training on a Slurm cluster."""

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
        _image(request, launch.resolve(image), f"{launch.path}: {words[0]}")
        if dropped:
            launch.draft.drop(f"{launch.path}: options of {words[0]}", dropped, SHARED, "volumes")
        read_command(launch, rest)

    return (("srun", srun), ("singularity|apptainer", container), *SHELL_PROGRAMS)


def _values(request: Request) -> dict[str, str]:
    """Return the values of Slurm's variables that the options decide."""
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
    """Return how many there are of something on each node, by how it was counted."""
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
    """Set the number of nodes, if no option is about it."""
    draft = request.draft
    tasks, per_node = request.tasks.get("job"), request.tasks.get("node")
    if draft.get("nodes") is None and tasks and per_node:
        draft.set("nodes", ceil(tasks / per_node), "--ntasks")
    elif draft.get("nodes") is None and launch.nodes:
        draft.set("nodes", int(launch.nodes), launch.path)
    elif draft.get("nodes") is None:
        draft.set("nodes", 1, "the default of Slurm")
    settle_nodes(launch, draft.get("nodes"))


def _set_tasks(request: Request, launch: Launch, nodes: int) -> None:
    """Set the processes of each node, which srun would have started."""
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


def _set_image(request: Request, image: str) -> None:
    """Set the image. Raises SpecError if none is known."""
    if not (image or request.image):
        raise SpecError(NO_IMAGE)
    request.draft.set("image", image or request.image, "--image" if image else request.image_path)
    if image and request.image not in ("", image):
        request.draft.drop(request.image_path, request.image, "--image is given")
