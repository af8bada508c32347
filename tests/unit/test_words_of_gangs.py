"""The words of a PodGroup about a waiting gang, and their part in the job's status."""

import pytest
from builders.jobs import a_starting_job
from builders.pods import a_pod, read_pods
from builders.surroundings import not_scheduled, unschedulable
from builders.times import NOW

from ddpjob.core.api.owned import owned_metadata
from ddpjob.core.api.pod_groups import read_pod_group
from ddpjob.core.api.reasons import Reason
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.observation import observe

WORDS = "minCount (2) cannot be satisfied: 1 scheduled"
NATIVE, VOLCANO = "scheduling.k8s.io/v1beta1", "scheduling.volcano.sh/v1beta1"


def words_of(version, *conditions):
    job = a_starting_job()
    body = {"apiVersion": version, "metadata": owned_metadata(job.identity, "digits-0")}
    listed = [
        {"type": kind, "status": status, "message": message, "lastTransitionTime": time}
        for kind, status, message, time in conditions
    ]
    return read_pod_group({**body, "status": {"conditions": listed}}).waits


@pytest.mark.parametrize(
    ("version", "conditions", "words"),
    [
        (NATIVE, [("PodGroupInitiallyScheduled", "False", WORDS, "1")], WORDS),
        (NATIVE, [("PodGroupInitiallyScheduled", "True", "", "1")], ""),
        (NATIVE, [], ""),
        (VOLCANO, [("Unschedulable", "True", "2/2 tasks", "1")], "2/2 tasks"),
        # Volcano leaves the first one as it was.
        (VOLCANO, [("Unschedulable", "True", "old", "1"), ("Scheduled", "True", "", "2")], ""),
        (VOLCANO, [("Scheduled", "True", "", "1"), ("Unschedulable", "True", "new", "2")], "new"),
    ],
)
def test_the_newest_condition_says_whether_a_gang_waits(version, conditions, words):
    assert words_of(version, *conditions) == words


CLAIM = '0/2 nodes are available: persistentvolumeclaim "ckpt" not found.'


@pytest.mark.parametrize(
    ("first", "reason", "message"),
    [
        pytest.param(None, Reason.UNSCHEDULABLE, WORDS, id="no condition yet"),
        pytest.param(unschedulable(), Reason.UNSCHEDULABLE, WORDS, id="no room"),
        pytest.param(
            not_scheduled("Unschedulable", CLAIM), Reason.CLAIM_NOT_FOUND, "ckpt", id="no claim"
        ),
    ],
)
def test_the_words_of_the_group_hide_no_other_reason(first, reason, message):
    pods = read_pods(a_pod(0, first), a_pod(1))
    status = decide(observe(a_starting_job(), pods, waits_for_nodes=WORDS), NOW).status
    assert (status.reason, message in status.message) == (reason, True)
