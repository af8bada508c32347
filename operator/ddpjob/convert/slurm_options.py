"""The options of `#SBATCH` lines and of srun: a row for each, with what becomes of it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpjob.convert.draft import Draft
from ddpjob.convert.launch import GPUS_OF_AMD, LAUNCH, NO_REGISTRY_IMAGE, OWN_GPU
from ddpjob.convert.programs import WRAPPERS, is_prefix
from ddpjob.convert.shell import VARIABLE, has_only_a_shell
from ddpjob.core.api import names
from ddpjob.core.api.readers import SpecError, did_you_mean, quoted

# Seconds at the end of a pod's grace period without workers, for the agent's report.
REPORT_SECONDS = 15

SLURM_ONLY = "it is about the Slurm cluster"
PLACES = "nodeSelector or affinity, with the labels of your nodes"
NO_LOG_FILE = "the log of a pod has the output; ddpjob logs prints it"
ENV = "spec.env"
PROCESSES = "spec.nprocPerNode"
SHARED = "a pod has no shared home or working directory"
WORKING_DIR = "workingDir of the container trainer in podTemplate"

STARTED = "torchrun starts the processes"
CLUSTER = "a job is in the cluster to which it is submitted"
EQUAL = "all pods of a DDPJob are equal"
STEPS = "a pod has no steps of Slurm"
OF_THE_COMMAND = "it is about Slurm's commands, not about the job"
OF_THE_USER = "pods have nothing of the user's shell"
STARTS_TOGETHER = "all nodes of a DDPJob start together"
ENDS_TOGETHER = "the ranks of a DDPJob end together after a failure of one of them"
OUTPUT = "ddpjob logs prints the output of each rank by lines, with its number"
ITS_IMAGE = "each pod has a container of its image, which it can write to"

# The sockets of a node's GPUs, as in `gpu:a100:2(S:0-1)`.
SOCKETS = re.compile(r"\([^)]*\)")

# A kind of GPUs, as in `--gpus-per-node=a100`.
KIND = re.compile(r"[A-Za-z][\w.-]*")


@dataclass
class Request:
    """The requests in the options, while they are read.

    - `gpus`, `tasks`, `cpus`, `memory`: options of these names, by the unit of the count: `node`,
      `task`, `gpu`, `cpu` or `job`. `is_step`: srun starts the training, once for each task.
      `uses_gpus`: the script uses GPUs, whatever the options request.
    - `name`: the name of the job as written.
    - `given`: the places and values of the options read before, by their name.
    """

    draft: Draft
    gpus: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)
    cpus: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    image: str = ""
    image_path: str = ""
    is_step: bool = False
    uses_gpus: bool = False
    name: str = ""
    given: dict[str, tuple[str, str]] = field(default_factory=dict)

    def set(self, to: str, value: int, path: str) -> None:
        """Set a field of the spec. The last value counts."""
        if self.draft.get(to) is not None:
            self.draft.remove(to)
        self.draft.set(to, value, path)


Option = Callable[[Request, str, str], None]


@dataclass(frozen=True)
class Row:
    """An option of sbatch or srun: its reader, its letter, and whether it takes a value."""

    read: Option
    letter: str = ""
    takes_value: bool = True


def job_name(text: str) -> str:
    """Return a text as the name of a job."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name or not name[0].isalpha():
        name = f"job-{name}".rstrip("-")
    return name[: names.MAX_JOB_NAME].rstrip("-")


