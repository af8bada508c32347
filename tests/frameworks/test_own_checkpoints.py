"""Scripts with the checkpoints of their framework, that are killed or stopped, and resume.

`make test-frameworks` sets up their environment.
"""

import signal
from itertools import pairwise

import pytest
import torch

from ddpjob.core.api.yaml_text import load_yaml
from frameworks import loops

SCRIPTS = {
    "transformers": loops.EXAMPLES / "hf" / "plain.py",
    "lightning": loops.EXAMPLES / "lightning" / "trainer.py",
    "accelerate": loops.EXAMPLES / "accelerate" / "plain.py",
    "deepspeed": loops.EXAMPLES / "deepspeed" / "train.py",
}

NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=missing))
    for name in SCRIPTS
    for missing in [loops.why_skipped(name)]
]

SAVE_EVERY = 10

# Each test starts a script several times, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(1800)


def start(name, folder):
    return loops.start(SCRIPTS[name], folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that gives the steps and the weights of an undisturbed script."""
    finished = loops.finished_once(start, tmp_path_factory)

    def train(name):
        run, folder = finished(name)
        return run.of("train")[-1]["step"], weights(name, folder)

    return train


def weights(name, folder):
    """Return the weights of the newest checkpoint in a folder."""
    if name == "lightning":
        return torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
    found = [path for path in folder.glob("*-*") if path.suffix != ".new" and path.is_dir()]
    newest = max(found, key=lambda path: int(path.name.partition("-")[2]))
    if name == "deepspeed":
        return torch.load(newest / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    from safetensors.torch import load_file

    return load_file(newest / "model.safetensors")


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", NAMES)
def test_a_script_stops_at_a_signal_and_resumes_at_the_next_step(name, whole, tmp_path):
    last, expected = whole(name)
    run = start(name, tmp_path)
    run.wait_for("train", step=13)
    # torchrun passes it on to all ranks.
    run.signal(signal.SIGTERM)
    assert run.finish() != 0
    stopped = run.of("train")[-1]["step"]
    assert 13 <= stopped < last
    resumed = start(name, tmp_path)
    assert resumed.finish() == 0, resumed.stderr
    steps = [event["step"] for event in resumed.of("train")]
    assert steps == list(range(stopped + 1, last + 1))
    assert_equal(weights(name, tmp_path), expected)
    # A start after the end takes no further step.
    again = start(name, tmp_path)
    assert again.finish() == 0, again.stderr
    assert again.of("train") == []


@pytest.mark.parametrize("name", NAMES)
def test_a_job_whose_rank_is_killed_resumes_from_the_last_save(name, whole, tmp_path):
    last, expected = whole(name)
    script = SCRIPTS[name]
    claim = tmp_path / "claim"
    claim.mkdir()
    run = tmp_path / "runs" / "train"
    words = (
        *("--script", script, "--name", "train", "--nodes", 2, "--checkpoints", "ckpt"),
        *("--claim", f"ckpt={claim}", "--runs", run.parent, "--max-restarts", 3),
        *("--", "--epochs", loops.EPOCHS),
    )
    loops.finish_after_a_kill(run, words)
    status = load_yaml((run / "status.yaml").read_text())
    assert status["restarts"] == 1
    # A rank that is killed in the step of a save repeats none.
    steps = loops.steps_of(run)
    repeated = [later for earlier, later in pairwise(steps) if later <= earlier]
    assert all(step % SAVE_EVERY == 1 for step in repeated)
    assert steps[-1] == last
    assert_equal(weights(name, claim / "train"), expected)
