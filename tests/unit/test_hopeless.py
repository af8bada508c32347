"""Failures that another attempt would repeat: the same error, and attempts without progress."""

from dataclasses import replace

import pytest
from builders.containers import ended, failed, oom_killed, running
from builders.jobs import WHAT_TO_DO, a_running_job
from builders.messages import agent_report, torchrun_summary
from builders.plans import budgets_used, plan_for, written
from builders.pods import a_pod
from builders.surroundings import disruption_target
from builders.times import NOW, at

from ddpjob.core.api.history import MAX_ATTEMPT_MESSAGE, EndedAttempt, Retried
from ddpjob.core.api.names import Condition
from ddpjob.core.api.reasons import Reason
from ddpjob.core.decide.script_errors import is_permanent

NO_MODULE = "ModuleNotFoundError: No module named 'tqdm'"


def with_policy(**policy):
    return {"failurePolicy": policy}


# The same error again


def an_attempt(attempt=0, error=NO_MODULE, *, end=-40, cause="Failure", pod=None, **fields):
    """Return the entry of an attempt, ended `end` seconds after NOW."""
    pod = pod or f"digits-{attempt}-1"
    message = f"rank 1 in pod {pod} failed with exit code 1: {error}"[:MAX_ATTEMPT_MESSAGE]
    return EndedAttempt(attempt, cause, "WorkerFailed", message, pod=pod, end=at(end), **fields)


def after(*attempts, **fields):
    """Return a running job after these attempts, the newest first."""
    failures = sum(entry.cause in ("Failure", "Hang") for entry in attempts)
    fields = {"failures": failures, **fields}
    return a_running_job(attempt=len(attempts), attempts=attempts, **fields)


def fails_with(job, error=NO_MODULE, *, rank=1, **report):
    """Return the status after one pod of the current attempt has failed with an exception."""
    attempt = job.status.attempt.number
    end = failed(agent_report(attempt, rank=rank, exception=error, **report))
    pods = a_pod(0, running(), attempt=attempt), a_pod(1, end, attempt=attempt)
    return plan_for(job, *pods).status


def test_an_error_of_the_script_that_two_attempts_have_ended_by_ends_the_job():
    status = fails_with(after(an_attempt()))
    assert (status.phase, status.reason) == ("Failed", Reason.SAME_ERROR)
    assert status.message == (
        "rank 1 in pod digits-1-1 failed with exit code 1: ModuleNotFoundError: No module named "
        "'tqdm'; the same error ended attempt 0 and attempt 1 on new pods, so another attempt "
        f"would not help; correct the script or the image; {WHAT_TO_DO}"
    )
    assert status.budget.failures == 1


def test_a_job_begins_two_attempts_if_its_script_cannot_be_imported():
    # The second attempt begins after 30 s, on new pods.
    job = a_running_job()
    ends = []
    for attempt, seconds in enumerate((0, 38)):
        end = failed(agent_report(attempt, exception=NO_MODULE))
        pods = a_pod(0, end, attempt=attempt), a_pod(1, end, attempt=attempt)
        job = written(job, plan_for(job, *pods, now=at(seconds)))
        ends.append(job.status.reason)
    assert ends == ["Failure", "SameErrorAgain"]
    assert "the same error ended attempt 0 and attempt 1 on new pods" in job.status.message


@pytest.mark.parametrize(("error", "wait"), [(NO_MODULE, 30), ("ValueError: boom", 0)])
def test_an_error_that_each_attempt_may_have_delays_the_next_one(error, wait):
    job = a_running_job()
    end = failed(agent_report(0, exception=error))
    job = written(job, plan_for(job, a_pod(0, running()), a_pod(1, end)))
    assert job.status.backoff.until == at(wait)
    waiting = plan_for(job, now=at(1)).status.message
    expected = "backing off for 30 s before attempt 1: the last failed attempt trained for less"
    assert waiting.startswith(expected) is (wait == 30)


def test_a_wait_after_a_long_attempt_does_not_count_failed_ones():
    job = a_running_job()
    began = {"0": at(350).timestamp()}
    end = failed(agent_report(0, exception=NO_MODULE, trained=began))
    job = written(job, plan_for(job, a_pod(0, running()), a_pod(1, end), now=at(360)))
    assert job.status.backoff.count == 0
    message = plan_for(job, now=at(361)).status.message
    assert (
        message == "backing off for 30 s before attempt 1: the last error may have passed by then"
    )


