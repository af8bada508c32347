"""The layers: cli → ui, controller, client, local, show; ui → client; controller, client → kube.

All of them may import core. The trainer and the operator do not import each other. The lists below
say what else a layer may import.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPERATOR = ROOT / "operator" / "ddpjob"
TRAINER = ROOT / "trainer" / "ddp_trainer"

# The layers of the operator, each with those that it may import.
MAY_IMPORT = {
    "core": set(),
    # The names that programs import.
    "__init__.py": {"client", "core"},
    "kube": {"core"},
    "controller": {"kube", "core"},
    "client": {"kube", "local", "show", "core"},
    "local": {"core"},
    "show": {"core"},
    "ui": {"client", "show", "core"},
    "cli": {"ui", "controller", "client", "kube", "local", "show", "core"},
}

# Packages of the operator alone, and those for requests to an API server, with the layers that know
# them.
CONTROLLER_PACKAGES = {"kopf", "prometheus_client", "pythonjsonlogger"}
KUBERNETES_PACKAGES = {"kubernetes", "aiohttp"}

# Packages of the extras, which are missing where only `ddpjob` is installed.
EXTRA_PACKAGES = (
    "kopf",
    "prometheus_client",
    "psutil",
    "matplotlib",
    "plotext",
    "celpy",
    "starlette",
    "uvicorn",
    "jsonschema",
)

# Modules without input, output and clocks (`datetime` is checked by the calls), and the two
# packages that rendering needs.
CORE_MODULES = {
    "abc",
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
    "html",
    "importlib",
    "itertools",
    "json",
    "math",
    "re",
    "secrets",
    "typing",
    "jinja2",
    "yaml",
}

# Calls that read a clock, or that read or write something.
CLOCKS = {"now", "utcnow", "today", "time", "monotonic"}
INPUT_AND_OUTPUT = {"open", "print", "input", "exec", "eval"}

KUBERNETES_WORDS = re.compile(r"kubernetes|kubectl|kopf|\bk8s\b|\bpods?\b", re.IGNORECASE)


def modules(folder):
    return sorted(folder.rglob("*.py"))


def imports_of(path):
    """Return the absolute dotted names that a module imports, also within functions."""
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
    return found


def layers_of(imported):
    """Return the layers of the operator among imported names."""
    found = set()
    for name in imported:
        parts = name.split(".")
        if parts[0] == "ddpjob" and len(parts) > 1:
            found.add(parts[1])
    return found


def packages_of(imported):
    return {name.split(".")[0] for name in imported}


def path_name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", modules(OPERATOR), ids=path_name)
def test_a_layer_imports_only_those_below_it(path):
    layer = path.relative_to(OPERATOR).parts[0]
    others = layers_of(imports_of(path)) - {layer}
    allowed = MAY_IMPORT.get(layer, set())
    forbidden = (others & set(MAY_IMPORT)) - allowed
    assert not forbidden, f"{layer} must not import {forbidden}"


@pytest.mark.parametrize("path", modules(OPERATOR), ids=path_name)
def test_only_two_layers_know_kopf_and_the_kubernetes_client(path):
    layer = path.relative_to(OPERATOR).parts[0]
    packages = packages_of(imports_of(path))
    if layer != "controller":
        assert not packages & CONTROLLER_PACKAGES
    if layer not in ("controller", "kube"):
        assert not packages & KUBERNETES_PACKAGES


@pytest.mark.parametrize("path", modules(OPERATOR / "core"), ids=path_name)
def test_the_core_imports_no_module_with_input_or_output(path):
    assert packages_of(imports_of(path)) <= CORE_MODULES | {"ddpjob"}


@pytest.mark.parametrize("path", modules(OPERATOR / "core"), ids=path_name)
def test_the_core_reads_no_clock_and_opens_no_file(path):
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
def test_the_trainer_does_not_mention_kubernetes(path):
    text = path.read_text()
    assert not [line for line in text.splitlines() if KUBERNETES_WORDS.search(line)]


def test_the_folder_of_the_operator_is_no_package():
    # A package named `operator` would shadow the module of the standard library.
    assert not (ROOT / "operator" / "__init__.py").exists()


BARE = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
from ddpjob.cli.main import app
app(sys.argv[2:])
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


@pytest.mark.parametrize(
    "words",
    ["list", "status j", "logs j", "wait j", "suspend j", "scale j 2", "restart j", "delete j"],
)
def test_commands_for_a_cluster_need_no_extra(words):
    done = run_bare(*words.split())
    assert (done.returncode, "no cluster is configured" in done.stderr) == (2, True), done.stderr


def test_submit_and_render_need_no_extra():
    done = run_bare("submit", "-", stdin=MANIFEST)
    assert "no cluster is configured" in done.stderr
    assert "kind: Pod" in run_bare("render", "-", stdin=MANIFEST).stdout


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("operator", "controller"),
        ("validate -", "validate"),
        ("run --local job.yaml", "local"),
        ("plot -", "local"),
        ("ui", "ui"),
    ],
)
def test_a_command_whose_extra_is_missing_names_it(words, extra):
    line = '{"event": "train", "step": 1, "loss": 1.0}\n'
    done = run_bare(*words.split(), stdin=MANIFEST if "validate" in words else line * 2)
    assert done.returncode == 2
    assert f"pip install 'ddpjob[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
