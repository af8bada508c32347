"""Which agents are asked, and what their answers change."""

import json
from dataclasses import replace

import pytest
from builders.containers import failed, running, starting, succeeded
from builders.jobs import a_running_job
from builders.messages import follower_summary, slow_rank_summary, torchrun_tail
from builders.plans import observation, plan_for
from builders.pods import a_pod, an_agents_pod, read_pods
from builders.times import NOW, at

from ddpjob.core.api.names import Cause
from ddpjob.core.api.reasons import Reason
from ddpjob.core.decide.causes import Undecided, judge, judge_silence
from ddpjob.core.decide.inquiry import questions
from ddpjob.core.observe.agent_state import MAX_STATE, AgentState, read_state

FOLLOWER = a_pod(0, failed(follower_summary(0)))
TRAINS = AgentState(0, "training", steps=(0, 12), heartbeat=3.0)
HAS_ENDED = AgentState(0, "ending", ended=((1, 0),))
ONLY_WAITS = AgentState(0, "waiting")


def uid_of(pod):
    (found,) = read_pods(pod)
    return found.uid


def with_answers(*pods, now=NOW, nproc=1, **answers):
    """Judge an attempt with what the agents of `pod<index>` have answered."""
    by_index = {f"pod{found.index}": found.uid for found in read_pods(*pods)}
    job = a_running_job(nodes=len(pods), undecided_since=NOW)
    resolved = replace(job.status.resolved, nproc_per_node=nproc)
    job = replace(job, status=replace(job.status, resolved=resolved))
    states = {by_index[name]: state for name, state in answers.items()}
    return judge(observation(job, *pods, answers=states), now)


def asked(job, *pods, now=NOW):
    return [question.name for question in questions(observation(job, *pods), job.spec, now)]


# What is asked


def test_in_the_normal_course_no_agent_is_asked():
    assert plan_for(a_running_job(), a_pod(0, running()), a_pod(1, running())).ask == ()
    assert plan_for(a_running_job(), a_pod(0, running()), a_pod(1, starting())).ask == ()


def test_the_pods_that_have_not_ended_are_asked_when_another_one_has_failed():
    plan = plan_for(a_running_job(nodes=3), FOLLOWER, a_pod(1, running()), a_pod(2, starting()))
    assert [(question.name, question.attempt) for question in plan.ask] == [
        ("digits-0-1", 0),
        ("digits-0-2", 0),
    ]


def test_pods_that_are_not_ready_are_asked_after_ten_seconds():
    pods = a_pod(0, running()), a_pod(1, starting())
    assert asked(a_running_job(silent_since=at(-9)), *pods) == []
    assert asked(a_running_job(silent_since=at(-10)), *pods) == ["digits-0-1"]


def test_pods_that_have_not_met_are_asked_after_a_minute():
    pods = [a_pod(index, starting(since=at(-61))) for index in range(2)]
    job = a_running_job(ran=False)
    assert asked(job, *pods, now=at(-2)) == []
    assert asked(job, *pods) == ["digits-0-0", "digits-0-1"]


def test_all_pods_that_have_not_ended_are_asked():
    # A pod that was not asked would look like one without an answer.
    pods = [a_pod(index, running()) for index in range(1, 20)]
    assert len(asked(a_running_job(nodes=20), FOLLOWER, *pods)) == 19


# What an answer changes


def test_a_rank_that_has_ended_with_0_is_the_cause_at_once():
    verdict = with_answers(FOLLOWER, a_pod(1, running()), pod1=HAS_ENDED)
    assert (verdict.cause, verdict.reason) == (Cause.FAILURE, Reason.ENDED_EARLY)
    assert (verdict.index, verdict.rank, verdict.exit_code) == (1, 1, 0)
    assert verdict.message == (
        "rank 1 in pod digits-0-1 ended with exit code 0 while rank 0 was still training: do all "
        "ranks make the same number of steps?"
    )
    assert not verdict.blames_node


def test_a_pod_that_has_succeeded_while_its_peer_trained_has_ended_too_early():
    # The peer hosts the rendezvous, so torchrun in this pod does not wait for it.
    pods = FOLLOWER, a_pod(1, succeeded()), a_pod(2, running())
    verdict = with_answers(*pods, pod2=TRAINS, nproc=4)
    assert (verdict.cause, verdict.reason, verdict.index) == (Cause.FAILURE, Reason.ENDED_EARLY, 1)
    assert verdict.message.startswith("rank 4 in pod digits-0-1 ended with exit code 0 while rank")
    own = a_pod(0, failed(torchrun_tail("raise")))
    assert with_answers(own, a_pod(1, succeeded())).reason == "WorkerFailed"


def test_of_several_ranks_that_ended_early_and_failed_the_first_ones_are_named():
    pods = FOLLOWER, a_pod(1, failed(follower_summary(1))), a_pod(2, running())
    state = AgentState(0, "ending", ended=((8, 0), (9, 0)))
    verdict = with_answers(*pods, pod2=state)
    assert (verdict.rank, verdict.reason) == (8, Reason.ENDED_EARLY)
    assert "while rank 0 was still training" in verdict.message


