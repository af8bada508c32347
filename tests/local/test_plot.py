"""`ddpjob plot`: curves as a picture, from files with other lines in them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddpjob.cli.main import app
from ddpjob.show import curves

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


@pytest.fixture
def labels(monkeypatch):
    """Return the texts of the last figure: titles of axes and names in legends."""
    found = []
    draw = curves.draw

    def drawn(runs, title):
        figure = draw(runs, title)
        for axes in figure.axes if figure else []:
            legend = axes.get_legend()
            found.append(axes.get_ylabel())
            if legend:
                found.extend(text.get_text() for text in legend.get_texts())
        return figure

    monkeypatch.setattr(curves, "draw", drawn)
    return found


def test_the_log_of_a_running_job_is_drawn_from_stdin(tmp_path, monkeypatch, labels):
    monkeypatch.chdir(tmp_path)
    text = Path(write_log(tmp_path / "log", *training(3.0, 2.0, 1.5))).read_text()
    done = plot("-", stdin=text)
    assert done.exit_code == 0, done.output
    assert done.stdout == "curves.png\n"
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)
    assert labels == ["training loss", "test accuracy, %"]


def test_several_runs_are_drawn_together_under_their_names(tmp_path, labels):
    files = []
    for name in ("ddp", "native"):
        files.append(write_log(tmp_path / name / "metrics.jsonl", *training(3.0, 2.0)))
    done = plot(*files, "--out", str(tmp_path / "both.png"))
    assert done.exit_code == 0, done.output
    assert labels == ["training loss", "ddp", "native", "test accuracy, % (dashed)"]
    assert (tmp_path / "both.png").read_bytes().startswith(PNG)


def test_the_speed_of_messages_is_drawn_over_their_sizes(tmp_path, labels):
    log = write_log(tmp_path / "messages-0-0.log", *speeds())
    done = plot(log, "--out", str(tmp_path / "speed.png"))
    assert done.exit_code == 0, done.output
    assert "send and recv, GB/s" in labels
    assert "all_reduce, GB/s on the bus" in labels
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
