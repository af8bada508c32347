"""The scripts for people to copy: examples/gpt/train.py and examples/vision/train.py."""

from pathlib import Path

import pytest
import torch

from . import launch
from .conftest import image_folders

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT = EXAMPLES / "gpt" / "train.py"
VISION = EXAMPLES / "vision" / "train.py"

SMALL_GPT = (
    *("--layers", 1, "--width", 16, "--heads", 2, "--context", 16, "--batch-size", 19),
    *("--epochs", 2, "--save-every", 3, "--log-every", 1),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return a file of 2,400 bytes: 134 sequences of 16 for training, and 14 for evaluations.

    The last batch of 19 has one sequence, so one of two ranks has none.
    """
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("All the world's a stage, and all the men and women merely players. " * 36)
    return path


def result_of(run):
    """Return the result of a successful run."""
    assert run.finish() == 0, run.stderr
    (end,) = run.of("end")
    return end["result"]


def killed_and_resumed(start):
    """Return the results of an unbroken run, and of one killed at its fifth step."""
    whole = start("whole")
    broken = start("broken")
    # Its checkpoint of step 3 is written by a thread.
    broken.wait_for("checkpoint", step=3)
    broken.wait_for("train", step=5)
    broken.kill()
    expected = result_of(whole)
    resumed = start("broken")
    assert resumed.wait_for("start")["resumed_step"] >= 3
    return expected, result_of(resumed)


@pytest.mark.parametrize("script", [GPT, VISION])
def test_a_script_is_short_enough_to_be_read(script):
    assert len(script.read_text().splitlines()) <= 350


def test_gpt_with_workers_parts_and_recomputed_activations_resumes_bit_by_bit(text, tmp_path):
    def start(name):
        options = (
            "--workers",
            1,
            "--part-size",
            5,
            "--recompute",
            "--checkpoint-dir",
            tmp_path / name,
        )
        return launch.group(GPT, "--data", text, *SMALL_GPT, *options)

    expected, found = killed_and_resumed(start)
    assert found == expected
    weights = [
        torch.load(launch.newest(tmp_path / name), weights_only=True)["parts"]["model"]
        for name in ("whole", "broken")
    ]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def test_a_sharded_gpt_resumes_bit_by_bit_and_trains_like_a_replicated_one(text, tmp_path):
    def start(name):
        options = ("--fsdp", "--checkpoint-dir", tmp_path / name, "--dropout", 0)
        return launch.group(GPT, "--data", text, *SMALL_GPT, *options)

    expected, found = killed_and_resumed(start)
    assert found == expected
    alone = launch.alone(GPT, "--data", text, *SMALL_GPT, "--dropout", 0)
    assert result_of(alone)["loss"] == pytest.approx(expected["loss"], abs=1e-5)


def test_gpt_refuses_what_cannot_work(text, tmp_path):
    runs = {
        "file not found": launch.alone(GPT, "--data", tmp_path / "nothing.txt"),
        "start the script with torchrun": launch.alone(GPT, "--data", text, *SMALL_GPT, "--fsdp"),
    }
    for message, run in runs.items():
        assert run.finish() == 2
        assert message in run.stderr
        assert "Traceback" not in run.stderr


def test_vision_with_workers_resumes_bit_by_bit(tmp_path):
    data = image_folders(tmp_path / "data", {"train": 5, "test": 2})

    def start(name):
        options = ("--workers", 1, "--batch-size", 24, "--width", 4, "--log-every", 1)
        saving = ("--checkpoint-dir", tmp_path / name, "--epochs", 3)
        return launch.group(VISION, "--data", data, *options, *saving)

    whole = start("whole")
    broken = start("broken")
    broken.wait_for("checkpoint")
    broken.kill()
    expected = result_of(whole)
    assert result_of(start("broken")) == expected
    first, second = (
        torch.load(launch.newest(tmp_path / name), weights_only=True)["parts"]["model"]
        for name in ("whole", "broken")
    )
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
