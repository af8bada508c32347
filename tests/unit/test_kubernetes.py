"""The supported versions of Kubernetes are the same in all places."""

import re
from pathlib import Path

import pytest
import yaml

from ddpjob.core.kubernetes import NEWEST, OLDEST, advice_on_version

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "ddpjob-operator"

# Where users read what they need, and which version each sentence names.
NEEDED = re.compile(r"Kubernetes (1\.\d+) or newer")
TESTED = re.compile(r"tested on Kubernetes (1\.\d+)")
PAGES = ("README.md", "charts/ddpjob-operator/README.md")


def test_the_chart_refuses_an_older_cluster():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_the_supported_versions(page):
    text = (ROOT / page).read_text()
    assert set(NEEDED.findall(text)) == {OLDEST}
    assert set(TESTED.findall(text)) == {NEWEST}


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        ("v1.28.9", f"upgrade the cluster: ddpjob needs Kubernetes {OLDEST} or newer"),
        (f"v{OLDEST}.0-eks-1", ""),
        (f"v{NEWEST}.2", ""),
        ("v1.99.0", f"tested up to Kubernetes {NEWEST}"),
        ("unknown", ""),
    ],
)
def test_doctor_has_advice_for_other_versions(version, advice):
    found = advice_on_version(version)
    assert advice in found
    assert bool(found) == bool(advice)
