"""What a person sees of a run, whatever a script prints."""

import io

import pytest
from rich.console import Console

from ddpjob.local.display import Display
from ddpjob.local.story import Story


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
        fields = dict.fromkeys(("parameters", "steps", "step", "loss", "accuracy", "samples_per_second"), value)
        shown(*({"event": event, **fields} for event in ("start", "train", "eval", "end")), terminal=terminal)
    assert "accuracy 50.0%" in shown({"event": "eval", "accuracy": 0.5})


def test_a_loss_that_diverged_is_shown():
    assert "test loss nan" in shown({"event": "eval", "step": 1, "loss": float("nan")})


def test_brackets_are_no_markup():
    assert "[red]net" in shown({"event": "start", "workload": "[red]net"})
