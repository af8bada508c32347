"""Each path of the status in a document, a column or a message is in the schema."""

import json
import re
from pathlib import Path

import pytest

from ddpjob.core.api.parts import schema
from ddpjob.core.api.status import Status
from ddpjob.core.api.yaml_text import load_yaml

ROOT = Path(__file__).parents[2]
STATUS = schema(Status)
CRD = ROOT / "charts/ddpjob-operator/files/crd.yaml"
(VERSION,) = load_yaml(CRD.read_text())["spec"]["versions"]

# A path in a text: `status.attempt.number`, {.status.result}, .status.nodes.active.
# A function of CEL is no field, such as in `status.conditions.exists(…)`.
PATH = re.compile(r"\bstatus\.((?:[a-z]\w*)(?:(?:\[\d*\])?\.[a-z]\w*\b(?!\())*)")

# Paths outside a DDPJob.
OTHERS = {
    "allocatable": "the resources of a Kubernetes node",
    "py": "the module with the declaration",
    "yaml": "the file of a local run",
}
FOLDERS = ("docs", "charts", "examples", "release")
SUFFIXES = {".md", ".yaml", ".json", ".txt", ".tpl", ".py"}


def texts():
    """Return the files that may name a field of the status."""
    found = [ROOT / "README.md", ROOT / "operator/ddpjob/core/api/reasons.py"]
    for folder in FOLDERS:
        found += (ROOT / folder).rglob("*")
    return [path for path in found if path.suffix in SUFFIXES and path != CRD]


def paths_in(text):
    for path in PATH.findall(text):
        if not any(path == other or path.startswith(f"{other}.") for other in OTHERS):
            yield path


NAMED = sorted(
    {(str(path.relative_to(ROOT)), name) for path in texts() for name in paths_in(path.read_text())}
)


def field_at(path):
    """Return the schema of a field. Fails if there is none."""
    described = STATUS
    for name in re.sub(r"\[\d*\]", "", path).split("."):
        described = described.get("items", described)
        properties = described.get("properties", {})
        if "additionalProperties" in described:
            return described["additionalProperties"]
        assert name in properties, f"status.{path}: no field {name}"
        described = properties[name]
    return described


def test_paths_are_found():
    names = {name for _, name in NAMED}
    assert {"lastFailure", "nodes.active", "account", "attempt.number"} <= names


@pytest.mark.parametrize(("path", "name"), NAMED, ids=str)
def test_a_path_in_a_text_is_a_field(path, name):
    field_at(name)


COLUMNS = {
    column["name"]: column
    for column in VERSION["additionalPrinterColumns"]
    if column["jsonPath"].startswith(".status.")
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_is_a_field_of_its_type(name):
    column = COLUMNS[name]
    assert field_at(column["jsonPath"].removeprefix(".status."))["type"] == column["type"]


def test_the_scale_subresource_reads_fields_of_its_types():
    scale = VERSION["subresources"]["scale"]
    of_status = {key: path for key, path in scale.items() if path.startswith(".status.")}
    types = {
        key: field_at(path.removeprefix(".status."))["type"] for key, path in of_status.items()
    }
    assert types == {"statusReplicasPath": "integer", "labelSelectorPath": "string"}


def test_the_crd_has_the_schema_of_the_status():
    described = VERSION["schema"]["openAPIV3Schema"]["properties"]["status"]
    assert described == {"description": described["description"], **STATUS}


def test_kubectl_explain_shows_about_twenty_fields_and_each_has_a_description():
    assert len(STATUS["properties"]) <= 22
    text = json.dumps(STATUS)
    assert text.count('"description"') > 80
    assert '"description": ""' not in text
