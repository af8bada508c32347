"""Jobs as people see them: a list, and one with all its details."""

import re
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ddpjob.core.api.reasons import PAGE, Reason
from ddpjob.jobs.progress import Progress
from ddpjob.jobs.user_job import DDPJob
from ddpjob.show.advice import next_commands
from ddpjob.show.jobs import job_lines, job_table
from ddpjob.show.text import duration, rounded

DOCS = Path(__file__).parents[2] / "docs"
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def at(seconds):
    return (NOW + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def a_job(name="digits", spec=None, **status):
    return DDPJob.from_manifest(
        {
            "apiVersion": "ddpjob.dev/v1alpha1",
            "kind": "DDPJob",
            "metadata": {
                "name": name,
                "namespace": "team",
                "uid": f"uid-{name}",
                "creationTimestamp": at(-90),
            },
            "spec": {"image": "i:1", "args": ["a.py"], "nodes": 2, **(spec or {})},
            "status": status,
        }
    )


def texts(lines):
    return [line.plain for line in lines]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (12000, "3h20m")],
)
def test_a_duration_is_short(seconds, text):
    assert duration(timedelta(seconds=seconds)) == text


def test_days_have_hours_for_a_week():
    assert duration(timedelta(days=2, hours=3)) == "2d3h"
    assert duration(timedelta(days=9, hours=3)) == "9d"


def test_the_time_has_what_goes_on():
    job = a_job(account={"seconds": {"starting": 10}, "activity": "training", "since": at(-30)})
    lines = texts(job_lines(job, Progress(), [], NOW))
    assert "Time        starting 10 s, training 30 s (goodput 75%)" in lines


def test_training_without_a_known_first_step_is_named_so():
    ran = {"attempt": 0, "runningTime": "2026-11-21T12:00:00Z"}
    times = {"trainingTime": "2026-11-21T12:00:09Z", "untrainedSeconds": 9}
    seconds = {"starting": 10, "training": 30}
    unknown = a_job(account={"seconds": seconds}, attempts=[ran])
    known = a_job(account={"seconds": seconds}, attempts=[{**ran, **times}])
    text = "Time        starting 10 s, training 30 s since the workers met (goodput 75%)"
    assert text in texts(job_lines(unknown, Progress(), [], NOW))
    plain = "Time        starting 10 s, training 30 s (goodput 75%)"
    assert plain in texts(job_lines(known, Progress(), [], NOW))


def lines_of(reason):
    return texts(job_lines(a_job(reason=reason, message="m"), Progress(), [], NOW))


def rows_of_the_page():
    """Return the anchors of the rows of reasons, as the documentation has them."""
    return set(re.findall(r'^\| <a id="([^"]+)">', (DOCS / PAGE).read_text(), re.MULTILINE))


def documentation():
    """Return the address of the folder docs, as operator/pyproject.toml has it."""
    project = tomllib.loads((DOCS.parent / "operator/pyproject.toml").read_text())["project"]
    return project["urls"]["Documentation"].removesuffix("README.md")


@pytest.mark.parametrize("reason", [one for one in Reason if one.advice])
def test_a_reason_leads_to_its_row_in_the_documentation(reason):
    assert reason.anchor in rows_of_the_page()
    assert f"See         {documentation()}{PAGE}#{reason.anchor}" in lines_of(reason)


@pytest.mark.parametrize("reason", [one for one in Reason if not one.advice])
def test_a_reason_that_asks_for_nothing_leads_nowhere(reason):
    assert not [line for line in lines_of(reason) if line.startswith(("See", "What to do"))]


def test_a_short_advice_is_shown_without_the_marks_of_markdown():
    deadline, security = lines_of(Reason.DEADLINE), lines_of(Reason.POD_SECURITY)
    assert "What to do  raise it, then take the job up again" in deadline
    assert not [line for line in security if line.startswith("What to do")]


def test_a_reason_of_kubernetes_leads_to_the_page_of_reasons():
    assert f"See         {documentation()}{PAGE}" in lines_of("CreateContainerError")
    assert "| other reasons, such as CreateContainerError |" in (DOCS / PAGE).read_text()


def test_a_job_without_a_reason_leads_nowhere():
    assert not [line for line in lines_of("") if line.startswith("See")]


def test_a_job_says_whether_its_pods_stay():
    recreate = texts(job_lines(a_job(), Progress(), [], NOW))
    job = a_job(spec={"checkpoint": {"claimName": "c"}})
    in_place = texts(job_lines(job, Progress(), [], NOW))
    reason = "default: without spec.checkpoint or a shared volume"
    assert f"Recovery    Recreate ({reason})" in recreate
    assert "Recovery    InPlace (default: with spec.checkpoint)" in in_place


def test_a_table_has_a_line_for_each_job_and_no_space_at_the_ends():
    running = a_job(phase="Running", reason="NodesRunning", nodes={"desired": 2, "ready": 2})
    jobs = [running, a_job("new")]
    lines = texts(job_table(jobs, {"uid-digits": Progress(step=5, steps=10)}, NOW))
    assert lines[0].split() == ["NAME", "PHASE", "NODES", "RESTARTS", "STEP", "REASON", "AGE"]
    assert lines[1].split() == ["digits", "Running", "2/2", "0", "5/10", "NodesRunning", "90s"]
    assert lines[2].split() == ["new", "Pending", "0/2", "0", "90s"]
    assert all(line == line.rstrip() for line in lines)


