"""`ddpjob render`: the objects of a job's first attempt."""

import pytest
from typer.testing import CliRunner

from ddpjob.cli.main import app
from ddpjob.core.api.yaml_text import load_all_yaml

JOB = """
apiVersion: ddpjob.dev/v1alpha1
kind: DDPJob
metadata: {name: j}
spec: {image: i, args: [a], nodes: 2}
"""


def render(*words, manifest=JOB):
    return CliRunner().invoke(app, ["render", "-", *words], input=manifest)


def test_the_service_and_the_pods_are_printed():
    objects = list(load_all_yaml(render().stdout))
    found = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert found == [("Service", "j"), ("Pod", "j-0-0"), ("Pod", "j-0-1")]


def test_one_pod_with_the_level_restricted():
    words = ("--node", "1", "--pod-security", "restricted", "--set", "spec.suspend=true")
    _, pod = load_all_yaml(render(*words).stdout)
    assert pod["metadata"]["name"] == "j-0-1"
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--node", "2"), "--node 2: job j has 2 nodes, from 0 on"),
        (("--set", "spec.nodes=0"), "spec.nodes: must be an integer from 1 to 1000, got 0"),
    ],
)
def test_what_cannot_be_rendered_is_a_sentence(words, message):
    refused = render(*words)
    assert (refused.exit_code, message in refused.stderr) == (2, True)
