"""The display of a run, for anything that a script may print."""

import io

import pytest
from rich.console import Console

from ddpjob.core.api.status import Status
from ddpjob.core.plan import NEXT_STEP
from ddpjob.jobs.run_metrics import RunMetrics
from ddpjob.show.display import Display

NUMBERS = (
    "parameters",
    "steps",
    "step",
    "loss",
    "accuracy",
    "samples_per_second",
    "images_per_second",
)
AGENT = "1 torch/distributed/elastic"


def displayed(*metrics: dict, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    with Display(console, RunMetrics()) as display:
        for metric in metrics:
            display.metric(metric)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("value", [None, "high", [1], {}, True])
def test_metrics_that_are_not_numbers_are_accepted(value, terminal):
    fields = dict.fromkeys(NUMBERS, value)
    for event in ("start", "train", "rate", "eval", "end"):
        displayed({"event": event, **fields}, terminal=terminal)


def test_a_failed_run_does_not_ask_to_delete_a_job_of_a_cluster():
    console = Console(file=io.StringIO(), width=200)
    message = f"pod digits-0-1 failed with exit code 2; {NEXT_STEP}: it begins anew"
    with Display(console, RunMetrics()) as display:
        display.status(Status(phase="Failed", message=message))
    shown = console.file.getvalue()
    assert "failed with exit code 2" in shown
    assert "delete the job" not in shown


@pytest.mark.parametrize("unit", ["samples", "images", "tokens"])
def test_the_speed_is_displayed_in_the_unit_of_the_trainer(unit):
    start = {"event": "start", "workload": "gpt", "steps": 10}
    shown = displayed(
        start,
        {"event": "train", "step": 5, "loss": 1.5, f"{unit}_per_second": 12345.6},
        terminal=True,
    )
    assert f"12,346 {unit}/s" in shown


def test_an_accuracy_is_displayed_in_percent():
    assert "accuracy 50.0%" in displayed({"event": "eval", "accuracy": 0.5})


@pytest.mark.parametrize("loss", [None, float("nan")], ids=["JSON's null", "nan"])
def test_a_loss_that_diverged_is_displayed(loss):
    assert "test loss nan" in displayed({"event": "eval", "step": 1, "loss": loss})


@pytest.mark.parametrize(
    "report",
    [
        f"E1122 20:00:01.100000 {AGENT}/multiprocessing/api.py:1002] failed (exitcode: 1)",
        f"W1122 20:00:01.100000 {AGENT}/agent/server/api.py:753] Received 15 death signal, ending",
    ],
    ids=["a failure", "a signal"],
)
def test_lines_after_an_agents_report_are_hidden_but_not_after_its_warning(report):
    # On macOS the first line of torchrun is such a warning.
    warning = f"W1122 20:00:00.100000 {AGENT}/multiprocessing/redirects.py:35] NOTE: Redirects"
    console = Console(file=io.StringIO(), width=200)
    with Display(console, RunMetrics()) as display:
        for line in (warning, "one", report, "Traceback", "two"):
            display.line(0, line)
    assert console.file.getvalue() == "[n0] one\n"


def test_brackets_are_not_markup():
    assert "[red]net" in displayed({"event": "start", "workload": "[red]net"})
