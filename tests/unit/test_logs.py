"""The lines of pods' logs: their attempts and ranks, and a user's choice of them."""

import pytest
import typer

from ddpjob import DDPJob
from ddpjob.cli.commands import submit
from ddpjob.cli.commands.logs import LogOptions, logs, read_nodes
from ddpjob.cli.options import read_duration
from ddpjob.client.local import LocalClient
from ddpjob.client.logs import LogChoice, LogLine, PodLog, merged_logs
from ddpjob.client.reader import JobReader
from ddpjob.core.api.readers import SpecError
from ddpjob.jobs.lost_logs import previous_attempt, ranges


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
        LogChoice(attempt=1, since=5)


class Api:
    """An API server with the log of one pod, of two attempts."""

    TEXTS = ("a", "b", "c", "ddpjob agent: attempt 1 begins", "d")

    def __init__(self):
        self.query = {}

    async def stream(self, request):
        self.query = request.query
        for second, text in enumerate(self.TEXTS):
            yield f"2026-01-01T00:00:0{second}Z {text}".encode()


@pytest.mark.parametrize(
    ("choice", "texts"),
    [
        (LogChoice(attempt=0, tail=2), ["b", "c"]),
        (LogChoice(attempt=0, tail=9), ["a", "b", "c"]),
        (LogChoice(attempt=0, tail=0), []),
        (LogChoice(attempt=1, tail=1), ["d"]),
    ],
)
async def test_the_tail_of_an_attempt_has_its_last_lines(choice, texts):
    api = Api()
    found = [one.text async for one in merged_logs(api, [a_pod("j-0-0", "0")], choice)]
    assert found == texts
    # The last lines of the whole log are those of another attempt.
    assert "tailLines" not in api.query


async def test_the_tail_of_a_whole_log_is_requested():
    api = Api()
    lines = [one async for one in merged_logs(api, [a_pod("j-0-0", "0")], LogChoice(tail=2))]
    assert lines
    assert api.query["tailLines"] == "2"


def test_the_tail_of_an_attempt_in_a_local_run_has_its_last_lines(tmp_path, monkeypatch):
    client = LocalClient(tmp_path)
    monkeypatch.setattr(client, "get", lambda name: a_job(1))
    logs = tmp_path / "digits" / "logs"
    logs.mkdir(parents=True)
    (logs / "digits-0-0.log").write_text("\n".join(Api.TEXTS))
    found = client.logs("digits", LogChoice(attempt=0, tail=2))
    assert [one.text for one in found] == ["b", "c"]


async def test_the_tail_of_an_attempt_cannot_be_followed():
    items = JobReader(None, "ml").follow("digits", LogChoice(attempt=0, tail=2))
    with pytest.raises(ValueError, match="the tail of an attempt cannot be followed"):
        await anext(items)


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


# -- lost logs


class FakeClient:
    """A client of one job with lines of its pods: (attempt, node, text)."""

    namespace = "team"

    def __init__(self, job, *lines):
        self.job = job
        self.lines = [
            LogLine(str(n), node, "p", a, text) for n, (a, node, text) in enumerate(lines)
        ]

    async def get(self, name):
        return self.job

    async def logs(self, name, choice):
        for one in self.lines:
            if choice.attempt in (None, one.attempt) and one.index in (choice.nodes or {0, 1}):
                yield one

    async def follow(self, name, choice, namespace=None):
        for item in (*self.lines, self.job):
            yield item


