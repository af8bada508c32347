"""When the operator looks at a job again although nothing has changed."""

from dataclasses import replace
from datetime import timedelta

import pytest
from builders.containers import creating, failed, running, starting, succeeded, waiting
from builders.jobs import a_finished_job, a_job, a_running_job, a_starting_job
from builders.messages import follower_summary, torchrun_summary
from builders.nodes import a_node, nodes_of
from builders.plans import observation, plan_for, written
from builders.pods import a_pod, an_agents_pod, read_pods, told
from builders.surroundings import scheduling_gated, unschedulable
from builders.times import NOW, at

from ddpjob.core.api.history import LONGEST_DELAY, Backoff, UnreachableNode
from ddpjob.core.api.names import Phase
from ddpjob.core.api.reasons import Reason
from ddpjob.core.decide.timers import QUOTA_TIMEOUT, TIMERS, seconds_until_next
from ddpjob.core.observe.nodes import read_node
from ddpjob.core.observe.observation import ClusterPolicy, Nodes, Refusal

BOTH_RUN = (a_pod(0, running()), a_pod(1, running()))
UNREACHABLE = nodes_of(a_node("node-0"), a_node("node-1", "Unknown"))
QUOTA = Refusal(Reason.QUOTA, "exceeded quota", at(7))
QUOTA_FOR_LONG = Refusal(Reason.QUOTA, "exceeded quota", at(60))


def seconds_until(timer, obs):
    """Return the seconds from NOW until the moment of one timer, or None."""
    (found,) = [known for known in TIMERS if known.__name__ == timer]
    moment = found(obs, obs.job.spec, NOW)
    return None if moment is None else (moment - NOW).total_seconds()


# Each timer, as (the timer, a job and what surrounds it, the seconds until its moment)

