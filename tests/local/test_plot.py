"""`ddpjob plot`: curves in the terminal and as a picture, from files with other lines in them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddpjob.cli.main import app

PNG = b"\x89PNG"


def write_log(path: Path, *events: dict) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["W1121 some warning of torch"]
    lines += [json.dumps(event) for event in events]
    lines += ['{"event": "of another program"}', "bye"]
    path.write_text("\n".join(lines))
    return str(path)


def training(*losses: float) -> list[dict]:
    start = {"event": "start", "steps": 10 * len(losses)}
    train = [
        {"event": "train", "step": 10 * number, "loss": loss}
        for number, loss in enumerate(losses, start=1)
    ]
    return [start, *train, {"event": "eval", "step": 20, "accuracy": 0.5}]


def speeds() -> list[dict]:
    speed = {
        "event": "speed",
        "message_seconds": 0.5,
        "message_gb_per_second": 0.5,
        "all_reduce_seconds": 0.5,
        "all_reduce_gb_per_second": 1.0,
    }
    return [{**speed, "bytes": 2**power} for power in (10, 12, 14)]


def plot(*words: str, stdin: str = ""):
    return CliRunner().invoke(app, ["plot", *words], input=stdin)


def test_the_log_of_a_running_job_is_drawn_from_stdin(tmp_path):
    text = Path(write_log(tmp_path / "log", *training(3.0, 2.0, 1.5))).read_text()
    done = plot("-", stdin=text)
    assert done.exit_code == 0, done.output
    assert "training loss" in done.stdout
    assert "test accuracy, %" in done.stdout


def test_several_runs_are_drawn_together_under_their_names(tmp_path):
    files = []
    for name in ("ddp", "native"):
        files.append(write_log(tmp_path / name / "metrics.jsonl", *training(3.0, 2.0)))
    done = plot(*files, "--out", str(tmp_path / "both.png"))
    assert done.exit_code == 0, done.output
    assert "ddp" in done.stdout
    assert "native" in done.stdout
    assert (tmp_path / "both.png").read_bytes().startswith(PNG)


def test_the_speed_of_messages_is_drawn_over_their_sizes(tmp_path):
    log = write_log(tmp_path / "messages-0-0.log", *speeds())
    done = plot(log, "--out", str(tmp_path / "speed.png"))
    assert done.exit_code == 0, done.output
    assert "send and recv, GB/s" in done.stdout
    assert "all_reduce, GB/s on the bus" in done.stdout
    assert (tmp_path / "speed.png").read_bytes().startswith(PNG)


def test_a_job_that_resumed_after_its_last_step_has_an_accuracy_to_draw(tmp_path):
    events = [{"event": "start"}, {"event": "eval", "step": 20, "accuracy": 0.5}, {"event": "end"}]
    done = plot(write_log(tmp_path / "log", *events), "--out", str(tmp_path / "a.png"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("nowhere.log", "nowhere.log: the file does not exist"),
        (
            "empty.log",
            "empty.log: no losses, accuracies or speeds found; the trainer has not printed",
        ),
    ],
)
def test_a_file_without_curves_is_refused(tmp_path, monkeypatch, file, message):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "empty.log", {"event": "end"})
    refused = plot(file)
    assert refused.exit_code == 2
    assert message in refused.stderr


def test_a_picture_that_cannot_be_written_is_refused(tmp_path):
    log = write_log(tmp_path / "log", *training(3.0))
    refused = plot(log, "--out", str(tmp_path / "picture.mp3"))
    assert refused.exit_code == 2
    assert "cannot write the picture" in refused.stderr