def test_a_failed_rank_of_any_pod_is_named_also_if_another_pod_gives_no_answer():
    pods = FOLLOWER, a_pod(1, running()), a_pod(2, running())
    state = AgentState(0, "ending", ended=((2, -9),))
    verdict = with_answers(*pods, pod2=state, now=at(10))
    assert (verdict.rank, verdict.exit_code) == (2, -9)


def test_the_answer_of_an_earlier_attempt_counts_for_nothing():
    pods = [a_pod(0, failed(follower_summary(0)), attempt=1), a_pod(1, running(), attempt=1)]
    answers = {uid_of(pods[1]): AgentState(0, "ending", ended=((1, 0),))}
    job = a_running_job(attempt=1, undecided_since=NOW)
    assert isinstance(judge(observation(job, *pods, answers=answers), NOW), Undecided)


@pytest.mark.parametrize(
    ("count", "words"),
    [(5, "digits-0-5 on node node-5"), (6, "digits-0-5 on node node-5 and 1 more")],
)
def test_at_most_five_silent_pods_are_named(count, words):
    pods = [a_pod(index, running()) for index in range(1, count + 1)]
    verdict = with_answers(FOLLOWER, *pods, now=at(10))
    assert f"{words}, which has not ended" in verdict.message


def test_of_several_silent_pods_the_first_one_is_the_culprit():
    pods = a_pod(0, running()), a_pod(1, starting()), a_pod(2, starting())
    verdict = judge_silence(observation(a_running_job(nodes=3), *pods))
    assert (verdict.index, verdict.reason) == (1, "Silent")


def test_a_rank_known_to_have_failed_comes_before_a_pod_that_has_succeeded():
    pods = FOLLOWER, a_pod(1, succeeded()), a_pod(2, running())
    state = AgentState(0, "ending", ended=((2, -9),))
    assert isinstance(with_answers(*pods, pod2=state), Undecided)
    verdict = with_answers(*pods, pod2=state, now=at(10))
    assert (verdict.rank, verdict.exit_code) == (2, -9)


def test_a_rank_that_has_ended_is_no_excuse_for_a_failure_of_its_own():
    own = a_pod(0, failed(torchrun_tail("raise")))
    verdict = with_answers(own, a_pod(1, running()), pod1=HAS_ENDED)
    assert verdict.reason == "WorkerFailed"


@pytest.mark.parametrize(
    "state",
    [
        # Another rank of the pod had failed, and this one was told to end.
        AgentState(0, ended=((1, 1), (2, 0))),
        AgentState(0, ended=((1, None), (2, 0))),
        # The pod was told to end: its ranks have saved.
        AgentState(0, stopped=True, ended=((1, 0),)),
    ],
)
def test_a_rank_that_was_told_to_end_has_not_ended_early(state):
    verdict = with_answers(FOLLOWER, a_pod(1, running()), pod1=state, now=at(10))
    assert verdict.reason != Reason.ENDED_EARLY


def test_a_failure_without_a_text_may_be_one_of_its_own_after_all_have_finished():
    ambiguous = a_pod(0, failed(torchrun_tail("eight-processes-follower")))
    verdict = with_answers(ambiguous, a_pod(1, running()), pod1=HAS_ENDED, now=at(10))
    assert (verdict.reason, verdict.index) == ("WorkerFailed", 0)


@pytest.mark.parametrize(("code", "how"), [(1, " with exit code 1"), (None, "")])
def test_a_rank_that_has_failed_is_named_while_its_pod_ends(code, how):
    state = AgentState(0, "ending", ended=((1, code),))
    verdict = with_answers(FOLLOWER, a_pod(1, running()), pod1=state, now=at(10))
    assert (verdict.cause, verdict.rank, verdict.exit_code) == (Cause.FAILURE, 1, code)
    assert verdict.message == f"rank 1 in pod digits-0-1 ended{how}, and its pod has not ended yet"


def test_a_pod_that_does_not_answer_may_be_the_cause_that_another_one_has_ended():
    pods = FOLLOWER, a_pod(1, running()), a_pod(2, running())
    assert isinstance(with_answers(*pods, pod1=HAS_ENDED), Undecided)
    verdict = with_answers(*pods, pod1=HAS_ENDED, now=at(10))
    assert (verdict.reason, verdict.index) == (Reason.PEER_LOST, 2)