A_MOMENT = {
    "the back-off ends": (
        "backoff_ends",
        observation(a_running_job(backoff=Backoff(2, at(10)))),
        10,
    ),
    "an undecided failure is judged": (
        "failure_settles",
        observation(a_running_job(undecided_since=at(-3))),
        7,
    ),
    "a pod that runs is not ready": (
        "silence_ends",
        observation(a_running_job(silent_since=at(-20)), a_pod(0, running()), a_pod(1, starting())),
        100,
    ),
    "a pod that stayed is not ready": (
        "silence_ends",
        observation(
            a_running_job(attempt=1, ran=False, silent_since=at(-70), births=(0, 1)),
            an_agents_pod(0, running(), attempt=1, born=0),
            a_pod(1, starting(), attempt=1),
        ),
        50,
    ),
    "a pod that is not ready is asked": (
        "silence_is_asked",
        observation(a_running_job(silent_since=at(-4)), a_pod(0, running()), a_pod(1, starting())),
        6,
    ),
    "a gang of which a pod has stopped writing": (
        "writing_is_asked_again",
        observation(
            a_running_job(
                spec={"hangTimeoutSeconds": 60, "heartbeat": "Log"}, silent_since=at(-20)
            ),
            a_pod(0, running()),
            a_pod(1, starting()),
        ),
        10,
    ),
    "a pod does not follow its assignment": (
        "assignment_is_written_again",
        observation(
            a_running_job(attempt=1, births=(0, 1), latched=False, ran=False),
            an_agents_pod(0, starting(), attempt=1, born=0, annotations=told(-2)),
            a_pod(1, starting(), attempt=1),
        ),
        3,
    ),
    "it is checked whether there are heartbeats": (
        "heartbeats_are_checked",
        observation(
            a_running_job(spec={"hangTimeoutSeconds": 90}, running_time=at(-50)), *BOTH_RUN
        ),
        550,
    ),
    "a gang has not met": (
        "peers_are_late",
        observation(
            a_running_job(ran=False), a_pod(0, starting(since=at(-90))), a_pod(1, starting())
        ),
        60,
    ),
    "a refused pod is tried again": (
        "refusal_is_retried",
        observation(a_starting_job(), refusal=QUOTA),
        7,
    ),
    "the active time is over": (
        "active_deadline",
        observation(
            a_running_job(
                active_since=at(-20), active_seconds=30, spec={"activeDeadlineSeconds": 90}
            )
        ),
        40,
    ),
    "the time to start is over": (
        "startup_deadline",
        observation(
            a_running_job(ran=False, starting_since=at(-20), spec={"startupDeadlineSeconds": 90})
        ),
        70,
    ),
    "a finished job is deleted": (
        "time_to_live",
        observation(a_finished_job(completion_time=at(-5), ttlSecondsAfterFinished=60)),
        55,
    ),
    "a node is dead": (
        "node_is_dead",
        observation(
            a_running_job(unreachable_nodes=(UnreachableNode("node-1", at(-10)),)),
            *BOTH_RUN,
            nodes=UNREACHABLE,
        ),
        20,
    ),
    "most nodes are not ready": (
        "cut_off_ends",
        observation(
            a_running_job(),
            *BOTH_RUN,
            nodes=Nodes(read_node(a_node(name, "Unknown")) for name in ("node-0", "node-1")),
        ),
        5,
    ),
    "most nodes are not ready, and a pod of an earlier job waits": (
        "cut_off_ends",
        observation(
            a_starting_job(),
            leftovers=read_pods(a_pod(0, running())),
            nodes=Nodes([read_node(a_node("node-0", "Unknown"))]),
        ),
        5,
    ),
    "most nodes are not ready by their own word": (
        "cut_off_ends",
        observation(
            a_running_job(), *BOTH_RUN, nodes=Nodes([read_node(a_node("node-0", "False"))])
        ),
        5,
    ),
    "a pod of an older attempt is overdue": (
        "pod_is_overdue",
        observation(a_starting_job(attempt=1), a_pod(0, running(), deleted_at=at(-45), grace=45)),
        30,
    ),
    "a gang on a full cluster gives way": (
        "gang_timeout",
        observation(
            a_running_job(ran=False, starting_since=at(-100)),
            a_pod(0, running()),
            a_pod(1, unschedulable()),
        ),
        500,
    ),
    "a gang under a quota gives way": (
        "gang_timeout",
        observation(
            a_running_job(latched=False, ran=False, starting_since=at(-5)),
            a_pod(0),
            refusal=QUOTA_FOR_LONG,
        ),
        15,
    ),
    "an older gang may be incomplete by now": (
        "contest_is_looked_at",
        observation(
            a_running_job(ran=False, starting_since=at(-601)),
            a_pod(0, running()),
            a_pod(1, unschedulable()),
        ),
        60,
    ),
    "an unreachable node that the job has left may be back": (
        "node_is_forgotten",
        observation(a_running_job(unreachable_nodes=(UnreachableNode("gone", NOW),)), *BOTH_RUN),
        60,
    ),
    "a pod has a node, and no container yet": (
        "agent_is_checked",
        observation(a_running_job(ran=False), a_pod(0, creating(4)), a_pod(1, creating(3))),
        6,
    ),
    "a pod still has no container": (
        "agent_is_checked_again",
        observation(a_running_job(ran=False), a_pod(0, creating(11)), a_pod(1, creating(3))),
        30,
    ),
}


def test_every_timer_has_a_row():
    assert {row[0] for row in A_MOMENT.values()} == {timer.__name__ for timer in TIMERS}


@pytest.mark.parametrize(("timer", "obs", "seconds"), A_MOMENT.values(), ids=A_MOMENT)
def test_a_timer_knows_its_moment(timer, obs, seconds):
    assert seconds_until(timer, obs) == seconds


@pytest.mark.parametrize(("timer", "obs", "seconds"), A_MOMENT.values(), ids=A_MOMENT)
def test_a_job_is_looked_at_again_at_the_moment_of_each_timer(timer, obs, seconds):
    assert seconds_until_next(obs, obs.job.spec, NOW) == seconds


@pytest.mark.parametrize("timer", [timer.__name__ for timer in TIMERS])
def test_a_job_that_waits_for_nothing_has_no_moment(timer):
    assert seconds_until(timer, observation(a_running_job(), *BOTH_RUN)) is None


# All timers


def test_of_several_moments_the_earliest_wakes_the_operator():
    limits = {"activeDeadlineSeconds": 500, "startupDeadlineSeconds": 300}
    job = a_running_job(ran=False, starting_since=NOW, active_since=NOW, spec=limits)
    pods = a_pod(0, running()), a_pod(1, waiting())
    assert plan_for(job, *pods).wake_after == 300
    assert plan_for(job, *pods, now=at(299)).wake_after == 1