@pytest.mark.parametrize(
    ("error", "is_found"),
    [
        (NO_MODULE, True),
        ("ImportError: libcudart.so.12: cannot open shared object file", True),
        ("SyntaxError: invalid syntax", True),
        ("IndentationError: unexpected indent", True),
        ("TabError: inconsistent use of tabs", True),
        ("NameError: name 'x' is not defined", True),
        ("UnboundLocalError: cannot access local variable 'x'", True),
        ("AttributeError: 'Model' object has no attribute 'fit'", True),
        ("TypeError: main() takes 0 positional arguments but 1 was given", True),
        ("TypeError", True),
        ("torch.AttributeError: x", True),
        ("RuntimeError: CUDA error: no kernel image is available for execution", True),
        ("torch.AcceleratorError: CUDA error: no kernel image is available", True),
        ("OSError: [Errno 5] Input/output error", False),
        ("PermissionError: [Errno 13] Permission denied: '/checkpoints/x'", False),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data'", False),
        ("ConnectionError: TypeError: x", False),
        ("ValueError: boom", False),
        ("RuntimeError: CUDA error: out of memory", False),
        ("MyTypeError: x", False),
        ("", False),
    ],
)
def test_only_errors_that_a_new_pod_cannot_heal_count(error, is_found):
    assert is_permanent(error) is is_found


def test_an_error_of_the_operating_system_uses_the_budget():
    error = "PermissionError: [Errno 13] Permission denied: '/checkpoints/digits'"
    status = fails_with(after(an_attempt(error=error)), error)
    assert (status.attempt.number, status.budget.failures) == (2, 2)


LONG = "TypeError: " + "x" * 400

# The history before an attempt that ends by NO_MODULE, and whether the job then ends.
HISTORIES = {
    "30 s before": ((an_attempt(end=-30),), {}, True),
    "29 s before": ((an_attempt(end=-29),), {}, False),
    "29 s before, and once more 60 s before": (
        (an_attempt(1, end=-29), an_attempt(0, end=-60)),
        {},
        True,
    ),
    "another error": ((an_attempt(error="ModuleNotFoundError: No module named 'x'"),), {}, False),
    "a longer error": ((an_attempt(error=f"{NO_MODULE}; 'tqdm' is not a package"),), {}, False),
    "a shorter error": ((an_attempt(error="ModuleNotFoundError"),), {}, False),
    "another error between": (
        (an_attempt(1, "ValueError: boom", end=-29), an_attempt(0)),
        {},
        False,
    ),
    "a disruption between": ((an_attempt(1, cause="Disruption", end=-29), an_attempt()), {}, False),
    "a hang": ((an_attempt(cause="Hang"),), {}, False),
    "the same pod": ((an_attempt(pod="digits-1-1"),), {}, False),
    "no pod": ((replace(an_attempt(), pod=""),), {}, False),
    "no end": ((replace(an_attempt(), end=None),), {}, False),
    "no message": ((replace(an_attempt(), message=""),), {}, False),
    "before the job was taken up again": ((an_attempt(),), {"retried": Retried(1, 1)}, False),
    "one of two before the job was taken up again": (
        (an_attempt(1, end=-29), an_attempt()),
        {"retried": Retried(1, 1)},
        False,
    ),
    "the first one on another rank": (
        (
            replace(
                an_attempt(),
                message=f"rank 70 in pod digits-0-1 failed with exit code 1: {NO_MODULE}",
            ),
        ),
        {},
        True,
    ),
    "an attempt that made steps": ((an_attempt(first_step=0, last_step=9),), {}, False),
    "an attempt that named one step": ((an_attempt(first_step=9, last_step=9),), {}, True),
    "steps long ago": (
        (an_attempt(1), an_attempt(0, cause="Disruption", first_step=0, last_step=9)),
        {},
        False,
    ),
    "a minute of training": ((an_attempt(),), {"seconds": {"training": 60}}, False),
    "less than a minute of training": ((an_attempt(),), {"seconds": {"training": 59}}, True),
    "an attempt that trains for a minute": (
        (an_attempt(),),
        {"activity": "training", "since": at(-60)},
        False,
    ),
    "an attempt that trains for less than a minute": (
        (an_attempt(),),
        {"activity": "training", "since": at(-59)},
        True,
    ),
    "no attempt": ((), {}, False),
}


