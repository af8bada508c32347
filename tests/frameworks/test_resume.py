"""Loops of transformers, Lightning and Accelerate are killed or stopped, and resume exactly.

`make test-frameworks` sets up their environment.
"""

import signal
from itertools import pairwise

import pytest
import torch

from frameworks import loops
from trainer import launch

missing = loops.why_skipped("transformers", "accelerate", "lightning")
pytestmark = pytest.mark.skipif(bool(missing), reason=missing)

NAMES = ("hf", "lightning", "accelerate")


def start(name, folder):
    return loops.start(loops.EXAMPLES / name / "train.py", folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function to get the last checkpoint of an undisturbed script."""
    finished = loops.finished_once(start, tmp_path_factory)

    def train(name):
        _, folder = finished(name)
        return last_checkpoint(folder)

    return train


def last_checkpoint(folder):
    return torch.load(launch.newest(folder), weights_only=True)


def assert_equal(found, expected):
    """Compare two checkpoints bit by bit: steps, weights, and the state of the optimizer."""
    assert found["step"] == expected["step"]
    weights, expected_weights = found["parts"]["model"], expected["parts"]["model"]
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        assert torch.equal(weights[name], tensor), name
    moments = found["parts"]["optimizer"]["state"]
    for number, state in expected["parts"]["optimizer"]["state"].items():
        assert torch.equal(moments[number]["exp_avg"], state["exp_avg"])


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_stops_at_a_signal_and_resumes_bit_by_bit(name, whole, tmp_path):
    run = start(name, tmp_path)
    run.wait_for("train", step=13)
    # torchrun passes it on to all ranks.
    run.signal(signal.SIGTERM)
    assert run.finish() != 0
    assert "stopped by SIGTERM after step" in run.stderr
    stopped = last_checkpoint(tmp_path)["step"]
    assert 13 <= stopped < whole(name)["step"]
    resumed = start(name, tmp_path)
    assert resumed.finish() == 0, resumed.stderr
    assert resumed.of("train")[0]["step"] == stopped + 1
    assert_equal(last_checkpoint(tmp_path), whole(name))
    # A start after the end takes no further step.
    again = start(name, tmp_path)
    assert again.finish() == 0, again.stderr
    assert again.of("train") == []


@pytest.mark.parametrize("name", NAMES)
def test_a_job_whose_rank_is_killed_restarts_and_ends_bit_by_bit_equal(name, whole, tmp_path):
    claim = tmp_path / "claim"
    claim.mkdir()
    example = loops.EXAMPLES / name
    manifest = tmp_path / "job.yaml"
    text = (example / "job.yaml").read_text()
    manifest.write_text(text.replace('train.py"]', f'train.py", "--epochs", "{loops.EPOCHS}"]'))
    run = tmp_path / "runs" / name
    words = (
        *(manifest, "--runs", run.parent, "--max-restarts", 3),
        *("--config-map", f"{name}={example / 'train.py'}"),
        *("--claim", f"ddpjob-checkpoints={claim}"),
    )
    loops.finish_after_a_kill(run, words)
    assert any(later <= earlier for earlier, later in pairwise(loops.steps_of(run)))
    (folder,) = {path.parent for path in claim.rglob("step-*.pt")}
    assert_equal(last_checkpoint(folder), whole(name))
