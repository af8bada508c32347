"""`from ddp_trainer import …`: each name, at any time, and torch only when it is needed."""

import ast
import gc
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ddp_trainer
from ddp_trainer.cli import main
from ddp_trainer.moved import MOVED


def names_for_type_checkers():
    """Return the names imported by the package under TYPE_CHECKING, with their modules."""
    tree = ast.parse(Path(ddp_trainer.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: statement.module.removeprefix("ddp_trainer.")
        for statement in block.body
        if statement.module != "typing"
        for alias in statement.names
    }


def test_type_checkers_see_the_names_that_can_be_imported():
    assert names_for_type_checkers() == ddp_trainer.MODULES


@pytest.mark.parametrize("name", ddp_trainer.MODULES)
def test_a_name_is_that_of_its_module(name):
    home = import_module(f"ddp_trainer.{ddp_trainer.MODULES[name]}")
    assert getattr(ddp_trainer, name) is getattr(home, name)
    assert name in dir(ddp_trainer)


def test_another_name_is_an_error():
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from ddp_trainer import nothing  # noqa: F401


@pytest.mark.parametrize("name", sorted(set(MOVED) - {"process_group"}))
def test_a_former_path_is_that_of_the_same_module(name):
    module = import_module(f"ddp_trainer.{MOVED[name]}")
    assert import_module(f"ddp_trainer.{name}") is module
    assert module.__spec__.name == module.__name__ == f"ddp_trainer.{MOVED[name]}"


def test_former_paths_work_in_every_form_of_import():
    script = """
from ddp_trainer import checkpoint_folder, runtime
import ddp_trainer.sampler as sampler
import ddp_trainer.group
from ddp_trainer.checkpoint_parts import PerRank
from ddp_trainer import GlobalBatchSampler, Runtime, attach
assert ddp_trainer.group.attach is attach and runtime.Runtime is Runtime
assert sampler.GlobalBatchSampler is GlobalBatchSampler
assert checkpoint_folder.__name__ == "ddp_trainer.checkpoint.folder"
assert PerRank.__module__ == "ddp_trainer.checkpoint.parts"
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_checkpoints_can_be_imported_from_their_package():
    from ddp_trainer.checkpoint import Checkpoints

    assert Checkpoints is ddp_trainer.Checkpoints
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from ddp_trainer.checkpoint import nothing  # noqa: F401


def test_process_group_is_the_function_also_after_an_import_of_its_former_module():
    from ddp_trainer.process_group import process_group as former

    from ddp_trainer.ranks.group import process_group

    module = import_module("ddp_trainer.process_group")
    assert ddp_trainer.process_group is former is module.process_group is process_group


@pytest.mark.parametrize("name", ["nothing", "claim", "ranks.sampler", "sampler.nothing"])
def test_another_path_is_an_error(name):
    with pytest.raises(ModuleNotFoundError, match=f"No module named 'ddp_trainer.{name}'"):
        import_module(f"ddp_trainer.{name}")


def test_the_package_itself_imports_neither_torch_nor_numpy():
    script = "import sys, ddp_trainer; from ddp_trainer import SlowRankError, UserError\n"
    script += "print(sys.modules.keys() & {'torch', 'numpy'})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout == "set()\n", run.stderr


def test_the_sampler_does_not_import_torch():
    script = "import sys; from ddp_trainer import GlobalBatchSampler\nprint('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout == "False\n", run.stderr


def test_garbage_is_searched_again_after_the_imports_of_a_workload(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    imported = [[]]
    with main._fast_imports():
        imported.append(imported)
        assert not gc.isenabled()
    assert gc.isenabled()
    assert not any(each is imported for each in gc.get_objects())
