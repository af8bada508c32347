"""The script of the tutorial, taken from its page, as a job of this machine."""

import re
from pathlib import Path

import pytest

from ddpjob import DDPJob, LocalClient

PAGE = Path(__file__).parents[2] / "docs" / "users" / "own-script.md"
SCRIPT = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


@pytest.fixture
def client(tmp_path):
    return LocalClient(tmp_path / "runs")


def submit(client, folder, steps, nodes=2, **spec):
    (folder / "train.py").write_text(SCRIPT)
    args = [str(folder / "train.py"), str(steps)]
    client.submit(DDPJob.create("train", image="i", args=args, nodes=nodes, **spec))
    return client.wait("train", timeout=120)


def test_the_script_trains_on_two_nodes_and_resumes(client, tmp_path):
    claim = {"checkpoint": {"claimName": "ckpt"}}
    job = submit(client, tmp_path, 60, **claim)
    assert job.succeeded, job.message
    steps, losses = client.metrics("train").curve("train", "loss")
    assert steps == [0, 50]
    assert losses[1] < losses[0]
    # A longer run goes on after the checkpoint of step 50.
    job = submit(client, tmp_path, 120, **claim)
    assert job.succeeded, job.message
    assert client.metrics("train").curve("train", "loss")[0] == [100]


def test_without_a_claim_nothing_is_written(client, tmp_path):
    job = submit(client, tmp_path, 60, nodes=1)
    assert job.succeeded, job.message
    assert not list(tmp_path.rglob("*.pt"))
