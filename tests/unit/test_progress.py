"""How far a training is, from the events of its trainer."""

import math

import pytest

from ddpjob.jobs.progress import Progress

START = {"event": "start", "time": 100.0, "steps": 460, "resumed_step": 0}
TRAIN = {
    "event": "train",
    "time": 101.0,
    "epoch": 1,
    "epochs": 20,
    "step": 10,
    "steps": 460,
    "loss": 2.5,
    "samples_per_second": 5120.4,
}
EVAL = {"event": "eval", "time": 102.0, "step": 23, "accuracy": 0.91}
CHECKPOINT = {"event": "checkpoint", "time": 103.0, "step": 23}


def test_no_events_tell_nothing():
    progress = Progress.from_events([])
    assert (str(progress), progress.short(), progress.share) == ("", "", None)


def test_the_newest_values_are_kept():
    progress = Progress.from_events([START, TRAIN, EVAL, CHECKPOINT])
    expected = "step 23/460, epoch 1/20, loss 2.5000, accuracy 91.0%, 5,120 samples/s"
    assert str(progress) == expected
    assert progress.share == 23 / 460
    assert progress.checkpoint_time.timestamp() == 103.0


def test_a_resumed_training_goes_back_to_its_checkpoint():
    resumed = {**START, "resumed_step": 7}
    assert Progress.from_events([START, TRAIN, resumed]).short() == "7/460"


def test_a_loss_that_is_not_a_number_is_shown():
    # JSON has null for nan.
    progress = Progress.from_events([{**TRAIN, "loss": None}])
    assert math.isnan(progress.loss)
    assert "loss nan" in str(progress)


@pytest.mark.parametrize("value", ["x", True, [1], {}, 1e999, 10**400, None])
def test_values_of_any_shape_are_read(value):
    events = [{**event, key: value} for event in (START, TRAIN, EVAL, CHECKPOINT) for key in event]
    progress = Progress.from_events(events)
    assert isinstance(str(progress), str)
    assert isinstance(progress.short(), str)
