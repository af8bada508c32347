"""The layers of the operator and of the trainer: which package may import which.

The docstring of each package has a sentence such as "May import `kube` and `core.api`." The tests
compare it with the imports of its modules. `core` stands for all packages of the core. The
modules directly in `core/` and in `ddp_trainer/` count as packages. The trainer and the operator do
not import each other.
"""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPERATOR = ROOT / "operator" / "ddpjob"
TRAINER = ROOT / "trainer" / "ddp_trainer"

# Modules with a docstring for users, and their permitted imports: the public names of each package,
# and `python -m ddp_trainer`.
FACES = {
    "ddpjob.__init__": {"client", "jobs"},
    "ddp_trainer.__init__": {"checkpoint", "data", "errors", "moved", "ranks", "run"},
    "ddp_trainer.__main__": {"cli"},
}

# The agent travels into pods without the rest of ddpjob.
AGENT = "ddpjob.agent"

# What scripts use of the trainer. The command line and the workloads are above it.
LIBRARY = {
    f"ddp_trainer.{name}" for name in ("errors", "files", "ranks", "data", "checkpoint", "run")
}

# "May import no other package." has no name.
PERMISSION = re.compile(r"\bMay import (.*?)\.(?:\s|$)", re.DOTALL)
NAME = re.compile(r"`([\w.]+)`")

# Packages for the layer `controller` alone, and packages for requests to an API server: `kube` may
# import these too.
CONTROLLER_PACKAGES = {"kopf", "prometheus_client", "pythonjsonlogger"}
KUBERNETES_PACKAGES = {"kubernetes", "aiohttp"}

# Packages of the extras. They are missing if only `ddpjob` is installed.
EXTRA_PACKAGES = (
    "kopf",
    "prometheus_client",
    "psutil",
    "matplotlib",
    "starlette",
    "uvicorn",
)

# Packages without input, output and clocks.
PURE = ("core", "jobs", "convert")

# Modules without input, output and clocks (`datetime` is checked by the calls), and the packages
# for declarations and rendering.
CORE_MODULES = {
    "abc",
    "ast",
    "collections",
    "contextlib",
    "copy",
    "dataclasses",
    "datetime",
    "hashlib",
    "heapq",
    "difflib",
    "enum",
    "functools",
    "importlib",
    "itertools",
    "json",
    "math",
    "operator",
    "posixpath",
    "re",
    "shlex",
    "typing",
    "jinja2",
    "pydantic",
    "yaml",
}

# What people read has HTML, and what they write may get a random name, or have a path.
JOBS_MODULES = {"html", "pathlib", "secrets"}

# Calls to read a clock, or to read or write something.
CLOCKS = {"now", "utcnow", "today", "time", "monotonic"}
INPUT_AND_OUTPUT = {"open", "print", "input", "exec", "eval"}

KUBERNETES_WORDS = re.compile(r"kubernetes|kubectl|kopf|\bk8s\b|\bpods?\b", re.IGNORECASE)


def modules(folder):
    return sorted(folder.rglob("*.py"))


@cache
def imports_of(path):
    """Return the absolute dotted names of a module's imports, also within functions."""
    package = path.relative_to(ROOT).with_suffix("").parts[1:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # A relative import begins at the module's own package.
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*base, node.module] if node.module else base)
            found.add(module)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def package_of(parts):
    """Return the package of a module, such as `ddpjob.kube`, `ddpjob.core.api` or `….plan`."""
    inside = (("ddpjob", "core"), ("ddpjob", "cli", "commands"))
    has_packages = any(tuple(parts[: len(names)]) == names for names in inside)
    return ".".join(parts[: 3 if has_packages else 2])


@cache
def own_package(path):
    return package_of(path.relative_to(ROOT).with_suffix("").parts[1:])


def packages_in(imported):
    """Return the packages among imported names."""
    return {package_of(tuple(name.split("."))) for name in imported} & PACKAGES


@cache
def docstring_of(package):
    distribution, *parts = package.split(".")
    folder = DISTRIBUTIONS[distribution].joinpath(*parts)
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    return ast.get_docstring(ast.parse(path.read_text())) or ""


@cache
def permissions(package):
    """Return the packages in the docstring's sentence."""
    permission = PERMISSION.search(docstring_of(package))
    names = NAME.findall(permission[1]) if permission else []
    distribution = package.partition(".")[0]
    return {f"{distribution}.{name}" for name in FACES.get(package, names)}


