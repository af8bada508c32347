"""What a run's metrics tell in the end."""

from ddpjob.local.run_metrics import Story, share

START = {"event": "start", "time": 105.0}
END = {
    "event": "end",
    "time": 116.0,
    "seconds": {"import": 2.0, "rendezvous": 0.5, "setup": 0.5, "forward": 4.0, "backward": 6.0},
}


def train(step: int, loss: float) -> dict:
    return {"event": "train", "step": step, "loss": loss}


def test_all_seconds_of_a_run_are_somebodys():
    story = Story(began=100.0, ended=117.0, metrics=[START, END])
    stages = dict(story.seconds())
    assert sum(stages.values()) == 17.0
    assert stages["starting processes"] == 4.0
    assert stages["ending"] == 1.0


def test_what_an_attempt_cost_is_told_apart():
    again = {"event": "start", "time": 130.0}
    end = {**END, "time": 141.0}
    stages = dict(Story(100.0, 142.0, [START, again, end]).seconds())
    assert stages["lost to restarts"] == 27.0
    assert sum(stages.values()) == 42.0


def test_steps_that_were_lost_are_not_drawn_twice():
    story = Story(
        0.0, 1.0, [train(10, 3.0), train(20, 2.0), train(30, 1.5), train(20, 1.9), train(30, 1.4)]
    )
    assert story.curve("train", "loss") == ([10, 20, 30], [3.0, 1.9, 1.4])


def test_a_run_that_never_ended_has_no_account():
    assert Story(0.0, 1.0, [START]).seconds() == []


def test_shares_leave_out_what_took_no_time():
    assert share([("a", 3.0), ("b", 1.0), ("c", 0.0)]) == [("a", 3.0, 0.75), ("b", 1.0, 0.25)]


def test_events_without_a_time_or_with_words_for_numbers_have_no_account():
    assert Story(0.0, 1.0, [{"event": "start"}, {"event": "end"}]).seconds() == []
    odd = {"event": "end", "time": 2.0, "seconds": {"forward": "long", "backward": None}}
    assert dict(Story(0.0, 3.0, [{"event": "start", "time": 1.0}, odd]).seconds())["forward"] == 0.0


def test_numbers_that_nothing_can_be_drawn_of_are_left_out():
    odd = [
        train(1, float("nan")),
        train(2, float("inf")),
        train(3, 10**400),
        train(4, None),
        train(5, 0.5),
    ]
    assert Story(0.0, 1.0, odd).curve("train", "loss") == ([5], [0.5])