@pytest.mark.parametrize("history", HISTORIES)
def test_the_same_error_ends_a_job_that_never_trained_after(history):
    attempts, fields, ends = HISTORIES[history]
    status = fails_with(after(*attempts, **fields))
    assert (status.reason == Reason.SAME_ERROR) is ends
    assert status.has(Condition.FAILED) is ends


def test_an_attempt_that_made_steps_itself_is_none_that_never_trained():
    status = fails_with(after(an_attempt()), steps={"1": [0, 9]})
    assert status.attempt.number == 2


@pytest.mark.parametrize(("first", "ends"), [(-59, True), (-60, False)])
def test_an_attempt_that_prepared_for_long_before_its_first_step_has_not_trained(first, ends):
    met = at(-600)
    job = after(an_attempt(end=-700), running_time=met, activity="training", since=met)
    status = fails_with(job, trained={"1": at(first).timestamp()})
    assert (status.reason == Reason.SAME_ERROR) is ends


def test_of_a_long_message_the_part_counts_that_the_history_keeps():
    assert fails_with(after(an_attempt(error=LONG)), LONG).reason == Reason.SAME_ERROR
    other = LONG.replace("x", "y")
    assert fails_with(after(an_attempt(error=LONG)), other).attempt.number == 2


def test_an_error_in_a_pod_that_stayed_does_not_count():
    # In the pod of attempt 0, rank 0 runs for the second time.
    job = after(an_attempt(), births=(0, 1))
    end = failed(agent_report(1, rank=0, exception=NO_MODULE))
    stayed = a_pod(0, end, attempt=1)
    stayed["metadata"] |= {"name": "digits-0-0"}
    plan = plan_for(job, stayed, a_pod(1, running(), attempt=1))
    assert (plan.status.attempt.number, budgets_used(plan)) == (2, (2, 0))


def test_a_pod_without_an_agent_has_its_error_in_torchruns_summary():
    end = failed(torchrun_summary(1, error=NO_MODULE))
    pods = a_pod(0, running(), attempt=1), a_pod(1, end, attempt=1)
    assert plan_for(after(an_attempt()), *pods).status.reason == Reason.SAME_ERROR


def test_a_launcher_that_cannot_be_imported_has_no_rank():
    message = "pod digits-0-1 failed with exit code 1: ModuleNotFoundError: No module named 'torch'"
    job = after(replace(an_attempt(), message=message), undecided_since=at(-10))
    end = ended(1, "ModuleNotFoundError: No module named 'torch'")
    pods = a_pod(0, running(), attempt=1), a_pod(1, end, attempt=1)
    assert plan_for(job, *pods).status.reason == Reason.SAME_ERROR


def test_the_same_error_is_named_also_if_the_budget_is_used_up():
    job = after(an_attempt(), spec=with_policy(maxRestarts=1))
    assert fails_with(job).reason == Reason.SAME_ERROR
    job = after(an_attempt(), spec=with_policy(maxRestarts=0))
    assert fails_with(job, "ValueError: boom").reason == Reason.MAX_RESTARTS


def test_a_job_that_was_taken_up_again_has_two_attempts_again():
    attempts = fails_with(after(an_attempt())).attempts
    job = a_running_job(attempt=2, attempts=attempts, failures=1, retried=Retried(1, failures=1))
    assert fails_with(job).attempt.number == 3


# Attempts without progress


def an_attempt_of(attempt, first, last, cause="Failure"):
    return EndedAttempt(attempt, cause, "x", "boom", first_step=first, last_step=last)


def after_steps(*steps, limit=3, cause="Failure", **fields):
    """Return a job after attempts with these (first step, last step, cause), the newest first."""
    count = len(steps)
    attempts = [an_attempt_of(count - 1 - place, *entry) for place, entry in enumerate(steps)]
    policy = {"maxRestarts": 100, "maxAttemptsWithoutProgress": limit}
    return after(*attempts, spec=with_policy(**policy), **fields)


def fails_at(job, first, last, **report):
    """Return the status after an attempt has ended at a step."""
    steps = {} if first is None else {str(job.status.attempt.number): [first, last]}
    return fails_with(job, "ValueError: boom", rank=0, steps=steps, **report)


