"""Run the program of a worker in a fork of the zygote, as a new Python would run it.

If this is not certain, the fork becomes a new Python (`why_not`). The remaining differences are in
docs/users/fast-start.md.
"""

import ast
import builtins
import json
import os
import runpy
import sys
from contextlib import suppress
from importlib.machinery import PathFinder, SourceFileLoader
from types import ModuleType
from typing import Callable, NamedTuple

from . import EXCEPTION, NOTICE
from .exceptions import first_line
from .launch import become_rank
from .watch import Watch, hidden_modules, is_installer, packages, top_level

# Variables of torchrun, the agent and a shell. They differ between workers and the zygote, but
# neither Python nor torch reads them at its start.
OWN_VARIABLES = {
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "_",
    "PWD",
    "OLDPWD",
    "SHLVL",
}
OWN_PREFIXES = ("TORCHELASTIC_", "DDP_")

# Methods that only read variables.
READS = {
    "get",
    "copy",
    "items",
    "keys",
    "values",
}

# Names of what has to come before the import of torch.
EARLY = {
    "putenv",
    "unsetenv",
    "load_dotenv",
    "sched_setaffinity",
    "patch_all",
}

# Functions that start another program.
STARTS = {
    "run",
    "call",
    "check_call",
    "check_output",
    "Popen",
    "system",
    "popen",
    "getoutput",
}


class Surroundings(NamedTuple):
    """The inputs of Python and torch at their start."""

    env: dict[str, str]
    cwd: str
    packages: set[str]

    @classmethod
    def of_this_process(cls) -> "Surroundings":
        env = {name: os.environ[name] for name in os.environ if not is_own(name)}
        return cls(env, os.getcwd(), packages())


def main(args: list[str], zygote: Surroundings) -> None:
    """Become the worker: in this process, or by a new Python if the two could differ."""
    python, note = become_rank()
    reason = why_not(python, args, zygote)
    if reason:
        print(f"{NOTICE}no fast start of this rank: {reason}", file=sys.stderr)
        os.execvp(python, [python, *args])
    reseed()
    # Python 3.9 has no such name.
    sys.orig_argv = [python, *args]  # novm
    process = os.getpid()
    watch = Watch()
    try:
        run_program(args, watch.begin)
    except BaseException as error:
        # A fork of the program has an end of its own.
        if os.getpid() == process:
            write_note(note, error)
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            raise
        print_exception(error)
        sys.exit(1)


def why_not(python: str, args: list[str], zygote: Surroundings) -> str:
    """Return why this process cannot run a program as a new Python would, or an empty string.

    torchrun starts `-u SCRIPT` or `-u -m MODULE`.
    """
    flag, program = [*args, "", ""][:2]
    own = Surroundings.of_this_process()
    if python != sys.executable:
        return f"its Python is {python}"
    if own.env != zygote.env:
        changes = own.env.items() ^ zygote.env.items()
        names = sorted({name for name, _ in changes})
        return f"its environment is another one: {', '.join(names)}"
    if own.cwd != zygote.cwd:
        return f"its working directory is {own.cwd}"
    if own.packages != zygote.packages:
        # For example by the attempt before.
        changed = sorted(own.packages ^ zygote.packages)
        return f"packages were installed or removed after the import of torch: {changed[0]}"
    is_module = program == "-m"
    if flag != "-u" or not (is_module or program.endswith(".py")):
        return "it runs neither a module nor a file that ends with .py"
    try:
        folder = folder_of(args)
        hidden = hidden_modules(folder)
        if hidden:
            return f"{folder} has {', '.join(hidden)}, which torch has imported already"
        return comes_too_late(sources(args))
    except (OSError, ValueError, SyntaxError, RecursionError, IndexError) as error:
        return f"its program cannot be read: {error}"


def is_own(name: str) -> bool:
    return name in OWN_VARIABLES or name.startswith(OWN_PREFIXES)


def folder_of(args: list[str]) -> str:
    """Return the first folder of Python's search path."""
    if args[1] == "-m":
        return os.getcwd()
    return os.path.dirname(os.path.realpath(args[1]))


def sources(args: list[str]) -> list[str]:
    """Return the files run by Python: a script, or a module after its packages."""
    if args[1] != "-m":
        return [args[1]]
    files = []
    search = [folder_of(args), *sys.path]
    names = args[2].split(".")
    while names:
        # Unlike importlib.util.find_spec, this imports no package.
        found = PathFinder.find_spec(names.pop(0), search)
        if not found:
            raise FileNotFoundError(args[2])
        if found.origin:
            files.append(found.origin)
        if found.submodule_search_locations is not None:
            search = list(found.submodule_search_locations)
            names = names or ["__main__"]
    return files


