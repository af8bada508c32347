"""`from ddp_trainer import …`: each name, at any time, and torch only when it is needed."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ddp_trainer


def names_for_type_checkers():
    """Return the names that the package imports if TYPE_CHECKING is set, with their modules."""
    tree = ast.parse(Path(ddp_trainer.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: statement.module.removeprefix("ddp_trainer.")
        for statement in block.body
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


def test_process_group_is_the_function_also_after_an_import_of_its_former_module():
    from ddp_trainer.group import process_group
    from ddp_trainer.process_group import process_group as former

    module = import_module("ddp_trainer.process_group")
    assert ddp_trainer.process_group is former is module.process_group is process_group


def test_the_package_itself_does_not_import_torch():
    script = "import sys, ddp_trainer; from ddp_trainer import GlobalBatchSampler, UserError\n"
    script += "print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout == "False\n", run.stderr