def read_options(
    draft: Draft, words: Sequence[str], path: str
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the known options at the beginning of words with their values, and the other words.

    Remark on unknown options.
    """
    found = []
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            name, value = LETTERS.get(word[:2], word[:2]), word[2:].removeprefix("=")
            equals = value
        name = _whole_name(name)
        row = OPTIONS.get(name)
        is_letter = value[:1].isalpha() and value != "off"
        if row and not row.takes_value and is_letter and not word.startswith("--"):
            # `-lN2` is `-l -N2`, and `-K0` and `-koff` have values.
            rest.insert(0, f"-{value}")
            value = ""
        if row is None:
            is_value = not equals and rest and not rest[0].startswith("-")
            is_value = is_value and not _begins_command(rest[0])
            value = rest.pop(0) if is_value else value
            hint = did_you_mean(name, OPTIONS)
            draft.drop(f"{path} {name}", value or True, f"it is an unknown option of Slurm{hint}")
            continue
        if row.takes_value and not equals and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        found.append((name, value))
    return found, rest


def _whole_name(name: str) -> str:
    """Return the option with this name. As for Slurm, the beginning of one option is its name."""
    begun = [one for one in OPTIONS if name.startswith("--") and one.startswith(name)]
    return begun[0] if name not in OPTIONS and len(begun) == 1 else name


def apply(request: Request, option: str, value: str, path: str) -> None:
    """Read an option. The last one of a name counts. Raises SpecError."""
    row = OPTIONS[option]
    row.read(request, value, path)
    if isinstance(row.read, Drop):
        return
    name = ONLY_ONE.get(option, option)
    before = request.given.get(name)
    if before and before[1] != value:
        request.draft.drop(*before, f"{path} is {quoted(value)}, and counts")
    request.given[name] = (path, value)


def _begins_command(word: str) -> bool:
    is_known = re.fullmatch(f"(.*/)?({WRAPPERS})", word) or LAUNCH.fullmatch(word)
    return "$" in word or bool(is_known) or is_prefix(word) or word.endswith((".py", "sh"))


@dataclass(frozen=True)
class Drop:
    """Reads an option without a place in a DDPJob."""

    why: str
    instead: str = ""

    def __call__(self, request: Request, value: str, path: str) -> None:
        request.draft.drop(path, value or True, self.why, self.instead)


def _gpu_bind(request: Request, value: str, path: str) -> None:
    request.draft.drop(path, value, *((STARTED,) if "none" in value else OWN_GPU))


def _number(value: str, path: str) -> int:
    """Return a number. Raises SpecError."""
    if value.isdecimal():
        return int(value)
    why = "; Slurm expands no variables there" if "$" in value and "#SBATCH" in path else ""
    raise SpecError(f"{path}: must be a number, got {quoted(value)}{why}; write the number")


def _count(value: str, path: str) -> int:
    """Return the number of GPUs in `8`, `gpu:8` or `gpu:a100:8`. Raises SpecError."""
    # `--gres=gpu` and `--gpus-per-node=a100` are one GPU.
    if KIND.fullmatch(value):
        return 1
    return _number(value.rpartition(":")[2], path)


def _nodes(request: Request, value: str, path: str) -> None:
    least, dash, most = value.partition("-")
    request.set("nodes", _number(most or least, path), path)
    if dash:
        request.draft.drop(
            path,
            value,
            "a DDPJob has one number of nodes, here the larger one",
            "change spec.nodes while the job runs",
        )


def _tasks(unit: str) -> Option:
    def read(request: Request, value: str, path: str) -> None:
        request.tasks[unit] = _number(value, path)

    return read


def _gpus(unit: str) -> Option:
    def read(request: Request, value: str, path: str) -> None:
        counts = []
        for part in SOCKETS.sub("", value).split(","):
            if path.endswith("--gres") and part.partition(":")[0] != "gpu":
                request.draft.drop(path, part, SLURM_ONLY, "resources")
                continue
            counts.append(_count(part, path))
            kind = [one for one in part.split(":")[:-1] if one != "gpu"]
            if kind:
                why = "a pod asks for GPUs and not for a kind of them"
                if kind[0].lower().startswith("mi"):
                    why += f"; {GPUS_OF_AMD}"
                request.draft.drop(path, kind[0], why, PLACES)
        if counts:
            request.gpus[unit] = sum(counts)

    return read


def _cpus(unit: str) -> Option:
    def read(request: Request, value: str, path: str) -> None:
        request.cpus[unit] = _number(value, path)

    return read


def _memory(unit: str) -> Option:
    def read(request: Request, value: str, path: str) -> None:
        found = re.fullmatch(r"(\d+)([KMGT]?)B?", value.upper())
        if not found:
            raise SpecError(f"{path}: must be a size such as 64G, got {quoted(value)}")
        if int(found[1]) == 0:
            request.draft.drop(path, value, "a pod has no word for all memory", "resources")
            return
        request.memory.clear()
        request.memory[unit] = int(found[1]) * 1024 ** "KMGT".index(found[2] or "M")

    return read


def _time(request: Request, value: str, path: str) -> None:
    if value.upper() not in ("0", "INFINITE", "UNLIMITED"):
        request.set("activeDeadlineSeconds", seconds_of(value, path), path)


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
    request.name = value
    request.draft.metadata["name"] = job_name(value)
    if job_name(value) != value:
        why = f"the name of a job has lower-case letters, digits and '-': {job_name(value)}"
        request.draft.drop(path, value, why)


def _export(request: Request, value: str, path: str) -> None:
    """Read `ALL,NAME=value`. The values of other names are those of the user's shell."""
    others = []
    for part in value.split(","):
        name, equals, text = part.partition("=")
        if equals and not has_only_a_shell(text) and not VARIABLE.search(text):
            request.draft.add_variable(name, text, path)
        elif part:
            others.append(part)
    if others:
        request.draft.drop(path, ",".join(others), "pods have only the variables of the job", ENV)


def _no_requeue(request: Request, _value: str, path: str) -> None:
    # A flag of torchrun has its own restarts.
    request.draft.set_default("failurePolicy.maxRestarts", 0, path)
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


def _wait(request: Request, value: str, path: str) -> None:
    """Remark on the option, which has another meaning for sbatch than for srun."""
    of_sbatch = Drop("sbatch waited for the end of the job", "ddpjob wait")
    remark = of_sbatch if "#SBATCH" in path else Drop(ENDS_TOGETHER)
    remark(request, value, path)


def take_image(request: Request, value: str, path: str) -> None:
    """Take an image of a registry. enroot writes # for the first / in it, and may name a user."""
    image = re.sub(r"^docker:(//)?(?:[^/#]*@(?=[^/#]+[/#]))?", "", value).replace("#", "/", 1)
    is_file = value.startswith(("/", ".")) or value.endswith((".sqsh", ".sif"))
    if is_file or "$" in image or "://" in image:
        request.draft.drop(path, value, NO_REGISTRY_IMAGE, "--image IMAGE")
    else:
        request.image, request.image_path = image, path


def _workdir(request: Request, value: str, path: str) -> None:
    # The folder of the call, as in `${PWD}`, is relative here.
    if value.startswith("/"):
        request.draft.trainer["workingDir"] = value
    else:
        request.draft.drop(path, value, SHARED, WORKING_DIR)


# Other options of sbatch and srun with a value, and their letters, from Slurm's slurm_opt.c.
OF_SLURM = {
    **dict.fromkeys(
        (
            *("--accel-bind", "--acctg-freq", "--batch", "--bb", "--bbf", "--bcast-exclude"),
            *("--cluster-constraint", "--container", "--container-id", "--cores-per-socket"),
            *("--cpu-freq", "--delay-boot", "--epilog", "--extra", "--gid", "--gpu-freq"),
            *("--gres-flags", "--kill-on-invalid-dep", "--mcs-label", "--mem-bind"),
            *("--msg-timeout", "--network", "--power", "--profile", "--prolog", "--segment"),
            *("--slurmd-debug", "--sockets-per-node", "--task-epilog", "--task-prolog"),
            *("--thread-spec", "--threads-per-core", "--tres-bind"),
            *("--treewidth", "--uid", "--context", "--ntasks-per-tres"),
        ),
        "",
    ),
    "--core-spec": "-S",
    "--extra-node-info": "-B",
    "--nodefile": "-F",
    "--relative": "-r",
    "--threads": "-T",
}
# Options of which one counts.
ONLY_ONE = dict.fromkeys(("--mem", "--mem-per-cpu", "--mem-per-gpu"), "--mem")

# Options without a value, or with one that may be left out and otherwise follows `=`.
SWITCHES_OF_SLURM = (
    *("--bcast", "--compress", "--external-launcher", "--send-libs", "--stepmgr", "--whole"),
    "--x11",
)

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
    "--time-min": Row(Drop(SLURM_ONLY)),
    "--deadline": Row(Drop("a DDPJob has no point in time", "activeDeadlineSeconds")),
    "--requeue": Row(
        Drop("a lost pod begins a new attempt anyway", "failurePolicy.maxDisruptions"),
        takes_value=False,
    ),
    # Of AWS' clusters.
    "--auto-resume": Row(
        Drop("a lost pod begins a new attempt anyway", "failurePolicy.maxDisruptions")
    ),
    "--no-requeue": Row(_no_requeue, takes_value=False),
    "--signal": Row(_signal),
    "--kill-on-bad-exit": Row(Drop(ENDS_TOGETHER), "-K", takes_value=False),
    "--array": Row(Drop("a DDPJob is one training", "a job for each index"), "-a"),
    "--dependency": Row(Drop("a DDPJob waits for no other one", "ddpjob wait"), "-d"),
    "--begin": Row(Drop("a DDPJob has no start time", "suspend: true and ddpjob resume"), "-b"),
    "--priority": Row(Drop(SLURM_ONLY, "priorityClassName")),
    "--nice": Row(Drop(SLURM_ONLY, "priorityClassName"), takes_value=False),
    # The place.
    "--partition": Row(Drop(SLURM_ONLY, PLACES), "-p"),
    "--constraint": Row(Drop(SLURM_ONLY, PLACES), "-C"),
    "--nodelist": Row(Drop(SLURM_ONLY, PLACES), "-w"),
    "--exclude": Row(Drop(SLURM_ONLY, PLACES), "-x"),
    "--exclusive": Row(
        Drop(
            "it gave the job all GPUs and CPUs of its nodes, and a pod gets what it requests",
            "resources, such as limits: {nvidia.com/gpu: 8}",
        ),
        takes_value=False,
    ),
    "--switches": Row(Drop(SLURM_ONLY, "scheduling.topology")),
    "--account": Row(Drop(SLURM_ONLY, "the label kueue.x-k8s.io/queue-name"), "-A"),
    "--qos": Row(Drop(SLURM_ONLY, "the label kueue.x-k8s.io/priority-class"), "-q"),
    "--reservation": Row(Drop(SLURM_ONLY, PLACES)),
    "--licenses": Row(Drop(SLURM_ONLY), "-L"),
    # Input and output.
    "--output": Row(Drop(NO_LOG_FILE), "-o"),
    "--error": Row(Drop(NO_LOG_FILE), "-e"),
    "--input": Row(Drop("a pod has no input"), "-i"),
    "--open-mode": Row(Drop(NO_LOG_FILE)),
    "--label": Row(Drop(OUTPUT), "-l", takes_value=False),
    "--unbuffered": Row(Drop(OUTPUT), "-u", takes_value=False),
    "--mail-type": Row(Drop("the operator sends no mail", "an alert on its metrics")),
    "--mail-user": Row(Drop("the operator sends no mail", "an alert on its metrics")),
    "--comment": Row(Drop(SLURM_ONLY, "an annotation")),
    "--wckey": Row(Drop(SLURM_ONLY, "a label")),
    # The environment and the processes.
    "--export": Row(_export),
    "--chdir": Row(Drop(SHARED, WORKING_DIR), "-D"),
    "--hint": Row(Drop(SLURM_ONLY)),
    "--distribution": Row(Drop("torchrun numbers the processes"), "-m"),
    "--cpu-bind": Row(Drop(STARTED)),
    "--gpu-bind": Row(_gpu_bind),
    "--mpi": Row(Drop(STARTED)),
    "--overlap": Row(Drop(STEPS), takes_value=False),
    "--jobid": Row(Drop(STEPS)),
    "--wait": Row(_wait, "-W"),
    "--wait-all-nodes": Row(Drop(STARTS_TOGETHER)),
    "--get-user-env": Row(Drop(OF_THE_USER), takes_value=False),
    "--parsable": Row(Drop(OF_THE_COMMAND), takes_value=False),
    # Switches of srun without an effect in a pod.
    "--verbose": Row(Drop(OF_THE_COMMAND), "-v", takes_value=False),
    "--quiet": Row(Drop(OF_THE_COMMAND), "-Q", takes_value=False),
    "--no-kill": Row(Drop(ENDS_TOGETHER), "-k", takes_value=False),
    "--hold": Row(Drop("the job would wait", "spec.suspend"), "-H", takes_value=False),
    "--immediate": Row(Drop(STARTS_TOGETHER), "-I", takes_value=False),
    "--preserve-env": Row(Drop(OF_THE_USER), "-E", takes_value=False),
    "--disable-status": Row(Drop(OF_THE_COMMAND), "-X", takes_value=False),
    "--no-allocate": Row(Drop(SLURM_ONLY), "-Z", takes_value=False),
    "--overcommit": Row(Drop(SLURM_ONLY, "resources"), "-O", takes_value=False),
    "--oversubscribe": Row(Drop(SLURM_ONLY, "resources"), "-s", takes_value=False),
    "--contiguous": Row(Drop(SLURM_ONLY, "scheduling.topology"), takes_value=False),
    "--spread-job": Row(Drop(SLURM_ONLY, "topologySpreadConstraints"), takes_value=False),
    "--use-min-nodes": Row(Drop(SLURM_ONLY), takes_value=False),
    "--exact": Row(Drop(STEPS), takes_value=False),
    "--interactive": Row(Drop(STEPS), takes_value=False),
    "--pty": Row(Drop("a pod has no terminal"), takes_value=False),
    "--propagate": Row(Drop(OF_THE_USER), takes_value=False),
    "--quit-on-interrupt": Row(Drop(OF_THE_COMMAND), takes_value=False),
    "--reboot": Row(Drop(SLURM_ONLY), takes_value=False),
    "--resv-ports": Row(Drop(SLURM_ONLY), takes_value=False),
    "--debugger-test": Row(Drop(OF_THE_COMMAND), takes_value=False),
    "--test-only": Row(Drop("ddpjob validate checks a job"), takes_value=False),
    "--ignore-pbs": Row(Drop(OF_THE_COMMAND), takes_value=False),
    # Counts by units unknown to a pod.
    "--ntasks-per-core": Row(Drop("a pod asks for CPUs and not for cores", PROCESSES)),
    "--ntasks-per-socket": Row(Drop("a pod asks for CPUs and not for sockets", PROCESSES)),
    "--gpus-per-socket": Row(Drop("a pod asks for GPUs and not for sockets", "resources")),
    "--mincpus": Row(Drop("a pod asks for its CPUs", "resources")),
    "--tmp": Row(Drop("a pod asks for its disk", "ephemeral-storage in resources")),
    "--export-file": Row(Drop("it is a file of the Slurm cluster", ENV)),
    "--multi-prog": Row(Drop("all ranks run the same program"), takes_value=False),
    "--tres-per-task": Row(Drop("a pod asks for its devices and CPUs", "resources")),
    "--het-group": Row(Drop(EQUAL)),
    "--pack-group": Row(Drop(EQUAL)),
    "--prefer": Row(Drop(SLURM_ONLY, PLACES)),
    "--clusters": Row(Drop(CLUSTER), "-M"),
    "--cluster": Row(Drop(CLUSTER)),
    "--cpu_bind": Row(Drop(STARTED)),
    "--help": Row(Drop(OF_THE_COMMAND), "-h", takes_value=False),
    "--usage": Row(Drop(OF_THE_COMMAND), takes_value=False),
    "--version": Row(Drop(OF_THE_COMMAND), "-V", takes_value=False),
    **{name: Row(Drop(SLURM_ONLY), letter) for name, letter in OF_SLURM.items()},
    **{name: Row(Drop(SLURM_ONLY), takes_value=False) for name in SWITCHES_OF_SLURM},
    # Containers, by the plugin pyxis.
    "--container-image": Row(take_image),
    "--image": Row(take_image),  # of shifter
    "--container-workdir": Row(_workdir),
    "--container-mounts": Row(Drop(SHARED, "volumes and volumeMounts, with a claim")),
    "--container-name": Row(Drop(ITS_IMAGE)),
    "--no-container-entrypoint": Row(Drop(STARTED), takes_value=False),
    "--no-container-remap-root": Row(Drop("a pod has the user of its image"), takes_value=False),
    "--container-env": Row(Drop(OF_THE_USER, ENV)),
    "--container-entrypoint": Row(Drop(STARTED), takes_value=False),
    "--container-remap-root": Row(
        Drop("a pod has the user of its image", "runAsUser in podTemplate"), takes_value=False
    ),
    "--container-save": Row(Drop("pods write no image")),
    "--container-mount-home": Row(Drop(SHARED), takes_value=False),
    "--no-container-mount-home": Row(Drop(SHARED), takes_value=False),
    "--container-readonly": Row(Drop(ITS_IMAGE), takes_value=False),
    "--container-writable": Row(Drop(ITS_IMAGE), takes_value=False),
}
LETTERS = {row.letter: name for name, row in OPTIONS.items() if row.letter}
