"""Run the program of a worker in a fork of the zygote, as a new Python would run it.

Where that is not certain, the fork becomes a new Python (`can_fork`). The differences that remain
are in docs/users/fast-start.md.
"""

from __future__ import annotations

import ast
import builtins
import os
import runpy
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from types import ModuleType
from typing import NamedTuple

from .launch import take_variables

# Variables that differ between workers and the zygote, and that neither Python nor torch reads when
# it starts: those of torchrun for each worker, of the agent, and of a shell.
OWN_VARIABLES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("_", "PWD", "OLDPWD", "SHLVL"),
}
OWN_PREFIXES = ("TORCHELASTIC_", "DDP_")


class Surroundings(NamedTuple):
    """What Python and torch read when they start."""

    env: dict[str, str]
    cwd: str

    @classmethod
    def of_this_process(cls) -> Surroundings:
        return cls({name: os.environ[name] for name in os.environ if not is_own(name)}, os.getcwd())


def main(arguments: list[str], zygote: Surroundings) -> None:
    """Become the worker: in this process, or by a new Python if the two could differ."""
    python = take_variables()
    is_same = python == sys.executable and Surroundings.of_this_process() == zygote
    if not (is_same and can_fork(arguments)):
        os.execvp(python, [python, *arguments])
    reseed()
    sys.orig_argv = [python, *arguments]  # novm: Python 3.9 lacks it, and takes it
    try:
        run_program(arguments)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        print_exception(error)
        sys.exit(1)


def is_own(name: str) -> bool:
    return name in OWN_VARIABLES or name.startswith(OWN_PREFIXES)


def can_fork(arguments: list[str]) -> bool:
    """Return True if this process can run the program as a new Python would.

    torchrun starts `-u SCRIPT` or `-u -m MODULE`. A program that sets variables before it imports
    torch needs a new Python, and so does one whose folder has another module of a name that is
    imported already.
    """
    if arguments[0] != "-u" or not (arguments[1] == "-m" or arguments[1].endswith(".py")):
        return False
    try:
        return not sets_variables(sources(arguments)) and not hides_module(folder_of(arguments))
    except (OSError, ValueError, SyntaxError, RecursionError, IndexError):
        # A new Python reports what is wrong.
        return False


def folder_of(arguments: list[str]) -> str:
    """Return the folder that Python searches first."""
    is_module = arguments[1] == "-m"
    return os.getcwd() if is_module else os.path.dirname(os.path.realpath(arguments[1]))


def sources(arguments: list[str]) -> list[str]:
    """Return the files that Python runs: a script, or a module after its packages."""
    if arguments[1] != "-m":
        return [arguments[1]]
    files = []
    search = [folder_of(arguments), *sys.path]
    names = arguments[2].split(".")
    while names:
        # Unlike importlib.util.find_spec, this imports no package.
        found = PathFinder.find_spec(names.pop(0), search)
        if not found:
            raise FileNotFoundError(arguments[2])
        if found.origin:
            files.append(found.origin)
        if found.submodule_search_locations is not None:
            search = list(found.submodule_search_locations)
            names = names or ["__main__"]
    return files


def sets_variables(files: list[str]) -> bool:
    """Return True if a program may set environment variables before it imports torch.

    To read them is harmless: `os.environ["RANK"]` and `os.environ.get("RANK")`.
    """
    for path in files:
        with open(path, "rb") as file:
            statements = ast.parse(file.read()).body
        for statement in statements:
            if imports_torch(statement):
                return False
            nodes = list(ast.walk(statement))
            names = [name_of(node) for node in nodes]
            if "putenv" in names or names.count("environ") > sum(map(is_read, nodes)):
                return True
    return False


def imports_torch(statement: ast.stmt) -> bool:
    modules = []
    if isinstance(statement, ast.Import):
        modules = [name.name for name in statement.names]
    if isinstance(statement, ast.ImportFrom) and not statement.level:
        modules = [statement.module or ""]
    return any(module.partition(".")[0] == "torch" for module in modules)


def name_of(node: ast.AST) -> str:
    """Return the last name of an expression such as `os.environ`."""
    return str(getattr(node, "attr", getattr(node, "id", getattr(node, "name", ""))))


def is_read(node: ast.AST) -> bool:
    """Return True for `environ[...]` that is not assigned to, and for `environ.get`."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Load) and name_of(node.value) == "environ"
    return (
        isinstance(node, ast.Attribute) and node.attr == "get" and name_of(node.value) == "environ"
    )


def hides_module(folder: str) -> bool:
    """Return True if a folder has a module that Python would import in place of an imported one."""
    imported = {name.partition(".")[0] for name in sys.modules} - {"__main__"}
    files = {name.partition(".")[0] for name in os.listdir(folder)}
    found = (
        PathFinder.find_spec(name, [folder])
        for name in files & imported - set(sys.builtin_module_names)
    )
    # A folder without __init__.py hides nothing.
    return any(spec and spec.origin for spec in found)


def reseed() -> None:
    """Give this process random numbers of its own, as every new process has them.

    At a fork, Python does this for `random`. `torch.seed` would also seed the devices.
    """
    sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy"].random.seed()
    multiprocessing = sys.modules["multiprocessing"]
    multiprocessing.current_process().authkey = os.urandom(32)


def run_program(arguments: list[str]) -> None:
    """Run a script or a module as `__main__`, as Python does (`Modules/main.c`)."""
    main_module = ModuleType("__main__")
    main_module.__dict__["__builtins__"] = builtins
    # multiprocessing has a second name for it.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main_module
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder_of(arguments))
    if arguments[1] == "-m":
        sys.argv = ["-m", *arguments[3:]]
        runpy._run_module_as_main(arguments[2])  # type: ignore[attr-defined]
        return
    sys.argv = arguments[1:]
    path = os.path.abspath(arguments[1])
    loader = SourceFileLoader("__main__", path)
    main_module.__dict__.update(
        __annotations__={}, __cached__=None, __file__=path, __loader__=loader
    )
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main_module.__dict__)


def print_exception(error: BaseException) -> None:
    """Print an exception that ends the worker, without the frames of this file."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.excepthook(type(error), error, trace)
