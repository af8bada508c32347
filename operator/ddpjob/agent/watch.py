"""Log the actions of a program that come too late, after the zygote's import of torch.

An audit hook of Python sees it: nothing of the program is replaced. Each thing is logged once.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from types import FunctionType, ModuleType
from typing import Any, Callable

# Variables read by torch, OpenMP and the libraries of linear algebra at their import, and variables
# of torch that are read later.
EARLY = re.compile(r"(PY)?TORCH|(OMP|KMP|GOMP|MKL|OPENBLAS|BLIS|ATEN|DNNL|ONEDNN|NPY)_")
LATE = re.compile(r"TORCH(ELASTIC_|_NCCL_|_HOME$|_EXTENSIONS_DIR$|_CUDA_ARCH_LIST$)|.*_CACHE_DIR$")
ALLOCATOR = re.compile(r"PYTORCH_.*ALLOC_CONF$")

# Variables of the compiler. A program imports the compiler after torch.
COMPILER = re.compile(r"TORCHINDUCTOR|TORCHDYNAMO|TORCH_COMPILE|TORCH_LOGS")

# Commands that install packages.
INSTALLER = re.compile(
    r"(^|[\s/])(pip|pip3|pip3\.\d+|uv|conda|mamba|micromamba|poetry)\s.*\b(install|add|sync|update)\b"
)

ADVICE = "set fastStart: false"


def packages() -> frozenset[str]:
    """Return the installed packages with their versions, as folders on the search path."""
    found: set[str] = set()
    for folder in sys.path:
        with suppress(OSError):
            names = os.listdir(folder or os.curdir)
            found.update(f"{folder}/{name}" for name in names if name.endswith("-info"))
    return frozenset(found)


def hidden_modules(folder: str) -> list[str]:
    """Return the modules in a folder that Python would import in place of imported ones."""
    imported = {name.partition(".")[0] for name in sys.modules} - {"__main__"}
    files = {name.partition(".")[0] for name in os.listdir(folder)}
    names = sorted(files & imported - set(sys.builtin_module_names))
    found = {name: PathFinder.find_spec(name, [folder]) for name in names}
    # A folder without __init__.py hides nothing.
    return [name for name, spec in found.items() if spec and spec.origin]


def is_installer(words: Any) -> bool:
    """Return True if a command installs packages. `words`: a list, or the text for a shell."""
    with suppress(TypeError, ValueError):
        text = words if isinstance(words, (str, bytes)) else b" ".join(map(os.fsencode, words))
        return bool(INSTALLER.search(os.fsdecode(text)))
    return False


class Watch:
    """Logs the late actions of this process. `process` is its number: its own forks log nothing."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.logged: set[str] = set()
        self.before = set(sys.modules)
        self.search_path = list(sys.path)
        self.handlers: dict[str, Callable[..., None]] = {
            "os.putenv": self.variable,
            "os.unsetenv": self.variable,
            "subprocess.Popen": lambda program, words, *_: self.command(words),
            "os.posix_spawn": lambda program, words, *_: self.command(words),
            "os.exec": lambda program, words, *_: self.command(words),
            "os.system": self.command,
            "import": self.module,
        }

    def begin(self) -> None:
        """Watch from now on. `sys.path` has the program's folder already."""
        self.search_path = list(sys.path)
        handlers = self.handlers

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            handler = handlers.get(event)
            if handler:
                # An error here must not end the program.
                with suppress(Exception):
                    handler(*arguments)

        sys.addaudithook(hook)

    def log(self, what: str, advice: str = ADVICE) -> None:
        if what not in self.logged and os.getpid() == self.process:
            self.logged.add(what)
            line = f"ddpjob agent: fast start: {what}; {advice}\n"
            os.write(2, line.encode(errors="replace"))

    def variable(self, key: str | bytes, value: object = None) -> None:
        """Look at a variable set or removed by the program."""
        name = os.fsdecode(key)
        if not EARLY.match(name) or LATE.match(name) or ALLOCATOR.match(name):
            return
        if COMPILER.match(name) or not self.has_torch():
            what = f"the program sets {name}, which was read before it began"
            self.log(what, f"set it in spec.env, or {ADVICE}")

    def has_torch(self) -> bool:
        """Return True if a module of the program has imported torch, or something of it."""
        names = {"__main__", *(set(sys.modules) - self.before)}
        # An object in place of a module may have no variables.
        variables = [getattr(sys.modules[name], "__dict__", {}) for name in names]
        return any(is_of_torch(value) for found in variables for value in list(found.values()))

    def command(self, words: Any) -> None:
        if is_installer(words):
            self.install()

    def install(self) -> None:
        self.log(
            "the program installs packages; those that were imported before it began, such as "
            "numpy, stay as they were"
        )

    def module(self, name: str, *_: object) -> None:
        """Look at an import: of pip, or after folders were added to the search path."""
        if name.partition(".")[0] == "pip":
            self.install()
        if sys.path != self.search_path:
            added = [folder for folder in sys.path if folder not in self.search_path]
            self.search_path = list(sys.path)
            for folder in added:
                # It may be no folder, or no text.
                with suppress(OSError, TypeError, ValueError):
                    for name in hidden_modules(folder):
                        self.log(f"{folder} has {name}, which was imported before it began")


def is_of_torch(value: object) -> bool:
    name: object = ""
    if isinstance(value, ModuleType):
        name = vars(value).get("__name__")
    elif isinstance(value, (type, FunctionType)):
        name = value.__module__
    return str(name).partition(".")[0] == "torch"