def may_import(package):
    names = permissions(package)
    return names - {ALL_OF_CORE} | CORE if ALL_OF_CORE in names else names


def packages_of(imported):
    return {name.split(".")[0] for name in imported}


def path_name(path):
    return str(path.relative_to(ROOT))


DISTRIBUTIONS = {"ddpjob": OPERATOR, "ddp_trainer": TRAINER}
MODULES = [path for folder in DISTRIBUTIONS.values() for path in modules(folder)]
ALL_OF_CORE = "ddpjob.core"
PACKAGES = {own_package(path) for path in MODULES} - {f"{ALL_OF_CORE}.__init__"}
CORE = {package for package in PACKAGES if package.startswith(f"{ALL_OF_CORE}.")}
PURE_MODULES = [path for layer in PURE for path in modules(OPERATOR / layer)]


@pytest.mark.parametrize("package", sorted(PACKAGES - {*FACES, AGENT}))
def test_a_package_says_what_it_may_import(package):
    assert PERMISSION.search(docstring_of(package))
    assert may_import(package) <= PACKAGES - {package, *FACES, AGENT}


@pytest.mark.parametrize("path", MODULES, ids=path_name)
def test_a_module_imports_only_what_its_package_may(path):
    package = own_package(path)
    forbidden = packages_in(imports_of(path)) - {package} - may_import(package)
    assert not forbidden, f"{package} must not import {forbidden}"


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_needs_what_it_may_import(package):
    paths = [path for path in MODULES if own_package(path) == package]
    imported = {name for path in paths for name in packages_in(imports_of(path))}
    if imported & CORE:
        imported.add(ALL_OF_CORE)
    assert permissions(package) <= imported


@pytest.mark.parametrize("package", sorted(CORE))
def test_a_package_of_the_core_imports_only_the_core(package):
    assert may_import(package) <= CORE


@pytest.mark.parametrize("package", sorted(LIBRARY))
def test_a_package_of_the_library_imports_only_the_library(package):
    assert may_import(package) <= LIBRARY


def test_no_two_packages_may_import_each_other():
    order = TopologicalSorter({package: may_import(package) for package in PACKAGES})
    # Raises CycleError with the names of the packages.
    order.prepare()


def test_no_two_modules_import_each_other():
    names = {}
    for path in MODULES:
        # The faces import a module when it is used.
        if own_package(path) not in FACES:
            parts = path.relative_to(ROOT).with_suffix("").parts[1:]
            names[".".join(part for part in parts if part != "__init__")] = path
    order = TopologicalSorter(
        {name: (imports_of(path) & set(names)) - {name} for name, path in names.items()}
    )
    order.prepare()


@pytest.mark.parametrize("layer", PURE)
def test_importing_a_pure_package_imports_nothing_else(layer):
    for path in (OPERATOR / layer).rglob("__init__.py"):
        (docstring,) = ast.parse(path.read_text()).body
        assert isinstance(docstring, ast.Expr), f"{path} has more than its docstring"


@pytest.mark.parametrize("path", modules(OPERATOR), ids=path_name)
def test_only_two_layers_know_kopf_and_the_kubernetes_client(path):
    layer = path.relative_to(OPERATOR).parts[0]
    packages = packages_of(imports_of(path))
    if layer != "controller":
        assert not packages & CONTROLLER_PACKAGES
    if layer not in ("controller", "kube"):
        assert not packages & KUBERNETES_PACKAGES


@pytest.mark.parametrize("path", PURE_MODULES, ids=path_name)
def test_a_pure_package_imports_no_module_with_input_or_output(path):
    allowed = CORE_MODULES | (JOBS_MODULES if own_package(path) == "ddpjob.jobs" else set())
    assert packages_of(imports_of(path)) <= allowed | {"ddpjob"}


@pytest.mark.parametrize("path", PURE_MODULES, ids=path_name)
def test_a_pure_package_reads_no_clock_and_opens_no_file(path):
    called = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called.add(ast.unparse(node.func))
    assert not {name for name in called if name.split(".")[-1] in CLOCKS}
    assert not called & INPUT_AND_OUTPUT


@pytest.mark.parametrize("path", modules(TRAINER), ids=path_name)
def test_the_trainer_does_not_import_the_operator(path):
    assert "ddpjob" not in packages_of(imports_of(path))