@pytest.mark.parametrize(
    ("job", "pods", "reason"),
    [
        (
            a_running_job(backoff=Backoff(2, at(200)), latched=False, ran=False),
            (),
            Reason.BACK_OFF,
        ),
        (a_starting_job(attempt=1), BOTH_RUN, Reason.WAITING_FOR_OLD_PODS),
        (a_running_job(), BOTH_RUN, Reason.NODES_RUNNING),
        (a_running_job(), (a_pod(0, running()), a_pod(1, failed())), Reason.NODES_RUNNING),
    ],
    ids=["back-off", "older pods", "running", "undecided"],
)
def test_a_deadline_wakes_the_operator_whatever_rule_applies_now(job, pods, reason):
    job = a_job(status=replace(job.status, active_since=NOW), activeDeadlineSeconds=5)
    plan = plan_for(job, *pods)
    assert (plan.status.reason, plan.wake_after) == (reason, 5)


def test_a_moment_that_has_passed_does_not_wake_the_operator_again():
    job = a_running_job(backoff=Backoff(2, at(-60)), undecided_since=at(-60))
    assert plan_for(job, *BOTH_RUN).wake_after is None


def test_a_refusal_is_tried_again():
    refusal = Refusal(Reason.INVALID_POD, "invalid", at(7))
    assert seconds_until("refusal_is_retried", observation(a_starting_job(), refusal=refusal)) == 7


def test_the_end_of_a_back_off_is_never_further_away_than_the_longest_one():
    # The clock was set back after it was written.
    job = a_running_job(backoff=Backoff(2, at(86400)), latched=False, ran=False)
    plan = plan_for(job)
    assert (plan.status.backoff.until, plan.wake_after) == (at(LONGEST_DELAY), LONGEST_DELAY)
    assert plan_for(job, now=at(1)).status.backoff.until == at(LONGEST_DELAY + 1)
    assert plan_for(written(job, plan), now=at(LONGEST_DELAY)).new_pods == (0, 1)


def test_a_pod_that_does_not_end_in_time_wakes_the_operator_to_say_so():
    # 45 s of grace, and 30 s without suspicion.
    pod = a_pod(0, running(), deleted_at=NOW, grace=45)
    plan = plan_for(a_starting_job(attempt=1), pod, nodes=nodes_of(a_node("node-0")))
    assert plan.wake_after == 75


def test_a_deadline_that_is_over_does_not_wake_the_operator_again_and_again():
    # The cause of the failure comes first. It is certain after 10 s.
    job = a_running_job(
        ran=False, starting_since=at(-200), undecided_since=NOW, spec={"startupDeadlineSeconds": 90}
    )
    pods = a_pod(0, failed("no summary")), a_pod(1, waiting())
    assert plan_for(job, *pods, now=at(1)).wake_after == 9


def test_a_job_that_was_finished_once_has_no_time_to_live():
    # Somebody has removed its conditions, to let it run again.
    job = a_running_job(completion_time=at(-100), spec={"ttlSecondsAfterFinished": 60})
    plan = plan_for(job, *BOTH_RUN)
    assert (plan.delete_job, plan.wake_after) == (False, None)


@pytest.mark.parametrize("deadline", ["activeDeadlineSeconds", "startupDeadlineSeconds"])
def test_deadlines_of_a_finished_job_have_no_moment(deadline):
    job = a_finished_job(**{deadline: 1})
    assert plan_for(job, a_pod(0, succeeded()), now=at(0.5)).wake_after is None


# The clock of the settle time


def test_a_failure_that_is_not_certain_starts_the_clock_once():
    pods = a_pod(0, failed(follower_summary(0))), a_pod(1, running())
    job = a_running_job()
    first = plan_for(job, *pods, now=at(2))
    assert (first.status.attempt.undecided_since, first.wake_after) == (at(2), 10)
    again = plan_for(written(job, first), *pods, now=at(5))
    assert (again.status.attempt.undecided_since, again.wake_after) == (at(2), 7)


@pytest.mark.parametrize("kubelet", [-7200, 7200])
def test_the_clock_of_a_kubelet_does_not_change_when_a_failure_is_judged(kubelet):
    pods = a_pod(0, failed("no summary", when=at(kubelet))), a_pod(1, running())
    job = a_running_job()
    job = written(job, plan_for(job, *pods))
    assert plan_for(job, *pods, now=at(9)).status.attempt.number == 0
    assert plan_for(job, *pods, now=at(10)).status.attempt.number == 1


