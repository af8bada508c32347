"""The metrics of a run: stages of time, and curves."""

import pytest

from ddpjob.jobs.run_metrics import RunMetrics, is_for_people, parse_metric, shares

START = {"event": "start", "time": 105.0}
END = {
    "event": "end",
    "time": 116.0,
    "seconds": {"import": 2.0, "rendezvous": 0.5, "setup": 0.5, "forward": 4.0, "backward": 6.0},
}


def train(step: int, loss: object) -> dict:
    return {"event": "train", "step": step, "loss": loss}


def test_the_stages_add_up_to_the_whole_run():
    metrics = RunMetrics(start_time=100.0, end_time=117.0, events=[START, END])
    stages = dict(metrics.stage_seconds())
    assert sum(stages.values()) == 17.0
    assert stages["starting processes"] == 4.0
    assert stages["shutdown"] == 1.0


def test_the_time_of_lost_attempts_is_a_stage_of_its_own():
    again = {"event": "start", "time": 130.0}
    end = {**END, "time": 141.0}
    stages = dict(RunMetrics(100.0, 142.0, [START, again, end]).stage_seconds())
    assert stages["lost to restarts"] == 27.0
    assert sum(stages.values()) == 42.0


def test_repeated_steps_replace_the_lost_ones():
    events = [train(10, 3.0), train(20, 2.0), train(30, 1.5), train(20, 1.9), train(30, 1.4)]
    assert RunMetrics(events=events).curve("train", "loss") == ([10, 20, 30], [3.0, 1.9, 1.4])


def test_a_run_without_an_end_has_no_stages():
    assert RunMetrics(0.0, 1.0, [START]).stage_seconds() == []


def test_stages_that_took_no_time_are_left_out():
    stages = [("a", 3.0), ("b", 1.0), ("c", 0.0)]
    assert shares(stages) == [("a", 3.0, 0.75), ("b", 1.0, 0.25)]


def test_events_without_a_time_give_no_stages():
    assert RunMetrics(0.0, 1.0, [{"event": "start"}, {"event": "end"}]).stage_seconds() == []


def test_seconds_that_are_not_numbers_count_as_zero():
    start = {"event": "start", "time": 1.0}
    end = {"event": "end", "time": 2.0, "seconds": {"forward": "long", "backward": None}}
    assert dict(RunMetrics(0.0, 3.0, [start, end]).stage_seconds())["forward"] == 0.0


def test_values_that_cannot_be_drawn_are_left_out():
    too_large = 10**400
    values = [float("nan"), float("inf"), too_large, None, 0.5]
    events = [train(step, value) for step, value in enumerate(values, start=1)]
    assert RunMetrics(events=events).curve("train", "loss") == ([5], [0.5])


@pytest.mark.parametrize(
    "line", ['{"event": "request_finished", "took": 3}', '{"event": ["train"]}', '{"event": 1', "x"]
)
def test_lines_of_other_programs_are_not_metrics(line):
    assert parse_metric(line) is None


@pytest.mark.parametrize(
    "line",
    ["loss 0.5", '{"event": "unknown"}', '{"event": 1}', '{"event', '{"event": ' + "[" * 100_000],
    ids=["text", "other event", "number", "cut off", "deeply nested"],
)
def test_other_lines_are_not_metrics(line):
    assert parse_metric(line) is None


@pytest.mark.parametrize(
    "line", ['{"step": 950, "steps": 1500, "loss": 0.1}', '{"loss": 0.1, "step": 950} ']
)
def test_an_object_with_a_step_is_an_event_of_the_training_and_for_people(line):
    found = parse_metric(line)
    assert (found["event"], found["step"], found["loss"]) == ("train", 950, 0.1)
    assert is_for_people(line)


def test_an_event_is_found_wherever_its_key_is():
    line = '{"step": 950, "event": "train"}'
    assert parse_metric(line) == {"step": 950, "event": "train"}
    assert not is_for_people(line)


@pytest.mark.parametrize("line", ['{"step": "warm-up"}', '{"step": true}', '{"loss": 1}', "{}"])
def test_an_object_without_a_step_is_no_event(line):
    assert parse_metric(line) is None