def test_a_finished_job_has_the_last_step_of_its_last_attempt():
    last = {"attempt": 1, "lastStep": 138}
    job = a_job(phase="Complete", attempts=[last, {"lastStep": 7}])
    assert texts(job_table([job], {}, NOW))[1].split()[4] == "138"
    job = a_job(phase="Complete", attempts=[{**last, "totalSteps": 140}])
    assert texts(job_table([job], {}, NOW))[1].split()[4] == "138/140"


def test_a_wide_table_of_all_namespaces_has_more_columns():
    job = a_job(account={"seconds": {"starting": 10, "training": 90}})
    lines = texts(job_table([job], {}, NOW, wide=True, namespaces=True))
    assert lines[1].split() == ["team", "digits", "Pending", "0/2", "0", "90s", "cpu", "90%", "i:1"]


def test_all_that_concerns_a_job_is_shown():
    job = a_job(
        spec={"checkpoint": {"claimName": "ckpt"}, "activeDeadlineSeconds": 600},
        phase="Running",
        reason="NodesRunning",
        message="attempt 1 runs on 2 nodes",
        attempt={"number": 1},
        nodes={"desired": 2, "ready": 2},
        resolved={"nprocPerNode": 1, "accelerator": "cpu"},
        budget={"failures": 1},
        account={"seconds": {"starting": 10, "training": 90}},
        operator={"activeSince": at(-60)},
        attempts=[
            {
                "attempt": 0,
                "cause": "Failure",
                "message": "rank 1 failed",
                "rank": 1,
                "pod": "digits-0-1",
                "node": "worker",
                "start": at(-90),
                "end": at(-60),
                "stepsLost": 12,
            }
        ],
    )
    progress = Progress(step=5, steps=10, checkpoint_step=4, checkpoint_time=NOW)
    text = "\n".join(texts(job_lines(job, progress, [], NOW)))
    assert "digits  Running  namespace team, created 90s ago" in text
    assert "Reason      NodesRunning: attempt 1 runs on 2 nodes" in text
    assert (
        "Nodes       2/2 ready, 1 process each, accelerator cpu, 1 failure, 0 disruptions" in text
    )
    assert "Progress    step 5/10" in text
    assert "Checkpoint  step 4, 0s ago; claim ckpt, folder digits/" in text
    assert "Time        starting 10 s, training 90 s (goodput 90%)" in text
    assert "Next        activeDeadlineSeconds ends the job in 9m" in text
    assert "0   Failure   30s" in text
    assert "rank 1 digits-0-1 on worker" in text


def test_the_message_of_an_attempt_is_cut_in_a_terminal_only():
    message = "rank 1 failed: " + "x" * 200
    job = a_job(attempts=[{"attempt": 0, "cause": "Failure", "message": message}])
    assert message in texts(job_lines(job, Progress(), [], NOW))[-1]
    shown = texts(job_lines(job, Progress(), [], NOW, message_width=20))[-1]
    assert shown.endswith("rank 1 failed: xxxx…")
    short = a_job(attempts=[{"attempt": 0, "cause": "Failure", "message": "x" * 20}])
    assert texts(job_lines(short, Progress(), [], NOW, message_width=20))[-1].endswith(
        " " + "x" * 20
    )


def test_a_job_that_no_operator_has_seen_says_what_to_do():
    text = "\n".join(texts(job_lines(a_job(), Progress(), [], NOW)))
    assert "no operator has seen the job yet; ddpjob doctor finds out why" in text


def test_a_status_of_any_shape_is_shown():
    attempts = [{}, {"attempt": "x", "start": 5, "stepsLost": None}]
    job = a_job(
        phase=5,
        attempts=attempts,
        account={"seconds": {"training": "x"}},
        resolved={"nprocPerNode": "a"},
    )
    assert texts(job_lines(job, Progress(), [], NOW))


@pytest.mark.parametrize(
    ("holds", "lines"), [("False", ["Hangs       no heartbeats"]), ("True", [])]
)
def test_a_job_of_which_hangs_are_not_detected_says_so(holds, lines):
    condition = {"type": "HangsDetected", "status": holds, "message": "no heartbeats"}
    job = a_job(phase="Running", conditions=[condition])
    shown = texts(job_lines(job, Progress(), [], NOW))
    assert [line for line in shown if line.startswith("Hangs")] == lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [("0.9861111111111112", "0.9861"), ("1234567", "1234567"), ("none", "none"), ("1e-9", "1e-09")],
)
def test_a_result_is_rounded(text, shown):
    assert rounded(text) == shown
    (line,) = [one for one in shown_texts(a_job(result={"x": text})) if one.startswith("Result")]
    assert line == f"Result      x {shown}"


def shown_texts(job):
    return texts(job_lines(job, Progress(), [], NOW))


def test_after_a_failure_the_next_commands_are_about_its_rank():
    condition = {"type": "Failed", "status": "True", "lastTransitionTime": at(0)}
    job = a_job(conditions=[condition], lastFailure={"attempt": 2, "rank": 5})
    assert list(next_commands(job, " -n team")) == [
        "ddpjob logs digits -n team --attempt 2 --rank 5",
        "ddpjob retry digits -n team",
    ]
    assert "ddpjob logs digits" in next_commands(a_job(conditions=[condition]))


def test_after_success_the_next_commands_show_and_delete_the_job():
    condition = {"type": "Complete", "status": "True", "lastTransitionTime": at(0)}
    job = a_job(conditions=[condition])
    assert list(next_commands(job)) == ["ddpjob logs digits", "ddpjob delete digits"]
