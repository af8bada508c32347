"""The supported versions of Kubernetes are the same in all places."""

import re
from pathlib import Path

import pytest

from ddpjob.core.api.kubernetes import (
    NEWEST,
    OLDEST,
    advice_on_version,
    is_shape_of_pods,
    note_on_version,
)
from ddpjob.core.api.yaml_text import load_yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "ddpjob-operator"

# The sentences for users with the required and the tested versions, and the pages with them.
NEEDED = re.compile(r"Kubernetes (1\.\d+) or newer")
TESTED = re.compile(r"tested on Kubernetes (1\.\d+)")
PAGES = ("README.md", "charts/ddpjob-operator/README.md")


def test_the_chart_refuses_an_older_cluster():
    chart = load_yaml((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"


@pytest.mark.parametrize("page", ["queues", "gangs"])
def test_a_page_names_the_version_of_its_trials(page):
    text = (ROOT / "docs" / "users" / f"{page}.md").read_text()
    assert set(re.findall(r"(?:[Tt]ested|Tried) [^\n]*Kubernetes (1\.\d+)", text)) == {NEWEST}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_the_supported_versions(page):
    text = (ROOT / page).read_text()
    assert set(NEEDED.findall(text)) == {OLDEST}
    assert set(TESTED.findall(text)) == {NEWEST}


def test_the_workflow_has_the_newest_api_server():
    text = (ROOT / ".github" / "workflows" / "test.yaml").read_text()
    assert set(re.findall(r"envtest-v(1\.\d+)\.", text)) == {NEWEST}


@pytest.mark.parametrize(
    ("version", "advice", "note"),
    [
        ("v1.28.9", f"upgrade the cluster: ddpjob needs Kubernetes {OLDEST} or newer", ""),
        (f"v{OLDEST}.0-eks-1", "", ""),
        (f"v{NEWEST}.2", "", ""),
        ("v1.99.0", "", f"; ddpjob was tested up to Kubernetes {NEWEST}"),
        ("unknown", "", ""),
    ],
)
def test_doctor_says_what_to_do_about_other_versions(version, advice, note):
    assert (advice_on_version(version), note_on_version(version)) == (advice, note)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("spec.podTemplate.spec.x", True),
        ("spec.volumes[0].x", True),
        ("spec.podTemplate.x", False),
        ("spec.environment", False),
    ],
)
def test_only_fields_below_a_pods_shape_are_kubernetes_own(path, expected):
    assert is_shape_of_pods(path) == expected
