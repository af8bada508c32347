"""The example notebook, executed from its first cell to its last as Jupyter does."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.fixture
def executed(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=180, resources=resources).execute()
    return notebook


def test_the_notebook_trains_shows_and_cleans_up(executed, tmp_path):
    outputs = [output for cell in executed.cells for output in cell.get("outputs", ())]
    texts = " ".join(str(output.get("text", "")) for output in outputs)
    shown = [output["data"] for output in outputs if "data" in output]
    # A misspelt field is refused, the job completes, and its curves are a picture.
    assert "spec.node: unknown field (did you mean 'nodes'?)" in texts
    assert any("Complete" in data.get("text/html", "") for data in shown)
    assert any("accuracy" in data.get("text/plain", "") for data in shown)
    assert any("image/png" in data for data in shown)
    assert "at step 138" in texts
    # Only the folder of what was submitted is left.
    left = [path.name for path in (tmp_path / "ddpjob-runs").iterdir()]
    assert sorted(left) == [".submitted", "digits"]
    assert [path.name for path in (tmp_path / "ddpjob-runs" / "digits").iterdir()] == []


def test_the_notebook_has_no_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")]
