"""`ddpjob plot`: curves of runs in the terminal and as a picture, from files that hold other lines too."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddpjob.cli.main import app

PNG = b"\x89PNG"


def log(path: Path, *events: dict) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        "W1121 some warning of torch",
        *map(json.dumps, events),
        '{"event": "of another program"}',
        "bye",
    ]
    path.write_text("\n".join(lines))
    return str(path)


def training(*losses: float) -> list[dict]:
    train = [
        {"event": "train", "step": 10 * (at + 1), "loss": loss} for at, loss in enumerate(losses)
    ]
    return [
        {"event": "start", "steps": 10 * len(losses)},
        *train,
        {"event": "eval", "step": 20, "accuracy": 0.5},
    ]


def speeds() -> list[dict]:
    values = dict.fromkeys(("message_seconds", "message_gb_per_second", "all_reduce_seconds"), 0.5)
    return [
        {"event": "speed", "bytes": 2**size, "all_reduce_gb_per_second": 1.0, **values}
        for size in (10, 12, 14)
    ]


def plot(*words: str, stdin: str = ""):
    return CliRunner().invoke(app, ["plot", *words], input=stdin)


def test_a_running_jobs_log_is_drawn_from_stdin(tmp_path):
    text = Path(log(tmp_path / "log", *training(3.0, 2.0, 1.5))).read_text()
    shown = plot("-", stdin=text)
    assert shown.exit_code == 0, shown.output
    assert "training loss" in shown.stdout
    assert "test accuracy, %" in shown.stdout


def test_several_runs_are_drawn_together_under_their_names(tmp_path):
    files = [
        log(tmp_path / name / "metrics.jsonl", *training(3.0, 2.0)) for name in ("ddp", "native")
    ]
    shown = plot(*files, "--out", str(tmp_path / "both.png"))
    assert shown.exit_code == 0, shown.output
    assert "ddp" in shown.stdout
    assert "native" in shown.stdout
    assert (tmp_path / "both.png").read_bytes().startswith(PNG)


def test_the_speed_of_messages_is_drawn_over_their_sizes(tmp_path):
    shown = plot(
        log(tmp_path / "messages-0-0.log", *speeds()), "--out", str(tmp_path / "speed.png")
    )
    assert shown.exit_code == 0, shown.output
    assert "send and recv, GB/s" in shown.stdout
    assert "all_reduce, GB/s on the bus" in shown.stdout
    assert (tmp_path / "speed.png").read_bytes().startswith(PNG)


def test_a_job_that_was_complete_already_has_an_accuracy_to_draw(tmp_path):
    events = [{"event": "start"}, {"event": "eval", "step": 20, "accuracy": 0.5}, {"event": "end"}]
    shown = plot(log(tmp_path / "log", *events), "--out", str(tmp_path / "a.png"))
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.log"], "cannot read nowhere.log"),
        (["empty.log"], "no losses and no speeds in empty.log"),
    ],
)
def test_where_there_is_nothing_to_draw_it_says_what_to_give(tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    log(tmp_path / "empty.log", {"event": "end"})
    refused = plot(*words)
    assert refused.exit_code == 2
    assert says in " ".join(refused.stderr.replace("│", " ").split())


def test_a_picture_that_cannot_be_written_gets_a_sentence(tmp_path):
    refused = plot(log(tmp_path / "log", *training(3.0)), "--out", str(tmp_path / "picture.mp3"))
    assert refused.exit_code == 2
    assert "cannot write" in refused.stderr
