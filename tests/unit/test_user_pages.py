"""The pages for users of frameworks and trackers: their manifests, and what they say is refused."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ddpjob.cli.main import app
from ddpjob.client.networks import find_gaps
from ddpjob.core.api.yaml_text import load_yaml

USERS = Path(__file__).parents[2] / "docs" / "users"
PAGES = ("frameworks", "tracking")


def blocks(page, language="yaml"):
    text = (USERS / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def of_kind(page, kind):
    return [found for found in map(yaml.safe_load, blocks(page)) if found["kind"] == kind]


def validate(job, folder):
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return CliRunner().invoke(app, ["validate", str(file)])


@pytest.mark.parametrize("page", PAGES)
def test_a_job_on_a_page_is_valid(page, tmp_path):
    jobs = of_kind(page, "DDPJob")
    assert jobs
    for job in jobs:
        done = validate(job, tmp_path)
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize("launcher", ["accelerate launch", "deepspeed", "torchrun"])
def test_a_launcher_in_args_is_refused(launcher, tmp_path):
    (job,) = of_kind("frameworks", "DDPJob")
    job["spec"]["args"] = [*launcher.split(), "train.py"]
    done = validate(job, tmp_path)
    assert done.exit_code != 0
    assert "since the operator starts torchrun itself" in done.output


@pytest.mark.parametrize("launcher", ["-m accelerate.commands.launch", "fabric run", "lightning"])
def test_the_page_knows_launchers_that_are_not_refused(launcher, tmp_path):
    (job,) = of_kind("frameworks", "DDPJob")
    job["spec"]["args"] = [*launcher.split(), "train.py"]
    assert validate(job, tmp_path).exit_code == 0


def test_a_variable_of_torchrun_is_refused(tmp_path):
    (job,) = of_kind("frameworks", "DDPJob")
    job["spec"]["env"] = [{"name": "MASTER_ADDR", "value": "n0"}]
    assert validate(job, tmp_path).exit_code != 0


def test_the_policy_for_trackers_only_adds_to_that_for_jobs():
    (tracking,) = of_kind("tracking", "NetworkPolicy")
    text = (USERS / "teams.md").read_text()
    (part,) = [part for part in text.split("```") if "kind: NetworkPolicy" in part]
    for_jobs = load_yaml(part.removeprefix("yaml"))
    namespace = {"kubernetes.io/metadata.name": "ml"}
    assert find_gaps([for_jobs, tracking], namespace) == []
    assert find_gaps([tracking], namespace)
