"""Decide what follows from the whole command: its variables, the nodes and the processes."""

import re

from ddpjob.convert.draft import Draft
from ddpjob.convert.launch import Launch, literals
from ddpjob.convert.shell import ONLY_A_SHELL, VARIABLE
from ddpjob.core.api import launcher, names
from ddpjob.core.api.readers import children
from ddpjob.core.api.variables import OF_EVERY_POD, OF_PROCESSES, OF_THE_API_SERVER

# Parts of an argument that only a shell expands, beside plain variables. `$$` is of Kubernetes.
ONLY_FOR_A_SHELL = re.compile(rf"`|\$\(+[^()]*[^\w.()-]|(?!\$\$)(?:{ONLY_A_SHELL.pattern})")
NO_SHELL = ("no shell reads it", "write its value")

# Variables of other launchers, and what a pod of a DDPJob has in their place.
NODE_INDEX = "write $(DDP_NODE_INDEX) for the number of the node"
SAME_IN_A_POD = {
    "RANK": f"{NODE_INDEX}, or read os.environ['RANK'] in the script for that of the process",
    "PET_NODE_RANK": NODE_INDEX,
    "JOB_COMPLETION_INDEX": NODE_INDEX,
    "SLURM_NODEID": NODE_INDEX,
    "SLURM_JOB_ID": "write $(DDP_JOB_NAME) for the name of the job",
    "SLURM_JOBID": "write $(DDP_JOB_NAME) for the name of the job",
}
# Variables of OF_PROCESSES that the image or the operator sets, so a setup has them too.
BEFORE_TORCHRUN = (
    *("PATH", "HOSTNAME", "PYTHONPATH", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
)
SAME_IN_A_PROCESS = {
    "SLURM_PROCID": "RANK",
    "SLURM_LOCALID": "LOCAL_RANK",
    "SLURM_NTASKS": "WORLD_SIZE",
}


def refer_to_variables(draft: Draft, path: str) -> None:
    """Write known variables in the arguments in the form of Kubernetes. Note unknown variables."""
    known = {*(str(one.get("name")) for one in children(draft.spec, "env")), *OF_EVERY_POD}
    args = [
        VARIABLE.sub(
            lambda found: f"$({_name(found)})" if _name(found) in known else found[0], word
        )
        for word in draft.spec.get("args", ())
    ]
    if args:
        draft.spec["args"] = args
    for word in args:
        found = [_name(one) for one in VARIABLE.finditer(word)]
        for name in [*found, *launcher.references([word])]:
            if name in known or name.startswith(OF_THE_API_SERVER):
                continue
            instead = _instead(draft, name)
            # For a shell, `$(NAME)` is the output of a command.
            if name not in found and not name.isupper():
                instead += f"; if {name} is a command, write its output"
            draft.note(f"{path}: {name} in args", "nothing expands it", instead)
        if ONLY_FOR_A_SHELL.search(word):
            draft.note(f"{path}: {word} in args", *NO_SHELL)
    for name, value in literals(draft).items():
        for other in filter(_is_of_process, launcher.references([value])):
            why = f"nothing expands {other}"
            instead = (
                "write the whole value" if other in BEFORE_TORCHRUN else _instead(draft, other)
            )
            draft.note(f"{path}: the variable {name}", why, instead)
    for name in map(_name, VARIABLE.finditer(draft.spec.get("setup", ""))):
        if _is_of_process(name) and name not in BEFORE_TORCHRUN:
            instead = _instead(draft, name).replace("$(", "$").replace(")", "")
            draft.note(f"{path}: {name} in setup", "the setup runs before torchrun", instead)


def _name(found: re.Match[str]) -> str:
    return found[1] or found[2] or ""


def _is_of_process(name: str) -> bool:
    """Return True for a variable set by a launcher and missing in a pod of a DDPJob."""
    is_of_launcher = name.startswith((names.RESERVED_PREFIX, "SLURM_"))
    return is_of_launcher or name in OF_PROCESSES or name in SAME_IN_A_POD


def _instead(draft: Draft, name: str) -> str:
    """Return advice on a variable without an expansion."""
    if name in SAME_IN_A_POD:
        return SAME_IN_A_POD[name]
    if name in BEFORE_TORCHRUN:
        return f"read os.environ[{name!r}] in the script"
    if name in SAME_IN_A_PROCESS or (_is_of_process(name) and not name.startswith("SLURM_")):
        variable = SAME_IN_A_PROCESS.get(name, name)
        return f"read os.environ[{variable!r}] in the script; torchrun sets it for each process"
    if draft.get("envFrom"):
        return f"write $({name}) if a source of envFrom has it"
    return f"set {name} in spec.env and write $({name})"


def settle_nodes(launch: Launch, nodes: int) -> None:
    """Remark on a difference in the number of nodes between torchrun's flag and the manifest."""
    if launch.nodes and int(launch.nodes) != nodes:
        launch.draft.drop(
            f"{launch.path}: --nnodes",
            int(launch.nodes),
            f"the manifest has {nodes} nodes",
            "nodes",
        )


def settle_processes(launch: Launch, devices: int) -> None:
    """Choose the processes per node where the manifest has none. `devices` are those of a pod."""
    draft = launch.draft
    nproc = draft.get("nprocPerNode")
    accelerator = draft.get("accelerator")
    is_chosen = nproc not in (None, "auto")
    if not is_chosen and launch.is_single and devices > 1 and accelerator in (None, "gpu"):
        draft.spec["nprocPerNode"] = 1
        draft.note(
            launch.path,
            f"python started one process, and a pod has {devices} devices; nprocPerNode is 1 for "
            "that reason",
            "remove nprocPerNode for one process per device, if the script uses LOCAL_RANK",
        )
    elif not is_chosen and not launch.is_single and not accelerator:
        if devices:
            draft.spec["nprocPerNode"] = devices
            return
        draft.note(
            launch.path,
            "without GPUs, auto was one process for each CPU core for torchrun; it is one for a "
            "DDPJob",
            "set spec.nprocPerNode",
        )
