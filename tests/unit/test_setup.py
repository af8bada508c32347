"""A job with `spec.setup`: its pods are pending meanwhile, and a failure has its own reason."""

import pytest
from builders.containers import ended, failed, running, starting, waiting
from builders.jobs import a_job, a_running_job
from builders.messages import agent_report, follower_summary
from builders.plans import observation, plan_for, written
from builders.pods import a_pod, an_agents_pod
from builders.rendered import render
from builders.times import at
from pod_parts import assignment_of, options_of, trainer_of

from ddpjob.core.api.names import Phase
from ddpjob.core.api.reasons import Reason
from ddpjob.core.observe.pods import read_pod

SETUP = {"setup": "pip install -r requirements.txt"}
JOB = a_running_job(ran=False, spec=SETUP)


def setting_up(status=None):
    """Return the status of a pod before the success of its startup probe."""
    status = status or starting(since=at(-300))
    status["containerStatuses"][0]["started"] = False
    return status


def set_up(status):
    status["containerStatuses"][0]["started"] = True
    return status


def setup_failed(code=1, line="no such package", *, reason=None, **report):
    words = f"{line} (exit code {code})"
    text = agent_report(-1, "SetupFailed", rank=None, exit_code=code, exception=words, **report)
    return ended(code, text, reason=reason)


# A pod during its setup


def test_a_gang_in_its_setup_has_a_reason_of_its_own():
    pods = a_pod(0, set_up(starting())), a_pod(1, setting_up())
    status = plan_for(JOB, *pods, now=at(3600)).status
    assert (status.phase, status.reason) == (Phase.STARTING, Reason.SETTING_UP)
    assert status.message == (
        "0 of 2 nodes are ready; pod digits-0-1 on node node-1 runs spec.setup"
    )


def test_the_message_tells_how_many_pods_run_the_setup():
    pods = [a_pod(index, setting_up()) for index in range(2)]
    assert (
        "; pod digits-0-0 on node node-0 and 1 more run spec.setup"
        in plan_for(JOB, *pods).status.message
    )


def test_a_pod_without_a_container_explains_more_than_one_in_its_setup():
    pods = a_pod(0, setting_up()), a_pod(1, waiting())
    assert plan_for(JOB, *pods).status.reason == Reason.STARTING


def test_the_wait_for_peers_begins_when_the_last_setup_is_over():
    pods = a_pod(0, set_up(starting(since=at(-900)))), a_pod(1, setting_up())
    job = written(JOB, plan_for(JOB, *pods, now=at(600)))
    pods = pods[0], a_pod(1, set_up(starting(since=at(-900))))
    plan = plan_for(job, *pods, now=at(601))
    assert plan.status.reason == Reason.STARTING
    assert plan.wake_after == 60
    job = written(job, plan)
    plan = plan_for(job, *pods, now=at(620))
    # In the normal course no agent is asked.
    assert (plan.status.reason, plan.ask) == (Reason.STARTING, ())
    plan = plan_for(job, *pods, now=at(661))
    assert plan.status.reason == Reason.WAITING_FOR_PEERS
    assert len(plan.ask) == 2


def test_pods_that_have_not_met_after_their_setup_are_not_taken_for_lost():
    pods = [a_pod(index, set_up(starting())) for index in range(2)]
    job = written(JOB, plan_for(JOB, *pods, now=at(0)))
    plan = plan_for(job, *pods, now=at(3600))
    assert (plan.new_pods, plan.delete) == ((), ())


def test_the_startup_probe_of_a_users_own_is_no_setup():
    pods = [a_pod(index, setting_up()) for index in range(2)]
    job = a_running_job(ran=False)
    assert plan_for(job, *pods, now=at(10)).status.reason == Reason.WAITING_FOR_PEERS
    assert not any(pod.sets_up for pod in observation(job, *pods).pods)


def test_a_gang_that_has_met_is_not_in_its_setup_when_a_kubelet_starts_anew():
    pods = a_pod(0, running()), a_pod(1, setting_up())
    job = a_running_job(spec=SETUP)
    job = written(job, plan_for(job, *pods))
    assert plan_for(job, *pods, now=at(121)).status.last_failure.reason == "Silent"


def test_a_container_that_has_ended_is_not_in_its_setup():
    assert not read_pod(a_pod(0, setting_up(ended(137)))).sets_up


def test_a_status_that_is_replaced_during_the_setup_is_not_taken_for_a_run():
    job = a_job(status=None, **SETUP)
    pods = [a_pod(index, setting_up(), attempt=2) for index in range(2)]
    attempt = plan_for(job, *pods, is_current=True).status.attempt
    assert (attempt.number, attempt.running_time) == (2, None)


