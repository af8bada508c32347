"""The lines of pods' logs: their attempts and ranks, and which of them a user wants."""

import pytest
import typer

from ddpjob.cli.commands.logs import read_nodes
from ddpjob.cli.options import read_duration
from ddpjob.client.logs import LogChoice, PodLog


def a_pod(name="j-0-3", index="3"):
    return {"metadata": {"namespace": "n", "name": name, "labels": {"ddpjob.dev/index": index}}}


def line(log, text, second="1"):
    return log.take(f"2026-01-01T00:00:0{second}Z {text}".encode())


def test_a_pod_knows_the_attempt_in_which_it_was_created():
    log = PodLog.from_pod(a_pod("my-job-12-3"))
    assert (log.index, log.born) == (3, 12)


@pytest.mark.parametrize("pod", [a_pod("j"), a_pod("j-x-0"), a_pod(index=""), a_pod(index="x")])
def test_a_pod_of_another_shape_has_no_log(pod):
    assert PodLog.from_pod(pod) is None


def test_lines_belong_to_the_attempt_that_has_begun():
    log = PodLog.from_pod(a_pod())
    first = line(log, "hello", "1")
    second = line(log, "ddpjob agent: attempt 4 begins: torchrun", "2")
    third = line(log, "hello", "3")
    assert [one.attempt for one in (first, second, third)] == [0, 4, 4]


def test_a_line_has_the_rank_that_its_mark_names():
    log = PodLog.from_pod(a_pod())
    assert line(log, "[rank17]: hello", "1").rank == 17
    assert line(log, "rank 17", "2").rank is None


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("\r 1%\r 50%\r100%", "100%"),
        ("100%\r", "100%"),
        ("[rank0]: \r[rank0]:  50%\r[rank0]: 100%", "[rank0]: 100%"),
        ('100%\r{"event": "train"}', '{"event": "train"}'),
        ("bar\r   \r", "   "),
    ],
)
def test_a_progress_bar_is_shown_as_in_a_terminal(written, shown):
    log = PodLog.from_pod(a_pod())
    assert line(log, written).text == shown
    # What the kubelet itself says has no time.
    assert log.take(written.encode()).text == shown


def test_a_line_after_a_progress_bar_has_its_rank_and_attempt():
    log = PodLog.from_pod(a_pod())
    assert line(log, "[rank0]: 1%\r[rank17]: hello").rank == 17
    assert line(log, '[rank17]: 1%\r{"a": 1}').is_json
    assert line(log, "1%\rddpjob agent: attempt 4 begins").attempt == 4


def test_after_a_new_connection_a_line_that_was_read_before_is_left_out():
    log = PodLog.from_pod(a_pod())
    assert line(log, "a", "2").text == "a"
    log.resumed_after = log.last_time
    assert line(log, "a", "2") is None
    assert line(log, "b", "3").text == "b"


def test_within_one_connection_no_line_is_left_out():
    # The clock of the node may step back, and two lines may have the same time.
    log = PodLog.from_pod(a_pod())
    texts = [line(log, text, second).text for text, second in (("a", "5"), ("b", "5"), ("c", "1"))]
    assert texts == ["a", "b", "c"]


def test_what_the_kubelet_itself_says_has_no_time():
    log = PodLog.from_pod(a_pod())
    line(log, "a", "2")
    said = log.take(b"unable to retrieve container logs for containerd://1")
    assert said.text.startswith("unable to retrieve")
    assert log.last_time == "2026-01-01T00:00:02Z"


def test_a_choice_of_nodes_ranks_and_attempts():
    log = PodLog.from_pod(a_pod("j-2-3"))
    assert LogChoice().has_pod(log)
    assert LogChoice(nodes=frozenset({3})).has_pod(log)
    assert not LogChoice(nodes=frozenset({2})).has_pod(log)
    assert LogChoice(rank=6, ranks_per_node=2).has_pod(log)
    assert not LogChoice(rank=5, ranks_per_node=2).has_pod(log)
    assert not LogChoice(attempt=1).has_pod(log)
    marked = line(log, "[rank6]: x", "1")
    plain = line(log, "x", "2")
    assert LogChoice(rank=6, ranks_per_node=2).has_line(marked)
    assert not LogChoice(rank=7, ranks_per_node=2).has_line(marked)
    assert not LogChoice(rank=6, ranks_per_node=2).has_line(plain)
    # The agent leaves lines of JSON as they are. They belong to the first rank of the node.
    json = line(log, '{"event": "train"}', "3")
    assert LogChoice(rank=6, ranks_per_node=2).has_line(json)
    assert not LogChoice(rank=7, ranks_per_node=2).has_line(json)
    # With one rank per node, lines have no marks.
    assert LogChoice(rank=3).has_line(plain)
    assert not LogChoice(attempt=3).has_line(plain)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("90", 90), ("5m", 300), ("1h30m", 5400), (None, None)]
)
def test_a_duration(text, seconds):
    assert read_duration(text, "--since") == seconds


@pytest.mark.parametrize("text", ["", "5d", "m", "-1s", "1.5h"])
def test_a_duration_of_another_form_is_refused(text):
    with pytest.raises(typer.BadParameter, match="must be a duration such as 90s"):
        read_duration(text, "--since")


def test_an_attempt_needs_the_whole_log():
    with pytest.raises(ValueError, match="cannot be chosen together"):
        LogChoice(attempt=1, tail=5)


def test_lines_are_in_the_order_of_their_times():
    one, two = PodLog.from_pod(a_pod("j-0-0", "0")), PodLog.from_pod(a_pod("j-0-1", "1"))
    lines = [
        line(two, "b", "2"),
        line(one, "c", "2"),
        line(one, "d", "3"),
        line(two, "[rank1]: e", "4"),
    ]
    assert [one.text for one in sorted(lines)] == ["c", "b", "d", "[rank1]: e"]


def test_nodes_are_indices_and_ranges():
    assert read_nodes(["3", "0-1,5"]) == {0, 1, 3, 5}
    with pytest.raises(typer.BadParameter, match="must be an index of a node"):
        read_nodes(["a"])
    with pytest.raises(typer.BadParameter, match="the first index must not be the larger one"):
        read_nodes(["5-2"])