@pytest.mark.parametrize("summary", [follower_summary, slow_rank_summary])
def test_a_pod_whose_agent_answers_is_never_a_lost_peer(summary):
    pods = a_pod(0, failed(summary(0))), a_pod(1, running())
    assert isinstance(with_answers(*pods, pod1=TRAINS), Undecided)
    verdict = with_answers(*pods, pod1=TRAINS, now=at(10))
    assert (verdict.cause, verdict.reason, verdict.index) == (Cause.HANG, Reason.PEER_HANGS, 1)
    assert verdict.message == (
        "the other pods lost their connection to pod digits-0-1 on node node-1, which has not "
        "ended and answers (its last step is 12, its last heartbeat was 3 s ago): its processes "
        "hang, or are slower than a time-out"
    )


def test_of_two_silent_pods_the_one_that_does_not_answer_is_named():
    pods = FOLLOWER, a_pod(1, running()), a_pod(2, running())
    verdict = with_answers(*pods, pod1=TRAINS, now=at(10))
    assert (verdict.cause, verdict.reason, verdict.index) == (
        Cause.DISRUPTION,
        Reason.PEER_LOST,
        2,
    )
    assert "digits-0-1" not in verdict.message


def test_a_pod_whose_processes_have_ended_is_no_suspect():
    pods = FOLLOWER, a_pod(1, running()), a_pod(2, running())
    verdict = with_answers(*pods, pod1=ONLY_WAITS, now=at(10))
    assert (verdict.reason, verdict.index) == (Reason.PEER_LOST, 2)
    verdict = with_answers(FOLLOWER, a_pod(1, running()), pod1=ONLY_WAITS, now=at(10))
    assert (verdict.cause, verdict.index) == (Cause.FAILURE, 0)


def test_an_answer_about_another_attempt_changes_nothing():
    old = replace(HAS_ENDED, attempt=7)
    verdict = with_answers(FOLLOWER, a_pod(1, running()), pod1=old, now=at(10))
    assert verdict.reason == Reason.PEER_LOST


def test_the_status_tells_what_an_agent_says_of_a_gang_that_has_not_met():
    pods = [a_pod(index, starting(since=at(-90))) for index in range(2)]
    error = "[W socket.cpp] digits-0: Temporary failure in name resolution"
    answers = {uid_of(pods[1]): AgentState(0, error=error)}
    plan = plan_for(a_running_job(ran=False), *pods, answers=answers)
    assert plan.status.reason == Reason.WAITING_FOR_PEERS
    assert f"; digits-0-1 says: {error}. Usual causes" in plan.status.message


def test_the_verdict_on_a_silent_gang_has_what_its_agents_say():
    pods = an_agents_pod(0, running()), an_agents_pod(1, starting())
    job = a_running_job(silent_since=at(-200))
    answers = {uid_of(pods[1]): AgentState(0, ended=((1, -9),), heartbeat=150.0)}
    message = plan_for(job, *pods, answers=answers).status.message
    assert (
        "(rank 1 has ended with exit code -9, its last heartbeat was 150 s ago) is not" in message
    )


# What an answer may be


def test_a_state_is_read():
    found = {
        "attempt": 3,
        "activity": "ending",
        "stopped": True,
        "ended": [[4, 0], [5, None]],
        "steps": [10, 12],
        "checkpoint": 11,
        "heartbeat": 0.5,
        "watched": True,
        "error": "no",
    }
    assert read_state(json.dumps(found).encode()) == AgentState(
        3, "ending", True, ((4, 0), (5, None)), (10, 12), 11, 0.5, True, "no"
    )


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"attempt": true}',
        b'{"attempt": "1"}',
        b"[" * 4000,
        b'{"attempt": 1e999}',
        b'{"attempt": NaN}',
        b"\xff",
        b'{"attempt": 1}' + b" " * MAX_STATE + b"x",
    ],
)
def test_training_code_can_answer_anything(text):
    found = read_state(text)
    assert found is None or found == AgentState(1)


@pytest.mark.parametrize(
    "fields",
    [
        {"ended": [[-1, 0], ["1", 0], [1], 7, [1, 2, 3], None]},
        {"ended": {"1": 0}},
        {"steps": [1, "2"]},
        {"steps": [1, 2, 3]},
        {"heartbeat": -1},
        {"heartbeat": "1"},
        {"heartbeat": 1e999},
        {"heartbeat": True},
        {"heartbeat": 10**400},
        {"error": 7, "activity": [], "stopped": 1},
        {"checkpoint": 1e300},
    ],
)
def test_what_makes_no_sense_is_left_out(fields):
    assert read_state(json.dumps({"attempt": 1, **fields}).encode()) == AgentState(1)


def test_an_answer_tells_steps_and_the_last_checkpoint():
    state = AgentState(0, "training", steps=(0, 12), checkpoint=10)
    assert str(state) == "its last step is 12, its last checkpoint is of step 10"


def test_an_agent_of_an_older_version_is_asked_at_the_path_that_it_has():
    job = a_running_job(silent_since=at(-60))
    for pod, path in (
        (an_agents_pod(0, starting()), f"/state/{job.uid}/0"),
        (a_pod(0, starting()), "/state"),
    ):
        (question,) = plan_for(job, pod, a_pod(1, running())).ask
        assert question.path == path
