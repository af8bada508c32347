"""Decide what follows from the whole command: its variables, the nodes and the processes."""

import re
from collections.abc import Collection, Sequence

from ddpjob.convert.bash import without_bash
from ddpjob.convert.launch import OF_EVERY_SHELL, Launch, drop_variables_of_torchrun, literals
from ddpjob.convert.shell import ONLY_A_SHELL, VARIABLE
from ddpjob.core.api import launcher
from ddpjob.core.api.readers import children
from ddpjob.core.api.variables import (
    BEFORE_TORCHRUN,
    NODE_INDEX,
    OF_EVERY_POD,
    OF_THE_API_SERVER,
    SAME_IN_A_POD,
    instead_of,
    is_of_a_process,
)

# Variables that a shell sets itself, and how its text sets others.
OF_A_SHELL = (
    *("RANDOM", "SECONDS", "UID", "EUID", "PPID", "LINENO", "SHELL", "OLDPWD", "IFS"),
    *("OPTARG", "OPTIND", "REPLY", "BASH", "BASHPID", "BASH_VERSION"),
)
SETS = (
    r"\b{name}\+?=|\b(?:for|select|read|mapfile|readarray|printf|getopts|local|declare|export)\b"
    r"[^\n;]*\b{name}\b"
)

# Parts of a shell's text without expansions: single quotes, and documents with a quoted end.
NO_EXPANSION = re.compile(r"'[^']*'|<<-?\s*(['\"])(\w+)\1.*?^\s*\2\s*$", re.DOTALL | re.MULTILINE)

# Parts of an argument that only a shell expands, beside plain variables. `$$` is of Kubernetes.
ONLY_FOR_A_SHELL = re.compile(rf"`|\$\(+[^()]*[^\w.()-]|(?!\$\$)(?:{ONLY_A_SHELL.pattern})")
NO_SHELL = ("no shell reads it", "write its value")


def refer_to_variables(launch: Launch) -> None:
    """Write known variables in the arguments in the form of Kubernetes. Note unknown variables."""
    draft = launch.draft
    drop_variables_of_torchrun(launch)
    known = {*(str(one.get("name")) for one in children(draft.spec, "env")), *OF_EVERY_POD}
    args = [
        VARIABLE.sub(
            lambda found: f"$({_name(found)})" if _name(found) in known else found[0], word
        )
        for word in draft.spec.get("args", ())
    ]
    if args:
        draft.spec["args"] = args
    _note_args(launch, args, known)
    _note_values(launch)
    _note_setup(launch, known)


def _note_args(launch: Launch, args: Sequence[str], known: Collection[str]) -> None:
    draft, path = launch.draft, launch.path
    for word in args:
        found = [_name(one) for one in VARIABLE.finditer(word)]
        for name in [*found, *launcher.references([word])]:
            if name in known or name.startswith(OF_THE_API_SERVER):
                continue
            instead = _instead(launch, name)
            # For a shell, `$(NAME)` is the output of a command.
            if name not in found and not name.isupper():
                instead += f"; if {name} is a command, write its output"
            draft.note(f"{path}: {name} in args", "nothing expands it", instead)
        if ONLY_FOR_A_SHELL.search(word):
            draft.note(f"{path}: {word} in args", *NO_SHELL)


def _note_values(launch: Launch) -> None:
    draft, path = launch.draft, launch.path
    for name, value in literals(draft).items():
        for other in filter(_is_of_process, launcher.references([value])):
            why = f"nothing expands {other}"
            instead = (
                "write the whole value" if other in BEFORE_TORCHRUN else _instead(launch, other)
            )
            draft.note(f"{path}: the variable {name}", why, instead)


def _note_setup(launch: Launch, known: Collection[str]) -> None:
    draft, path = launch.draft, launch.path
    setup = without_bash(draft.spec.get("setup", ""))
    of_setup = {*known, *BEFORE_TORCHRUN, *OF_EVERY_SHELL.split("|"), *OF_A_SHELL}
    for variable in VARIABLE.finditer(NO_EXPANSION.sub("", setup)):
        name = _name(variable)
        if name in of_setup or variable[3] is not None or name.startswith(OF_THE_API_SERVER):
            continue
        if re.search(SETS.format(name=name), setup):
            continue
        if _is_of_process(name):
            instead = _instead(launch, name).replace("$(", "$").replace(")", "")
            draft.note(f"{path}: {name} in setup", "the setup runs before torchrun", instead)
        elif not draft.get("envFrom"):
            draft.note(f"{path}: {name} in setup", "nothing sets it", f"set {name} in spec.env")


def _name(found: re.Match[str]) -> str:
    return found[1] or found[2] or ""


def _is_of_process(name: str) -> bool:
    """Return True for a variable set by a launcher and missing in a pod of a DDPJob."""
    return is_of_a_process(name) or name.startswith("SLURM_") or name in SAME_IN_A_POD


def _instead(launch: Launch, name: str) -> str:
    """Return advice on a variable without an expansion."""
    if name in launch.of_nodes:
        return f'{NODE_INDEX}, or read os.environ["RANK"] in the script for that of the process'
    if launch.draft.get("envFrom") and not _is_of_process(name):
        return f"write $({name}) if a source of envFrom has it"
    return instead_of(name)


def settle_nodes(launch: Launch, nodes: int) -> None:
    """Remark on a difference in the number of nodes between the command and the manifest."""
    if launch.nodes and int(launch.nodes) != nodes:
        launch.draft.drop(
            f"{launch.path}: the nodes in the flags of {launch.program}",
            int(launch.nodes),
            f"their number in the manifest is {nodes}",
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
