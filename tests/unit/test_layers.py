"""The arrows of the house: cli → controller, local, core; controller, local → core; core and the trainer → nothing."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPERATOR, TRAINER = ROOT / "operator" / "ddpjob", ROOT / "trainer" / "ddp_trainer"

MAY_IMPORT = {
    "core": set(),
    "controller": {"core"},
    "local": {"core"},
    "cli": {"controller", "local", "core"},
}
OF_THE_CONTROLLER = {"kopf", "kubernetes", "aiohttp", "prometheus_client", "pythonjsonlogger"}
CORE_MAY_USE = {
    "abc collections contextlib dataclasses datetime enum functools importlib itertools json math re typing",
    "jinja2 yaml",
}
KUBERNETES_WORDS = re.compile(r"kubernetes|kubectl|kopf|\bk8s\b|\bpods?\b", re.IGNORECASE)


def modules(folder):
    return sorted(folder.rglob("*.py"))


def imports_of(path):
    """Absolute dotted names that a module imports, also within functions; relative ones are resolved."""
    package = path.relative_to(ROOT).with_suffix("").parts[1:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def rooms_of(imported):
    return {
        parts[1]
        for parts in (name.split(".") for name in imported)
        if parts[0] == "ddpjob" and len(parts) > 1
    }


def tops_of(imported):
    return {name.split(".")[0] for name in imported}


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", modules(OPERATOR), ids=name_of)
def test_arrows_point_one_way(path):
    room = path.relative_to(OPERATOR).parts[0]
    foreign = rooms_of(imports_of(path)) - {room}
    allowed = MAY_IMPORT.get(room, set())
    assert not (foreign & set(MAY_IMPORT)) - allowed, f"{room} must not import {foreign - allowed}"


@pytest.mark.parametrize("path", modules(OPERATOR), ids=name_of)
def test_only_the_controller_knows_kopf_and_the_kubernetes_client(path):
    if path.relative_to(OPERATOR).parts[0] != "controller":
        assert not tops_of(imports_of(path)) & OF_THE_CONTROLLER


@pytest.mark.parametrize("path", modules(OPERATOR / "core"), ids=name_of)
def test_the_core_imports_nothing_that_acts(path):
    allowed = set(" ".join(CORE_MAY_USE).split()) | {"ddpjob"}
    assert tops_of(imports_of(path)) <= allowed


@pytest.mark.parametrize("path", modules(OPERATOR / "core"), ids=name_of)
def test_the_core_asks_no_clock_and_opens_no_file(path):
    called = {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    clocks = {"now", "utcnow", "today", "time", "monotonic"}
    assert not {name for name in called if name.split(".")[-1] in clocks}
    assert not called & {"open", "print", "input", "exec", "eval"}


@pytest.mark.parametrize("path", modules(TRAINER), ids=name_of)
def test_the_trainer_imports_nothing_of_the_operator(path):
    assert "ddpjob" not in tops_of(imports_of(path))


@pytest.mark.parametrize("path", modules(TRAINER), ids=name_of)
def test_the_trainer_has_not_one_word_of_kubernetes(path):
    text = path.read_text().replace("not one word of Kubernetes", "")
    assert not [line for line in text.splitlines() if KUBERNETES_WORDS.search(line)]


def test_the_folder_of_the_operator_is_no_package():
    """A package named operator would shadow the standard library's."""
    assert not (ROOT / "operator" / "__init__.py").exists()
