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

from . import NOTICE

# Variables read by torch, OpenMP and linear algebra at their import, and those of torch read later.
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


def packages() -> set[str]:
    """Return the installed packages with their versions, as folders on the search path."""
    found = set()
    for folder in sys.path:
        with suppress(OSError):
            for name in os.listdir(folder or os.curdir):
                if name.endswith("-info"):
                    found.add(f"{folder}/{name}")
    return found


def top_level(name: str) -> str:
    """Return the first part of a module's name, or of a file's."""
    return name.partition(".")[0]


def hidden_modules(folder: str) -> list[str]:
    """Return the modules in a folder that Python would import in place of imported ones."""
    names = set(map(top_level, os.listdir(folder)))
    names &= set(map(top_level, sys.modules))
    names -= {"__main__", *sys.builtin_module_names}
    hidden = []
    for name in sorted(names):
        spec = PathFinder.find_spec(name, [folder])
        # A folder without __init__.py hides nothing.
        if spec and spec.origin:
            hidden.append(name)
    return hidden


def is_installer(words: Any) -> bool:
    """Return True if a command installs packages. `words`: a list, or the text for a shell."""
    with suppress(TypeError, ValueError):
        if not isinstance(words, (str, bytes)):
            words = b" ".join(map(os.fsencode, words))
        return bool(INSTALLER.search(os.fsdecode(words)))
    return False


class Watch:
    """Logs the late actions of this process. `process` is its number: its own forks log nothing."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.logged: set[str] = set()
        self.before = set(sys.modules)
        self.handlers: dict[str, Callable[..., None]] = {
            "os.putenv": self.variable,
            "os.unsetenv": self.variable,
            "subprocess.Popen": self.program,
            "os.posix_spawn": self.program,
            "os.exec": self.program,
            "os.system": self.program,
            "import": self.module,
        }

    def begin(self) -> None:
        """Watch from now on. `sys.path` has the program's folder already."""
        self.search_path = list(sys.path)
        handlers = self.handlers

        def hook(event: str, args: tuple[Any, ...]) -> None:
            handler = handlers.get(event)
            if handler:
                # An error here must not end the program.
                with suppress(Exception):
                    handler(*args)

        sys.addaudithook(hook)

    def log(self, what: str, advice: str = ADVICE) -> None:
        if what not in self.logged and os.getpid() == self.process:
            self.logged.add(what)
            line = f"{NOTICE}fast start: {what}; {advice}\n"
            os.write(2, line.encode(errors="replace"))

    def variable(self, key: str | bytes, value: object = None) -> None:
        name = os.fsdecode(key)
        is_late = LATE.match(name) or ALLOCATOR.match(name)
        if is_late or not EARLY.match(name):
            return
        if COMPILER.match(name) or not self.has_torch():
            what = f"the program sets {name}, which was read before it began"
            self.log(what, f"set it in spec.env, or {ADVICE}")

    def has_torch(self) -> bool:
        """Return True if a module of the program has imported something of torch."""
        names = set(sys.modules) - self.before
        for name in ("__main__", *names):
            # An object in place of a module may have no variables.
            variables = getattr(sys.modules[name], "__dict__", {})
            if any(map(is_of_torch, list(variables.values()))):
                return True
        return False

    def program(self, *words: Any) -> None:
        """Look at the words of a started program: after its path, or of a shell."""
        if any(map(is_installer, words[:2])):
            self.install()

    def install(self) -> None:
        self.log(
            "the program installs packages; those that were imported before it began, such as "
            "numpy, stay as they were"
        )

    def module(self, name: str, *_: object) -> None:
        """Look at an import: of pip, or after folders were added to the search path."""
        if top_level(name) == "pip":
            self.install()
        if sys.path == self.search_path:
            return
        known = self.search_path
        self.search_path = list(sys.path)
        for folder in self.search_path:
            # It may be no folder, or no text.
            with suppress(OSError, TypeError, ValueError):
                if folder not in known:
                    self.look_at(folder)

    def look_at(self, folder: str) -> None:
        for name in hidden_modules(folder):
            self.log(f"{folder} has {name}, which was imported before it began")


def is_of_torch(value: object) -> bool:
    name: object = ""
    if isinstance(value, ModuleType):
        name = vars(value).get("__name__")
    elif isinstance(value, (type, FunctionType)):
        name = value.__module__
    return top_level(str(name)) == "torch"
