"""Convert the command for the processes into spec.args and spec.torchrun.

The command of other manifests begins with torchrun, with python or with another program. PROGRAMS
has a row for those of this module, and programs.py for others.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ddpjob.convert.draft import Draft, reason_against_variable, require_integer
from ddpjob.convert.shell import VARIABLE, expand, has_only_a_shell
from ddpjob.core.api import launcher, names
from ddpjob.core.api.readers import SpecError, children, quoted
from ddpjob.core.api.torchrun_flags import (
    FLAGS,
    RENDEZVOUS,
    Flag,
    advice_on_variable,
    candidates,
    why_not,
)

REMOVE = "; remove it"

# The flag of torchrun for a module in place of a script.
MODULE = "--module"

# What to do in place of a number of nodes that changes by itself.
BY_HAND = "change spec.nodes while the job runs: a new attempt of that size"

# What to do without the argument for the local rank.
NO_LOCAL_RANK = 'read os.environ["LOCAL_RANK"] in the script: torchrun sets it'

# Of a task with a GPU of its own.
NO_REGISTRY_IMAGE = "it is no image of a registry"
GPUS_OF_AMD = "GPUs of AMD are amd.com/gpu in resources, not nvidia.com/gpu"
OWN_GPU = (
    "a task had only its own GPU, as cuda:0; in a pod each process has all of them",
    "choose the one of LOCAL_RANK in the script",
)

# Modules that programs of their first name run.
MODULES_OF_LAUNCHERS = ("accelerate.commands.launch", "deepspeed.launcher.runner")

# Options of python with a value of their own.
PYTHON_WITH_VALUE = ("-X", "-W")

# Variables of the shell in every container, and on every node of Slurm.
OF_EVERY_SHELL = "HOME|HOSTNAME|PATH|PWD"

SHELLS = "bash|sh|zsh|dash|ash"
LAUNCH = re.compile(
    rf"(.*/)?(torchrun|accelerate|deepspeed|srun|mpirun|mpiexec|horovodrun|{launcher.PYTHON})"
)
SCRIPT = re.compile(r".*\.py")

# A launcher as a script of python, such as `python $(which torchrun)`.
SCRIPT_OF_LAUNCHER = re.compile(r"(.*/)?(torchrun|accelerate|deepspeed)")


@dataclass
class Launch:
    """A command of another manifest while it is read.

    - `path`: its place in the manifest. `values`: known values of variables of the shell.
    - `programs`: further rows of PROGRAMS.
    - `is_single`: python started one process per pod, without torchrun.
    - `is_in_script`: the command is in a script with other lines.
    - `uses_env`: the script reads LOCAL_RANK, and has no argument --local-rank.
    - `program`: the name of the program that started the processes.
    - `nodes`: the number of nodes in its flags; empty if it is not known.
    - `is_alone`: its flags make each start of it a training of its own.
    - `starts_others`: it also started itself on the other nodes.
    - `of_torchrun`: the variables that torchrun takes for flags, with their values and places.
    - `set_before`: a pattern for the names of variables that the command had in its environment.
    - `of_nodes`: those of them with the number of a node.
    """

    draft: Draft
    path: str
    values: Mapping[str, str] = field(default_factory=dict)
    programs: "Sequence[tuple[str, Reader]]" = ()
    is_single: bool = False
    is_in_script: bool = False
    uses_env: bool = False
    nodes: str = ""
    is_alone: bool = False
    program: str = "torchrun"
    starts_others: bool = False
    of_torchrun: dict[str, tuple[str, str]] = field(default_factory=dict)
    set_before: str = OF_EVERY_SHELL
    of_nodes: Sequence[str] = ()

    def resolve(self, text: str) -> str:
        """Return a text with the variables replaced by their values in the job."""
        known = {**literals(self.draft), **self.values}
        written = launcher.REFERENCE.sub(lambda found: f"${{{found[1]}}}", text)
        return expand(written, known)

    def is_set(self, name: str) -> bool:
        """Return True for a variable whose default in `${NAME:-default}` was not used."""
        given = [one for one in children(self.draft.spec, "env") if one.get("name") == name]
        if given:
            # The last one counts. Without a value it is empty.
            return "valueFrom" in given[-1] or bool(given[-1].get("value"))
        return re.fullmatch(self.set_before, name) is not None

    def add_variable(self, name: str, value: str, path: str) -> None:
        """Set a variable of the pods, or keep one that torchrun takes for a flag."""
        if name.startswith(names.RESERVED_PREFIX):
            self.of_torchrun[name] = (value, f"{path} {name}")
        else:
            self.draft.add_variable(name, value, path)


Reader = Callable[[Launch, list[str]], None]


def read_command(launch: Launch, words: Sequence[str]) -> None:
    """Read the command of the training. Raises SpecError for an unreadable one."""
    rest = list(words)
    if not rest:
        raise SpecError(f"{launch.path}: has no command; write the one that starts the training")
    rest[0] = launch.resolve(rest[0])
    program = rest[0].rpartition("/")[2]
    for pattern, reader in (*launch.programs, *PROGRAMS):
        if re.fullmatch(pattern, program):
            reader(launch, rest)
            return
    raise SpecError(
        f"{launch.path}: cannot read a command that begins with {quoted(rest[0])}; write torchrun "
        "or python and the script there"
    )


def literals(draft: Draft) -> dict[str, str]:
    """Return the variables of the pods with a literal value in the manifest."""
    env = children(draft.spec, "env")
    return {str(one["name"]): str(one["value"]) for one in env if "value" in one and "name" in one}


def _set_program(launch: Launch, words: Sequence[str], default: str) -> None:
    """Keep the path of torchrun or python, unless it is a plain name for a lookup in $PATH."""
    if "/" not in words[0]:
        return
    command = [words[0]]
    if default == "python":
        command += launcher.TORCHRUN_MODULE
    launch.draft.set("torchrun.command", command, launch.path)


def set_args(launch: Launch, words: Sequence[str], what: str) -> None:
    if not words or words == ["-m"]:
        raise SpecError(f"{launch.path}: {what} has no script; write the script after its flags")
    script, *rest = words
    launch.draft.set("args", [launch.resolve(script), *rest], launch.path)


# torchrun


def _torchrun(launch: Launch, words: list[str]) -> None:
    _set_program(launch, words, "torchrun")
    _after_torchrun(launch, words[1:])


def _after_torchrun(launch: Launch, words: list[str]) -> None:
    """Read the flags of torchrun, the script and its arguments."""
    rest = list(words)
    flags = _take_flags(launch, rest)
    flags += _flags_of_variables(launch, {flag.name for flag, _ in flags})
    given = {flag.name for flag, _ in flags}
    dropped = []
    for flag, value in flags:
        if flag.instead == RENDEZVOUS:
            dropped.append(" ".join([flag.name, value]).strip())
        elif flag.name != MODULE:
            read_flag(launch, flag, value)
    # The number of nodes may be in a variable with an unknown value.
    unknown = {flag.name for flag in FLAGS if flag.variable in launch.of_torchrun}
    has_nodes = "--nnodes" in given | unknown
    launch.is_alone = "--standalone" in given or not has_nodes or launch.nodes == "1"
    if dropped:
        what = f"{launch.path}: flags of torchrun"
        launch.draft.drop(what, dropped, RENDEZVOUS.removesuffix(REMOVE))
    set_args(launch, ["-m", *rest] if MODULE in given else rest, "torchrun")


def _take_flags(launch: Launch, rest: list[str]) -> list[tuple[Flag, str]]:
    """Remove the flags at the beginning of words, and return them with their values."""
    flags = []
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        found = candidates(word)
        if len(found) != 1:
            _drop_unknown_flag(launch, word, rest)
            continue
        (flag,) = found
        flags.append((flag, _take_value(flag, word, rest)))
    return flags


def _flags_of_variables(launch: Launch, given: set[str]) -> list[tuple[Flag, str]]:
    """Return the flags whose values are in variables, except for given ones.

    Source: `env` and `check_env` in torch.distributed.argparse_util.
    """
    flags = []
    for flag in FLAGS:
        value, path = launch.of_torchrun.get(flag.variable, ("", ""))
        is_off = not flag.takes_value and value == "0"
        if not path or is_off or flag.name in given or not _is_literal(value):
            continue
        del launch.of_torchrun[flag.variable]
        launch.draft.note(path, f"torchrun took it for its flag {flag.name}")
        flags.append((flag, value if flag.takes_value else ""))
    return flags


def drop_variables_of_torchrun(launch: Launch) -> None:
    """Remark on the variables that torchrun did not take for flags."""
    for name, (value, path) in launch.of_torchrun.items():
        launch.draft.drop(path, value, reason_against_variable(name), advice_on_variable(name))


def _take_value(flag: Flag, word: str, rest: list[str]) -> str:
    """Return the value of a flag: `--flag=value`, `-r3`, or the next word."""
    if not flag.takes_value:
        return ""
    if "=" in word:
        return word.partition("=")[2]
    if not word.startswith("--") and len(word) > 2:
        return word[2:]
    return rest.pop(0) if rest else ""


def _drop_unknown_flag(launch: Launch, word: str, rest: list[str]) -> None:
    if word.replace("_", "-") == "--use-env":
        # torch.distributed.launch has this flag. torchrun always behaves so.
        launch.uses_env = True
        return
    value = ""
    if "=" not in word and rest and not rest[0].startswith("-") and not SCRIPT.fullmatch(rest[0]):
        value = rest.pop(0)
    launch.draft.drop(f"{launch.path}: {word}", value or True, why_not(word))


def _nnodes(launch: Launch, flag: Flag, value: str) -> None:
    text = launch.resolve(value)
    if text.isdecimal():
        launch.nodes = text
    elif ":" in text:
        why = "a DDPJob has a number of nodes that is changed by hand"
        launch.draft.drop(f"{launch.path}: {flag.name}", value, why, BY_HAND)


def _nproc(launch: Launch, flag: Flag, value: str) -> None:
    set_processes(launch.draft, launch.resolve(value), f"{launch.path}: {flag.name}")


def set_processes(
    draft: Draft, value: object, path: str, put: Callable[..., None] = Draft.set
) -> None:
    """Set the processes per node from a value of torchrun: a number, auto, gpu or cpu."""
    text = str(value)
    if text.isdecimal():
        put(draft, "nprocPerNode", int(text), path)
    elif text in ("auto", "gpu"):
        put(draft, "nprocPerNode", "auto", path)
    else:
        draft.drop(
            path,
            value,
            "it is no number"
            if text != "cpu"
            else "a DDPJob has no word for a process on each CPU core",
            "set spec.nprocPerNode to the number of processes per node",
        )


def set_restarts(
    draft: Draft, value: object, path: str, put: Callable[..., None] = Draft.set
) -> None:
    """Set the budget of restarts."""
    put(draft, "failurePolicy.maxRestarts", require_integer(value, path), path)


# Other operators write these into variables of torchrun. A flag of torchrun overrides its variable.
set_default_processes = partial(set_processes, put=Draft.set_default)
set_default_restarts = partial(set_restarts, put=Draft.set_default)


def _max_restarts(launch: Launch, flag: Flag, value: str) -> None:
    text, path = launch.resolve(value), f"{launch.path}: {flag.name}"
    if _is_literal(text):
        set_restarts(launch.draft, text, path)
    else:
        launch.draft.drop(path, value, "its value is not known", "failurePolicy.maxRestarts")


def _rdzv_conf(launch: Launch, flag: Flag, value: str) -> None:
    for pair in filter(None, value.split(",")):
        key, _, setting = pair.strip().partition("=")
        set_rendezvous(launch.draft, key, setting, f"{launch.path}: {flag.name}")


def set_rendezvous(draft: Draft, key: str, value: str, path: str) -> None:
    """Set a field of torchrun.rdzvConf."""
    if key.startswith("rdzv_"):
        # Scripts for accelerate give the rendezvous itself there.
        draft.drop(f"{path} {key}", value, RENDEZVOUS.removesuffix(REMOVE))
        return
    if key == "is_host":
        draft.drop(f"{path} {key}", value, "the operator chooses the host of the rendezvous")
        return
    draft.set(f"torchrun.rdzvConf.{key}", int(value) if value.isdecimal() else value, path)


def _is_literal(value: str) -> bool:
    """Return True for a value without a part known only to a shell."""
    return not (has_only_a_shell(value) or VARIABLE.search(value))


def _other_flag(launch: Launch, flag: Flag, value: str) -> None:
    if flag.instead:
        why, _, instead = flag.instead.partition(REMOVE)
        what = f"{launch.path}: {flag.name}"
        launch.draft.drop(what, value or True, why, instead.removeprefix(", and "))
        return
    known = launch.resolve(value)
    if not _is_literal(known):
        what = f"{launch.path}: {flag.name}"
        launch.draft.drop(what, value, "its value is not known", "spec.torchrun.args")
        return
    args = launch.draft.spec.setdefault("torchrun", {}).setdefault("args", [])
    args += [flag.name, known] if flag.takes_value else [flag.name]


FLAG_READERS: Mapping[str, Callable[[Launch, Flag, str], None]] = {
    "--nnodes": _nnodes,
    "--nproc-per-node": _nproc,
    "--max-restarts": _max_restarts,
    "--rdzv-conf": _rdzv_conf,
}


def read_flag(launch: Launch, flag: Flag, value: str) -> None:
    """Read a flag of torchrun that is not one of the rendezvous."""
    FLAG_READERS.get(flag.name, _other_flag)(launch, flag, value)


# python


def _python(launch: Launch, words: list[str]) -> None:
    rest = words[1:]
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        _python_option(launch, rest)
    module = rest[1] if rest[:1] == ["-m"] and len(rest) > 1 else ""
    if module in launcher.LAUNCHER_MODULES:
        _set_program(launch, words, "python")
        _after_torchrun(launch, rest[2:])
        if module == "torch.distributed.launch" and not launch.uses_env:
            launch.draft.note(
                launch.path,
                "torch.distributed.launch gave each process the argument --local-rank",
                NO_LOCAL_RANK,
            )
        return
    if rest and SCRIPT_OF_LAUNCHER.fullmatch(rest[0]):
        read_command(launch, rest)
        return
    if module in MODULES_OF_LAUNCHERS:
        read_command(launch, [module.partition(".")[0], *rest[2:]])
        return
    launch.is_single = True
    _set_program(launch, words, "python")
    set_args(launch, rest, "python")


def _python_option(launch: Launch, rest: list[str]) -> None:
    word = rest.pop(0)
    if word == "-c":
        raise SpecError(
            f"{launch.path}: torchrun starts a script or a module, and no text of python -c; write "
            "the text into a script"
        )
    if word == "-u":
        launch.draft.add_variable("PYTHONUNBUFFERED", "1", launch.path)
        return
    value = f" {rest.pop(0)}" if word in PYTHON_WITH_VALUE and rest else ""
    launch.draft.drop(
        f"{launch.path}: an option of python",
        f"{word}{value}",
        "torchrun starts Python itself",
        "a variable of Python in env, such as PYTHONWARNINGS",
    )


def _script(launch: Launch, words: list[str]) -> None:
    launch.is_single = True
    set_args(launch, words, "the command")


# Other programs


def refuse(why: str) -> Reader:
    """Return the reader of a program that cannot be converted. `why` may have {command}."""

    def reader(launch: Launch, words: list[str]) -> None:
        command = quoted(" ".join(words))
        raise SpecError(f"{launch.path}: {why.format(command=command)}")

    return reader


PROGRAMS: Sequence[tuple[str, Reader]] = (
    ("torchrun", _torchrun),
    (launcher.PYTHON, _python),
    (
        "mpirun|mpiexec|horovodrun",
        refuse(
            "{command} starts processes by MPI, and a DDPJob by torchrun; write the command that "
            "a process runs, such as python train.py"
        ),
    ),
    (
        r".*\.sh",
        refuse(
            "{command} runs a shell script, whose lines are not here; write its line with torchrun "
            "or python in its place"
        ),
    ),
    (SCRIPT.pattern, _script),
)
