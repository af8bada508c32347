"""The words that start the processes: spec.torchrun.command, spec.torchrun.args and spec.args.

The rules are about torchrun itself. The flags and programs of another launcher in
spec.torchrun.command are not known, so little is refused then. The clauses of spec_rules.py have
the same patterns.
"""

import re
from collections.abc import Iterator, Sequence

from ddpjob.core.api.readers import SpecError, quoted
from ddpjob.core.api.torchrun_flags import candidates, check_flags, why_not

# The words that start torchrun, after the Python interpreter.
TORCHRUN_MODULE = ("-m", "torch.distributed.run")

# Programs that start the processes of a job, as torchrun does.
LAUNCHERS = "torchrun|accelerate|deepspeed|horovodrun|mpirun|mpiexec|srun"
LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch")

# Programs that start Python, or something else.
PYTHON = "python[0-9.]*"
STARTERS = f"{PYTHON}|uv|uvx|poetry|pipenv|conda|mamba|bash|sh|zsh|env|numactl|nsys|[^/]*[.]sh"

# A whole command line in one word. A path may have spaces.
COMMAND_LINE = f"^([^ ]*/)?({LAUNCHERS}|{STARTERS}) |[.]py "

MODULE_FLAGS = ("-m", "--module")
MODULE = re.compile("[^- ][^ ]*")
NO_PYTHON = ("--no-python", "--no_python")

# $NAME and ${NAME}. Kubernetes expands $(NAME), and $$ is a dollar sign for it.
SHELL_VARIABLE = re.compile(r"(?<!\$)\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")
REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")

# How spec.args begins.
BEGIN = "begin with the script or -m and a module"


def starts_another_program(words: Sequence[str]) -> bool:
    """Return True if torchrun, started by these words, runs no Python script."""
    return not {*NO_PYTHON}.isdisjoint(words)


def shell_variable(args: Sequence[str]) -> str:
    """Return the first reference to a variable that only a shell would expand, or ""."""
    found = (SHELL_VARIABLE.search(word) for word in args)
    return next((one[0] for one in found if one), "")


def references(args: Sequence[str]) -> Iterator[str]:
    """Yield the names of the variables that Kubernetes is to expand in arguments."""
    for word in args:
        yield from (found[1] for found in REFERENCE.finditer(word) if found[1])


def is_torchrun(command: Sequence[str]) -> bool:
    """Return True if a command is torchrun itself, and not another launcher."""
    return _program(command) == "torchrun" or _is_module(command)


def flags_of(command: Sequence[str]) -> tuple[str, ...]:
    """Return the words after torchrun in a command; none for another launcher."""
    if not is_torchrun(command):
        return ()
    return tuple(command[3:] if _is_module(command) else command[1:])


def _program(command: Sequence[str]) -> str:
    return command[0].rpartition("/")[2]


def _is_module(command: Sequence[str]) -> bool:
    is_python = _program(command).startswith("python")
    return is_python and tuple(command[1:3]) == TORCHRUN_MODULE


def check_command(command: Sequence[str]) -> None:
    """Check spec.torchrun.command. Raises SpecError."""
    check_flags(flags_of(command), "spec.torchrun.command")


def check_torchrun_args(flags: Sequence[str], command: Sequence[str]) -> None:
    """Check spec.torchrun.args: they follow the command. Raises SpecError."""
    if is_torchrun(command):
        check_flags(flags, "spec.torchrun.args")


def check_args(args: Sequence[str], command: Sequence[str], flags: Sequence[str]) -> None:
    """Check spec.args: they follow the command and its flags. Raises SpecError."""
    is_python_left_out = not {*NO_PYTHON}.isdisjoint([*command, *flags])
    if not is_torchrun(command):
        _check_for_another_launcher(args[0], is_python_left_out)
    elif re.search(COMMAND_LINE, args[0]) or args[0].startswith(("-m ", "--module ")):
        raise SpecError(
            f"spec.args: each word must be an item of its own; {BEGIN}, got {quoted(args[0])}"
        )
    elif args[0] in MODULE_FLAGS:
        _check_module(args, is_python_left_out)
    elif args[0].startswith("-"):
        raise SpecError(f"spec.args: {_about_flag(args[0])}")
    elif not is_python_left_out:
        _check_script(args[0])


def _check_for_another_launcher(first: str, is_python_left_out: bool) -> None:
    # The flag would come after the operator's, and override it.
    if any(flag.is_set for flag in candidates(first)):
        raise SpecError(f"spec.args: {_about_flag(first)}")
    if _is_program(first, PYTHON) and not is_python_left_out:
        raise _starter_error(first)


def _check_module(args: Sequence[str], is_python_left_out: bool) -> None:
    """Refuse `-m` unless a module for torchrun follows."""
    if is_python_left_out:
        raise SpecError(f"spec.args: {args[0]} cannot be used with --no-python; remove one of them")
    module = args[1] if len(args) > 1 else ""
    if not MODULE.fullmatch(module):
        raise SpecError(
            f"spec.args: {args[0]} must be followed by a module, each word as an item of its own, "
            f"got {quoted(args)}"
        )
    if module in LAUNCHER_MODULES:
        raise _launcher_error(module)


def _about_flag(word: str) -> str:
    """Return what to do with a flag in place of the script."""
    problem = why_not(word)
    if not problem:
        return f"{word} is a flag of torchrun; put it into spec.torchrun.args, and {BEGIN}"
    return f"{problem}; {BEGIN}"


def _check_script(first: str) -> None:
    """Refuse a program that torchrun would take for a script."""
    if _is_program(first, LAUNCHERS):
        raise _launcher_error(first)
    if _is_program(first, STARTERS):
        raise _starter_error(first)


def _is_program(word: str, names: str) -> bool:
    return re.fullmatch(f"(.*/)?({names})", word) is not None


def _launcher_error(launcher: str) -> SpecError:
    return SpecError(
        f"spec.args: {BEGIN}, since the operator starts torchrun itself, got {quoted(launcher)}; "
        "flags of torchrun belong to spec.torchrun.args"
    )


def _starter_error(program: str) -> SpecError:
    return SpecError(
        f"spec.args: {BEGIN}, since torchrun starts Python itself, got {quoted(program)}; to run "
        "another program, add --no-python to spec.torchrun.args"
    )