def test_a_rendezvous_that_times_out_during_a_setup_names_the_pod_in_it():
    words = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"
    pods = a_pod(0, failed(words)), a_pod(1, setting_up())
    job = written(JOB, plan_for(JOB, *pods))
    failure = plan_for(job, *pods, now=at(20)).status.last_failure
    assert failure.reason == Reason.RENDEZVOUS_TIMEOUT
    assert failure.message.endswith("not started by then: digits-0-1")


def test_a_pod_in_its_setup_is_no_peer_that_was_lost():
    pods = a_pod(0, failed(follower_summary(0))), a_pod(1, setting_up())
    job = written(JOB, plan_for(JOB, *pods))
    failure = plan_for(job, *pods, now=at(20)).status.last_failure
    assert (failure.cause, failure.pod) == ("Failure", "digits-0-0")


# A failed setup


def test_a_setup_that_failed_ends_the_attempt_as_a_failure_does():
    pods = a_pod(0, set_up(starting())), a_pod(1, setup_failed(3))
    plan = plan_for(JOB, *pods)
    failure = plan.status.last_failure
    assert (failure.cause, failure.reason) == ("Failure", "SetupFailed")
    assert failure.message == ("spec.setup failed in pod digits-0-1: no such package (exit code 3)")
    assert plan.status.budget.failures == 1
    assert plan.status.backoff.count == 1


def test_a_setup_that_failed_is_the_cause_of_what_its_peers_say():
    peer = ended(1, follower_summary(0), when=at(-5))
    pods = a_pod(0, peer), a_pod(1, setup_failed())
    assert plan_for(JOB, *pods).status.last_failure.reason == "SetupFailed"


def test_a_setup_that_was_killed_has_a_hint():
    pods = a_pod(0, starting()), a_pod(1, setup_failed(137, "Killed"))
    assert (
        "; if nobody killed it, memory ran out" in plan_for(JOB, *pods).status.last_failure.message
    )
    pods = a_pod(0, starting()), a_pod(1, setup_failed(137, "Killed", reason="OOMKilled"))
    assert plan_for(JOB, *pods).status.last_failure.reason == "OOMKilled"


def test_a_setup_that_failed_says_nothing_about_its_node():
    pods = a_pod(0, starting()), a_pod(1, setup_failed())
    assert plan_for(JOB, *pods).status.failed_nodes == ()


def test_pods_stay_when_the_setup_of_another_one_has_failed():
    job = a_running_job(ran=False, spec={**SETUP, "recovery": "InPlace"}, nodes=3)
    pods = (
        an_agents_pod(0, set_up(starting())),
        an_agents_pod(1, setup_failed()),
        # It would have to install again.
        an_agents_pod(2, setting_up()),
    )
    attempt = plan_for(job, *pods).status.attempt
    assert (attempt.number, attempt.births) == (1, (0, 1, 1))


@pytest.mark.parametrize("line", ["ModuleNotFoundError: No module named 'x'", "NameError: y"])
@pytest.mark.parametrize("code", [1, 2])
def test_a_setup_that_failed_is_tried_again_whatever_its_code_and_words(code, line):
    job = JOB
    for attempt in range(3):
        pods = (
            a_pod(0, setup_failed(code, line), attempt=attempt),
            a_pod(1, starting(), attempt=attempt),
        )
        job = written(job, plan_for(job, *pods, now=at(60 * attempt)))
        assert job.status.attempt.number == attempt + 1
        assert not job.status.finished


# The pod of a job with a setup


def test_a_pod_has_its_setup_with_no_reference_of_kubernetes_in_it():
    pod = render(setup='echo "$(date) $HOME $$"', setupTimeoutSeconds=60)
    assert options_of(pod)["setup"] == 'echo "$$(date) $$HOME $$$$"'
    assert options_of(pod)["setup_seconds"] == 60
    # The agent ends a setup before the kubelet ends the agent.
    assert trainer_of(pod)["startupProbe"]["failureThreshold"] > 60


def test_a_pod_without_a_setup_has_no_startup_probe():
    assert "startupProbe" not in trainer_of(render())
    assert options_of(render())["setup"] is None


def test_the_rendezvous_waits_for_the_setup_of_all_nodes():
    def timeout(**spec):
        told = assignment_of(render(**spec))
        (conf,) = [flag for flag in told["flags"] if flag.startswith("--rdzv-conf")]
        return int(conf.partition("join_timeout=")[2].split(",")[0])

    assert timeout(**SETUP, setupTimeoutSeconds=7200) == timeout() + 7200