def comes_too_late(files: list[str]) -> str:
    """Return a part of a program that may belong before the import of torch, or an empty string.

    Reading variables is harmless, as in `os.environ["RANK"]`. After the program's own import of
    torch, only variables of the compiler matter: a program may import torch._dynamo late.
    """
    has_torch = False
    for path in files:
        with open(path, "rb") as file:
            program = ast.parse(file.read())
        for statement in program.body:
            nodes = list(ast.walk(statement))
            where = f"line {statement.lineno} of {path}"
            if any(map(installs_packages, nodes)):
                return f"{where} may install what torch has imported already"
            has_torch = has_torch or imports_torch(statement)
            matters = not has_torch or any(map(is_name_of_compiler, nodes))
            if matters and sets_early(nodes):
                return f"{where} may set what torch reads when it starts"
    return ""


def sets_early(nodes: list[ast.AST]) -> bool:
    names = [name_of(node) for node in nodes]
    reads = sum(map(is_read, nodes))
    return names.count("environ") > reads or bool(EARLY.intersection(names))


def installs_packages(node: ast.AST) -> bool:
    """Return True for a call such as `subprocess.run([sys.executable, "-m", "pip", "install"])`."""
    if not isinstance(node, ast.Call) or name_of(node.func) not in STARTS:
        return False
    words = []
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            words.append(each.value)
    return is_installer(words)


def imports_torch(node: ast.AST) -> bool:
    modules = []
    if isinstance(node, ast.Import):
        modules = [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        modules = [node.module or ""]
    return "torch" in map(top_level, modules)


def is_name_of_compiler(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and str(node.value).startswith("TORCH")


def name_of(node: ast.AST) -> str:
    """Return the last name of an expression such as `os.environ`."""
    for attribute in ("attr", "id", "name"):
        if hasattr(node, attribute):
            return str(getattr(node, attribute))
    return ""


def is_read(node: ast.AST) -> bool:
    """Return True for a read of `environ[...]`, `environ.get` and `in environ`."""
    if isinstance(node, ast.Subscript):
        is_load = isinstance(node.ctx, ast.Load)
        return is_load and name_of(node.value) == "environ"
    if isinstance(node, ast.Compare):
        return any(name_of(each) == "environ" for each in node.comparators)
    if isinstance(node, ast.Attribute):
        return node.attr in READS and name_of(node.value) == "environ"
    return False


def reseed() -> None:
    """Give this process random numbers of its own, as every new process has them.

    At a fork, Python does this for `random`. `torch.seed` would also seed the devices.
    """
    sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy"].random.seed()
    multiprocessing = sys.modules["multiprocessing"]
    multiprocessing.current_process().authkey = os.urandom(32)


def run_program(args: list[str], before: Callable[[], None]) -> None:
    """Run a script or a module as `__main__`, as Python does (`Modules/main.c`).

    `before` is called just before, with the search path of the program.
    """
    main_module = ModuleType("__main__")
    main_module.__dict__["__builtins__"] = builtins
    # multiprocessing has a second name for it.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main_module
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder_of(args))
    before()
    if args[1] == "-m":
        sys.argv = ["-m", *args[3:]]
        runpy._run_module_as_main(args[2])  # type: ignore[attr-defined]
        return
    sys.argv = args[1:]
    path = os.path.join(os.getcwd(), args[1].removeprefix("./"))
    loader = SourceFileLoader("__main__", path)
    main_module.__dict__.update(__cached__=None, __file__=path, __loader__=loader)
    if sys.version_info < (3, 14):
        main_module.__annotations__ = {}
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main_module.__dict__)


def write_note(path: str, error: BaseException) -> None:
    """Write down the exception that ends the worker, or the text of its `sys.exit(text)`."""
    text, words = first_line(error)
    if isinstance(error, SystemExit):
        has_text = not isinstance(error.code, (int, type(None)))
        text = " ".join(str(error.code).split()) if has_text else ""
        words += f"\n{text}"
    if text:
        note = {"exception": text[:EXCEPTION], "words": words}
        with suppress(OSError), open(path, "w", errors="replace") as file:
            json.dump(note, file)


def print_exception(error: BaseException) -> None:
    """Print the exception that ends the worker, without the frames of this file."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    # As Python does (`Python/pythonrun.c`). A function of atexit then sees a crash.
    sys.last_type = type(error)
    sys.last_value = error
    sys.last_traceback = trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error  # novm
    sys.excepthook(type(error), error, trace)
