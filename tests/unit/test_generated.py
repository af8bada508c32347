"""The generated files, and the generated parts of other files, are what `make generate` writes."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = runpy.run_path(str(ROOT / "release" / "generate.py"))["FILES"]


@pytest.mark.parametrize("path", FILES)
def test_a_file_is_what_its_source_gives(path):
    assert (ROOT / path).read_text() == FILES[path](), "run make generate"
