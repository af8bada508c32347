"""What a person sees of a run, whatever a script prints."""

import io

import pytest
from rich.console import Console

from ddpjob.local.display import Display
from ddpjob.local.run_metrics import Story


def shown(*metrics: dict, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    with Display(console, Story(began=0.0)) as display:
        for metric in metrics:
            display.metric(metric)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_metrics_of_any_shape_are_shown_as_far_as_they_are_numbers(terminal):
    odd = [None, "high", [1], {}, True]
    for value in odd:
        fields = dict.fromkeys(
            (
                "parameters",
                "steps",
                "step",
                "loss",
                "accuracy",
                "samples_per_second",
                "images_per_second",
            ),
            value,
        )
        shown(
            *({"event": event, **fields} for event in ("start", "train", "rate", "eval", "end")),
            terminal=terminal,
        )
    assert "accuracy 50.0%" in shown({"event": "eval", "accuracy": 0.5})


def test_a_loss_that_diverged_is_shown():
    for loss in (None, float("nan")):  # the trainer's word for it, and Python's
        assert "test loss nan" in shown({"event": "eval", "step": 1, "loss": loss})


@pytest.mark.parametrize(
    "report",
    [
        "E1122 20:00:01.100000 1 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)",
        "W1122 20:00:01.100000 1 torch/distributed/elastic/agent/server/api.py:753] Received 15 death signal, shutting down",
    ],
    ids=["a failure", "a signal"],
)
def test_a_launchers_warning_hides_nothing_and_its_report_of_its_end_everything(report):
    """On macOS torchrun's first line is a warning."""
    note = "W1122 20:00:00.100000 1 torch/distributed/elastic/multiprocessing/redirects.py:35] NOTE: Redirects are not"
    console = Console(file=io.StringIO(), width=200)
    with Display(console, Story(began=0.0)) as display:
        for line in (note, "one", report, "Traceback", "two"):
            display.line(0, line)
    assert console.file.getvalue() == "[n0] one\n"


def test_brackets_are_no_markup():
    assert "[red]net" in shown({"event": "start", "workload": "[red]net"})
