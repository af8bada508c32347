"""An observation: a job and its pods, by attempt and index."""

from dataclasses import replace

import pytest
from builders.containers import running, starting, succeeded, with_sidecar
from builders.jobs import a_job, a_running_job, a_starting_job
from builders.plans import observation
from builders.pods import a_pod, an_agents_pod, read_pods
from builders.times import NOW, at

from ddpjob.core.api.names import ANNOTATION_ASSIGNMENT
from ddpjob.core.api.reasons import Reason
from ddpjob.core.observe.observation import LONGEST_RETRY, Observation, Refusal, observe


def test_pods_are_sorted_by_attempt_and_index():
    bodies = a_pod(10, attempt=1), a_pod(9, attempt=1), a_pod(0)
    pods = observation(a_running_job(nodes=11, attempt=1), *bodies).pods
    assert [pod.name for pod in pods] == ["digits-0-0", "digits-1-9", "digits-1-10"]


def test_two_pods_of_a_node_have_one_order():
    job = a_running_job(attempt=1, births=(0, 1))
    kept = replace(read_pods(a_pod(0, running()))[0], attempt=1)
    (new,) = read_pods(a_pod(0, running(), attempt=1))
    for pods in ([kept, new], [new, kept]):
        assert [pod.name for pod in observe(job, pods).pods] == ["digits-0-0", "digits-1-0"]


def test_missing_are_the_indices_of_this_attempt_without_a_pod():
    obs = observation(a_starting_job(attempt=1, nodes=3), a_pod(0), a_pod(1, attempt=1))
    assert obs.missing == (0, 2)


def test_an_attempt_is_latched_if_it_is_the_newest_that_was_seen_whole():
    assert observation(a_running_job(attempt=2)).latched
    assert not observation(a_starting_job(attempt=2)).latched
    assert not observation(a_starting_job()).latched


def test_the_pods_of_a_newer_attempt_are_neither_current_nor_older():
    pods = [a_pod(0, attempt=attempt) for attempt in range(3)]
    obs = observation(a_running_job(attempt=1), *pods)
    assert [pod.name for pod in obs.current] == ["digits-1-0"]
    assert [pod.name for pod in obs.older] == ["digits-0-0"]
    assert obs.status_is_behind


def test_the_highest_attempt_that_a_status_can_have_is_no_stray():
    newest = a_pod(0, attempt=2**31 - 2)
    assert observation(a_running_job(), newest).strays == ()


def test_a_trainer_that_has_ended_is_not_active_though_its_sidecar_runs():
    (pod,) = read_pods(a_pod(0, with_sidecar(succeeded())))
    assert (pod.ended, pod.released, pod.active) == (True, False, False)
    (pod,) = read_pods(a_pod(0, running()))
    assert pod.active


@pytest.mark.parametrize(
    ("reason", "expected"),
    [(Reason.QUOTA, True), (Reason.POD_SECURITY, False), ("Timeout", False)],
)
def test_only_the_refusal_of_a_quota_means_a_quota(reason, expected):
    refusal = Refusal(reason, "no", at(7))
    assert observation(a_starting_job(), refusal=refusal).is_under_quota is expected
    assert not observation(a_starting_job()).is_under_quota


def test_a_retry_is_at_most_a_minute_away():
    assert Refusal(Reason.QUOTA, "no", NOW + LONGEST_RETRY).is_too_early(NOW)
    # The clock was set back.
    assert not Refusal(Reason.QUOTA, "no", at(61)).is_too_early(NOW)
    assert LONGEST_RETRY.total_seconds() == 60


def test_a_node_that_the_attempt_does_not_have_has_not_succeeded():
    assert observation(a_running_job(succeeded_nodes=(1, 2, 3))).succeeded == {1}


def test_an_observation_without_pods_has_no_current_ones():
    assert Observation(a_job()).current == ()


@pytest.mark.parametrize(
    ("assignment", "held", "dumps"),
    [
        ('{"start": false}', True, False),
        ('{"start":false}', True, False),
        ('{"start": true, "dump": true}', False, True),
        ('{"start": true, "flags": ["\\"start\\": false", "\\"dump\\": true"]}', False, False),
        ('"start": false', False, False),
        ("[" * 100_000, False, False),
        ("[]", False, False),
    ],
)
def test_what_a_pod_was_told_is_read_from_its_assignment(assignment, held, dumps):
    body = an_agents_pod(0, running(), annotations={ANNOTATION_ASSIGNMENT: assignment})
    (pod,) = read_pods(body)
    assert (pod.held, pod.dumps) == (held, dumps)


@pytest.mark.parametrize("ended", [1, 2])
def test_ended_and_running_pods_make_the_whole_gang(ended):
    job = a_running_job(nodes=ended + 1)
    pods = [a_pod(index, succeeded()) for index in range(ended)]
    assert observation(job, *pods, a_pod(ended, running())).all_run
    obs = observation(job, *pods, a_pod(ended, starting()))
    assert not obs.all_run
    assert [pod.index for pod in obs.silent] == [ended]
    assert observation(job, *pods).silent == ()


def test_a_pod_of_the_attempt_that_was_born_too_late_is_an_older_one():
    # The pod of this node was to stay from the attempt before.
    job = a_running_job(attempt=1, births=(0, 1))
    obs = observation(job, a_pod(0, running(), attempt=1), a_pod(1, running(), attempt=1))
    assert [pod.name for pod in obs.current] == ["digits-1-1"]
    assert [pod.name for pod in obs.older] == ["digits-1-0"]


def test_a_refusal_is_by_no_quota_of_ended_pods_unless_it_says_so():
    assert not Refusal(Reason.QUOTA, "exceeded quota", NOW).counts_ended_pods
