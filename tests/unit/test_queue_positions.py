"""The position of a waiting job in its queue: how it is read, and how it is shown."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from ddpjob.core.api.kueue import workload_name
from ddpjob.core.api.queue_positions import Position, read_positions
from ddpjob.jobs.progress import Progress
from ddpjob.jobs.user_job import DDPJob
from ddpjob.show.jobs import job_lines, job_table
from ddpjob.show.text import ordinal

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SUSPENDED = {"type": "Suspended", "status": "True", "reason": "Queued"}
PLACE = {"place": {"number": 3}}
WAITS = {"phase": "Pending", "reason": "Queued", "conditions": [SUSPENDED], "operator": PLACE}


def a_job(queue="team", **status):
    body = DDPJob.create("digits", namespace="ml", image="i", args=["a.py"]).manifest()
    labels = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    metadata = {**body["metadata"], "uid": "uid", "labels": labels}
    return DDPJob.from_manifest({**body, "metadata": metadata, "status": {**WAITS, **status}})


def an_item(name="a", namespace="ml", local=0, cluster=4):
    """Return a pending Workload as Kueue lists it."""
    return {
        "metadata": {"name": name, "namespace": namespace, "ownerReferences": []},
        "priority": 0,
        "localQueueName": "team",
        "positionInClusterQueue": cluster,
        "positionInLocalQueue": local,
    }


def test_positions_are_counted_from_1():
    answer = {"items": [an_item("a", local=0, cluster=4), an_item("b", local=1, cluster=9)]}
    assert read_positions(answer, "ml") == {"a": Position(1, 5), "b": Position(2, 10)}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"items": None},
        {"items": {"a": 1}},
        {"items": ["a", 7, None]},
        {"items": [{"metadata": []}]},
        {"items": [an_item(name=None)]},
        {"items": [an_item(name=["a"])]},
        {"items": [an_item(namespace="another")]},
        {"items": [an_item(local="1")]},
        {"items": [an_item(local=1.5)]},
        {"items": [an_item(local=-1)]},
        {"items": [an_item(cluster=None)]},
    ],
)
def test_what_is_not_readable_has_no_position(answer):
    assert read_positions(answer, "ml") == {}


def test_one_item_that_is_not_readable_does_not_hide_the_others():
    answer = {"items": [None, an_item("a", local=[]), an_item("b")]}
    assert read_positions(answer, "ml") == {"b": Position(1, 5)}


def test_a_job_that_waits_knows_the_name_of_its_workload():
    assert a_job().waiting_workload == workload_name("digits", "uid", 3)


@pytest.mark.parametrize(
    "job",
    [
        a_job(queue=""),
        # The operator has not asked for room yet.
        a_job(operator={}),
        a_job(phase="Running", conditions=[]),
        # The user has suspended it, so it asks for no room.
        a_job(phase="Suspended"),
        a_job(phase="Failed", conditions=[{**SUSPENDED, "type": "Failed"}]),
    ],
    ids=["no queue", "no Workload", "runs", "suspended", "failed"],
)
def test_another_job_waits_with_no_workload(job):
    assert job.waiting_workload == ""


def test_the_position_is_no_part_of_the_job_in_the_cluster():
    job = a_job()
    placed = replace(job, position=Position(3, 5))
    assert placed.body() == job.body()
    assert placed.manifest() == job.manifest()


def shown(job):
    """Return the queue in the table, and in the lines about the job."""
    (line,) = (
        line.plain
        for line in job_lines(job, Progress(), [], NOW)
        if line.plain.startswith("Queue ")
    )
    return job_table([job], {}, NOW)[1].plain.split("   ")[-1], line


def test_a_position_is_shown_with_the_queue():
    in_table, line = shown(replace(a_job(), position=Position(3, 5)))
    assert in_table == "team (3rd)"
    assert line == "Queue       team, position 3 in the LocalQueue and 5 in its ClusterQueue"


def test_without_a_position_the_queue_alone_is_shown():
    assert shown(a_job()) == ("team", "Queue       team")


def test_an_ordinal():
    numbers = (1, 2, 3, 4, 11, 12, 13, 21, 112, 1003)
    assert list(map(ordinal, numbers)) == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th", "1003rd")
    ]