def test_attempts_that_end_at_the_step_at_which_they_began_end_the_job():
    status = fails_at(after_steps((100, 100), (100, 100)), 100, 100)
    assert (status.phase, status.reason) == ("Failed", Reason.NO_PROGRESS)
    assert status.message == (
        "rank 0 in pod digits-2-1 failed with exit code 1: ValueError: boom; 3 failed attempts "
        "made no progress: each ended at or before the step at which it began (the last at step "
        f"100); failurePolicy.maxAttemptsWithoutProgress is 3; {WHAT_TO_DO}"
    )
    assert status.budget.failures == 2


STUCK = (100, 100)

# The (first step, last step, cause) of the attempts before, newest first; those of the attempt that
# fails now; and whether the job then ends. Three attempts without progress are too many.
STEPS = {
    "two before": ((STUCK, STUCK), STUCK, True),
    "only one before": ((STUCK,), STUCK, False),
    "an end before the first step": (((100, 90), STUCK), STUCK, True),
    "a step forward now": ((STUCK, STUCK, STUCK), (100, 101), False),
    "a step forward between": ((STUCK, (90, 100), STUCK, STUCK), STUCK, False),
    "a step forward long ago": ((STUCK, STUCK, (0, 100)), STUCK, True),
    "a later beginning": ((STUCK, (90, 90), STUCK), STUCK, False),
    "an earlier beginning": ((STUCK, (110, 110)), STUCK, True),
    "hangs": (((*STUCK, "Hang"), (*STUCK, "Hang")), STUCK, True),
    "unknown steps between": (((None, None), STUCK, (None, None), STUCK), STUCK, True),
    "unknown steps only": (((None, None),) * 5, (None, None), False),
    "disrupted attempts": (((*STUCK, "Disruption"),) * 5, STUCK, False),
    "resized attempts": (((*STUCK, "Resized"),) * 5, STUCK, False),
    "suspended attempts": (((*STUCK, "Suspended"),) * 5, STUCK, False),
    "attempts that gave way": (((*STUCK, "Yielded"),) * 5, STUCK, False),
    "a disrupted attempt between": ((STUCK, (*STUCK, "Disruption"), STUCK), STUCK, True),
    "a disrupted attempt that made steps": (
        (STUCK, (100, 120, "Disruption"), STUCK),
        STUCK,
        False,
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_attempts_without_progress_are_counted_with(case):
    before, now, ends = STEPS[case]
    status = fails_at(after_steps(*before), *now)
    assert (status.reason == Reason.NO_PROGRESS) is ends
    assert status.has(Condition.FAILED) is ends


def test_by_default_the_fifth_attempt_without_progress_ends_the_job():
    policy = with_policy(maxRestarts=100)
    entries = [an_attempt_of(attempt, 7, 7) for attempt in range(3, -1, -1)]
    assert fails_at(after(*entries[1:], spec=policy), 7, 7).attempt.number == 4
    assert fails_at(after(*entries, spec=policy), 7, 7).reason == Reason.NO_PROGRESS


def test_with_a_limit_of_1_the_first_attempt_without_progress_ends_the_job():
    assert fails_at(after_steps(limit=1), 7, 7).reason == Reason.NO_PROGRESS
    assert fails_at(after_steps(limit=1), 7, 8).attempt.number == 1


@pytest.mark.parametrize(("failures", "ends"), [(0, True), (1, False)])
def test_attempts_before_the_job_was_taken_up_again_do_not_count(failures, ends):
    job = after_steps(STUCK, STUCK, failures=2, retried=Retried(1, failures=failures))
    assert (fails_at(job, *STUCK).reason == Reason.NO_PROGRESS) is ends


def test_a_disruption_never_ends_a_job_for_lack_of_progress():
    job = after_steps(STUCK, STUCK, STUCK)
    drained = a_pod(1, {**running(), "conditions": [disruption_target()]}, attempt=3)
    plan = plan_for(job, a_pod(0, running(), attempt=3), drained)
    assert plan.status.attempt.number == 4


def test_the_steps_of_an_attempt_that_ran_out_of_memory_may_be_known_from_another_pod():
    job = after_steps(STUCK, STUCK)
    report = agent_report(2, "Stopped", rank=None, exit_code=143, steps={"2": [100, 100]})
    pods = a_pod(0, ended(143, report), attempt=2), a_pod(1, oom_killed(when=NOW), attempt=2)
    assert plan_for(job, *pods).status.reason == Reason.NO_PROGRESS