@pytest.mark.parametrize("path", modules(TRAINER), ids=path_name)
def test_the_trainer_imports_a_name_from_its_module(path):
    # `from ddp_trainer import Checkpoints` does not show the imported package.
    assert "ddp_trainer" not in imports_of(path)


@pytest.mark.parametrize("path", modules(TRAINER), ids=path_name)
def test_the_trainer_does_not_mention_kubernetes(path):
    text = path.read_text()
    assert not [line for line in text.splitlines() if KUBERNETES_WORDS.search(line)]


def test_the_folder_of_the_operator_is_no_package():
    # A package named `operator` would shadow the module of the standard library.
    assert not (ROOT / "operator" / "__init__.py").exists()


QUICK_HELP = """
import sys
from contextlib import suppress
from ddpjob.cli.main import app
with suppress(SystemExit):
    app({words})
sys.stderr.write(" ".join(sys.modules))
"""

# What `ddpjob submit` imports once it works: its help would take a quarter longer.
LATE_IN_SUBMIT = {
    "asyncio",
    "ddpjob.sources.code",
    "ddpjob.client.logs",
    "ddpjob.core.api.spec",
    "ddpjob.core.api.status",
    "ddpjob.show.display",
    "rich.progress",
}

ALL_COMMANDS = """
import sys
from ddpjob.cli.main import COMMANDS, load
for commands in COMMANDS.values():
    for name in commands:
        load(name)
sys.stderr.write(" ".join(sys.modules))
"""


def imported_by(program):
    """Run a program in a new Python, and return the imported modules."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_imports_no_command_and_no_slow_package():
    imported = imported_by(QUICK_HELP.format(words=["--help"]))
    assert {name for name in imported if name.startswith("ddpjob")} == {
        "ddpjob",
        "ddpjob.cli",
        "ddpjob.cli.main",
        "ddpjob.cli.usage",
    }
    assert not imported & {*KUBERNETES_PACKAGES, *EXTRA_PACKAGES, "pydantic", "yaml", "jinja2"}


def test_the_help_of_submit_imports_little_of_its_work():
    imported = imported_by(QUICK_HELP.format(words=["submit", "--help"]))
    assert "ddpjob.cli.commands.submit" in imported
    assert not imported & LATE_IN_SUBMIT


def test_a_command_imports_no_client_and_no_extra_before_it_runs():
    imported = imported_by(ALL_COMMANDS)
    assert "ddpjob.client.async_client" not in imported
    assert not imported & {*KUBERNETES_PACKAGES, *EXTRA_PACKAGES}


BARE = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
from ddpjob.cli.main import app
words = " ".join(sys.argv[2:])
codes = []
# The commands are separated by a semicolon: a new Python for each would take longer.
for command in words.split(";"):
    try:
        app(command.split())
    except SystemExit as end:
        codes.append(end.code or 0)
sys.exit(max(codes, default=0))
"""


def run_bare(*words, stdin=""):
    """Run a command where no extra is installed."""
    missing = ",".join(EXTRA_PACKAGES)
    return subprocess.run(
        [sys.executable, "-c", BARE, missing, *words],
        capture_output=True,
        text=True,
        input=stdin,
        env={**os.environ, "KUBECONFIG": "/nowhere"},
    )


MANIFEST = """
apiVersion: ddpjob.dev/v1alpha1
kind: DDPJob
metadata: {name: j}
spec: {image: i, args: [a]}
"""


def test_commands_for_a_cluster_need_no_extra():
    commands = "list; status j; logs j; wait j; suspend j; scale j 2; restart j; delete j"
    done = run_bare(commands)
    assert done.stderr.count("no cluster is configured") == commands.count(";") + 1, done.stderr
    assert done.returncode == 2


def test_submit_validate_and_render_need_no_extra():
    done = run_bare("submit", "-", stdin=MANIFEST)
    assert "no cluster is configured" in done.stderr
    assert "ok, recovery" in run_bare("validate", "-", stdin=MANIFEST).stdout
    assert "kind: Pod" in run_bare("render", "-", stdin=MANIFEST).stdout


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("operator", "controller"),
        ("run --local job.yaml", "local"),
        ("plot -", "local"),
        ("ui", "ui"),
    ],
)
def test_a_command_whose_extra_is_missing_names_it(words, extra):
    line = '{"event": "train", "step": 1, "loss": 1.0}\n'
    done = run_bare(*words.split(), stdin=line * 2)
    assert done.returncode == 2
    assert f"pip install 'ddpjob[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