def test_a_clock_that_was_set_back_starts_the_settle_time_again():
    pods = a_pod(0, failed(follower_summary(0))), a_pod(1, running())
    job = a_running_job(undecided_since=at(3600))
    plan = plan_for(job, *pods)
    assert (plan.status.attempt.undecided_since, plan.wake_after) == (NOW, 10)


def test_a_new_attempt_begins_without_an_undecided_failure():
    pods = a_pod(0, failed(follower_summary(0))), a_pod(1, failed(torchrun_summary(1)))
    assert (
        plan_for(a_running_job(undecided_since=NOW), *pods).status.attempt.undecided_since is None
    )


# The clock of the start


def test_the_start_begins_with_the_attempt_and_ends_when_all_nodes_run():
    job = a_job()
    job = written(job, plan_for(job, now=at(1)))
    assert job.status.attempt.starting_since == at(1)
    job = written(job, plan_for(job, a_pod(0, running()), a_pod(1), now=at(50)))
    assert job.status.attempt.starting_since == at(1)
    assert plan_for(job, *BOTH_RUN, now=at(60)).status.attempt.starting_since is None


@pytest.mark.parametrize("gated", [(0,), (1,), (0, 1)])
def test_the_start_does_not_begin_while_a_gate_holds_a_pod(gated):
    pods = [a_pod(index, scheduling_gated() if index in gated else waiting()) for index in range(2)]
    job = a_running_job(ran=False, starting_since=at(-50))
    assert plan_for(job, *pods).status.attempt.starting_since is None


def test_a_clock_that_was_set_back_starts_the_start_again():
    plan = plan_for(a_running_job(ran=False, starting_since=at(3600)), a_pod(0), a_pod(1))
    assert plan.status.attempt.starting_since == NOW


# The administrator's time for gangs


def test_a_gang_that_holds_nothing_has_nothing_to_give_back():
    job = a_running_job(ran=False, starting_since=NOW)
    obs = observation(job, a_pod(0, unschedulable()), a_pod(1, unschedulable()))
    assert seconds_until("gang_timeout", obs) is None


def test_the_administrators_gang_timeout_is_used():
    policy = ClusterPolicy(gang_timeout=timedelta(seconds=44))
    job = a_running_job(ran=False, starting_since=NOW)
    obs = observation(job, a_pod(0, running()), a_pod(1, unschedulable()), policy=policy)
    assert seconds_until("gang_timeout", obs) == 44


def test_under_a_quota_a_gang_gives_way_within_a_minute():
    assert timedelta(seconds=60) > QUOTA_TIMEOUT


def test_the_agent_is_looked_for_only_while_a_pod_has_waited_for_long():
    job = a_running_job(ran=False)
    assert plan_for(job, a_pod(0, creating(10)), a_pod(1, running())).check_agent
    assert not plan_for(job, a_pod(0, creating(9)), a_pod(1, running())).check_agent
    assert not plan_for(job, a_pod(0, starting()), a_pod(1, running())).check_agent


def test_no_clock_runs_while_the_place_of_new_pods_is_unknown():
    """Kueue may be down. This is neither a slow start nor time of an active job."""
    limits = {"startupDeadlineSeconds": 60, "activeDeadlineSeconds": 60}
    job = a_running_job(
        latched=False, ran=False, starting_since=at(-59), active_since=at(-59), spec=limits
    )
    refusal = Refusal(Reason.NO_QUEUE, "the room cannot be read", at(5))
    plan = plan_for(job, refusal=refusal)
    assert plan.status.phase == Phase.PENDING
    assert (plan.status.attempt.starting_since, plan.status.active_since) == (None, None)
    later = plan_for(written(job, plan), refusal=refusal, now=at(500))
    assert later.status.phase == Phase.PENDING


def test_pods_that_run_use_the_time_of_an_active_job_while_a_place_is_unknown():
    job = a_running_job(latched=False, ran=False, starting_since=at(-9), active_since=at(-9))
    refusal = Refusal(Reason.NO_QUEUE, "the room cannot be read", at(5))
    status = plan_for(job, a_pod(0, running()), refusal=refusal).status
    assert (status.active_since, status.attempt.starting_since) == (at(-9), None)
    assert status.attempt.starting_seconds == 9