def a_job(number, *causes, phase="Running", active=2):
    """Return a job in an attempt, with the causes of its ended attempts, the newest first."""
    first = number if phase in ("Complete", "Failed", "Suspended") else number - 1
    attempts = [
        {"attempt": first - place, "cause": cause, "message": f"ended by {cause}"}
        for place, cause in enumerate(causes)
    ]
    condition = {"type": phase, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {
        "phase": phase,
        "message": "for a test",
        "attempt": {"number": number},
        "attempts": attempts,
        "nodes": {"desired": 2, "active": active},
        "conditions": [condition],
    }
    body = DDPJob.create("digits", namespace="team", image="i", args=["a.py"], nodes=2).manifest()
    return DDPJob.from_manifest({**body, "status": status})


BEGINS = "ddpjob agent: attempt begins"


async def printed(capsys, client, choice, **options):
    await logs(client, "digits", choice, LogOptions(prefix=False, **options))
    shown = capsys.readouterr()
    return shown.out.splitlines(), shown.err.splitlines()


async def test_earlier_attempts_of_a_pod_that_stayed_can_be_read(capsys):
    lines = [(0, 0, BEGINS), (0, 0, "a"), (0, 1, "b"), (1, 0, "c")]
    client = FakeClient(a_job(1, "Failure"), *lines)
    out, err = await printed(capsys, client, LogChoice(), previous=True)
    assert (out, err) == ([BEGINS, "a", "b"], [])


async def test_no_line_of_an_attempt_that_is_asked_for_is_no_lost_log(capsys):
    client = FakeClient(a_job(1, "Failure"))
    out, err = await printed(capsys, client, LogChoice(tail=0), previous=True)
    assert (out, err) == ([], ["no line matches; job digits is Running: for a test"])


async def test_the_log_of_a_pod_that_was_replaced_is_named(capsys):
    client = FakeClient(a_job(1, "Failure"), (0, 0, "a"), (1, 0, "b"), (1, 1, "c"))
    out, err = await printed(capsys, client, LogChoice(attempt=0))
    assert out == ["a"]
    assert err == ["no log of node 1 in attempt 0: its pod is deleted, and the log is gone with it"]


@pytest.mark.parametrize(("cause", "phase"), [("Suspended", "Suspended"), ("Resized", "Running")])
async def test_logs_that_are_gone_with_all_pods_have_a_sentence(capsys, cause, phase):
    job = a_job(0, cause, phase=phase, active=0) if phase == "Suspended" else a_job(1, cause)
    out, err = await printed(capsys, FakeClient(job), LogChoice(), previous=True)
    assert out == []
    assert err == [
        "no log of attempt 0: its pods are deleted, and the log is gone with them; it ended with "
        f"{cause}: ended by {cause}"
    ]


async def test_all_logs_name_the_attempts_that_are_gone(capsys):
    job = a_job(3, "Failure", "Failure", "Suspended")
    out, err = await printed(capsys, FakeClient(job, (3, 0, "a"), (3, 1, "b")), LogChoice())
    assert out == ["a", "b"]
    assert err == [
        "no log of attempts 0-2: a log goes with its pod; ddpjob status digits has the message of "
        "each"
    ]


async def test_a_rank_that_has_written_nothing_has_a_log_nevertheless(capsys):
    client = FakeClient(a_job(1, "Failure"), (0, 1, BEGINS), (1, 1, BEGINS))
    job = client.job
    job.spec["nprocPerNode"] = 2
    out, err = await printed(capsys, client, LogChoice(rank=3, attempt=0))
    assert out == []
    assert err == ["no line matches; job digits is Running: for a test"]


async def test_a_log_that_is_followed_ends_with_the_attempts_and_the_next_commands(capsys):
    client = FakeClient(a_job(0, "Failure", phase="Failed"), (0, 0, "a"))
    out, err = await printed(capsys, client, LogChoice(), follow=True)
    assert out == ["a"]
    assert err[0] == "digits Failed: for a test"
    assert err[1] == "Attempts"
    assert err[3].endswith("ended by Failure")
    assert err[-1].startswith("ddpjob retry digits")


async def test_submit_shows_lines_of_any_form_then_the_attempts_and_the_next_commands(capsys):
    job = a_job(0, "Failure", phase="Failed")
    lines = [
        (0, 0, BEGINS),
        (0, 0, '{"step": 950, "steps": 1500, "lr": 0.1}'),
        (0, 0, '{"event": "train", "step": 951, "steps": 1500, "loss": 0.1}'),
        (0, 1, "plain text"),
    ]
    assert await submit.follow(FakeClient(job, *lines), job, "") == 1
    out = capsys.readouterr().out.splitlines()
    assert out[:4] == [
        '[n0] {"step": 950, "steps": 1500, "lr": 0.1}',
        "            step 951/1500, loss 0.1000",
        "[n1] plain text",
        "Failed      for a test",
    ]
    assert out[4] == "Attempts"
    assert [line.split()[:3] for line in out[-2:]] == [
        ["Next", "ddpjob", "logs"],
        ["Next", "ddpjob", "retry"],
    ]


async def test_an_attempt_that_has_not_begun_is_refused():
    with pytest.raises(SpecError, match="has attempts 0 to 1, got 2"):
        await logs(FakeClient(a_job(1, "Failure")), "digits", LogChoice(attempt=2), LogOptions())


@pytest.mark.parametrize(
    ("job", "attempt"),
    [
        (a_job(2, "Failure", "Failure"), 1),
        (a_job(2, "Failure", "Failure", "Failure", phase="Failed"), 1),
        (a_job(2, "Suspended", "Failure", phase="Suspended"), 2),
    ],
)
def test_the_attempt_before(job, attempt):
    assert previous_attempt(job) == attempt


def test_the_first_attempt_has_none_before():
    with pytest.raises(SpecError, match="job digits has no earlier attempt"):
        previous_attempt(a_job(0))


def test_numbers_are_written_as_they_are_chosen():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
