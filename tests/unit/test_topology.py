"""Pods near each other: what a queue has assigned, a PodGroup's constraint, or affinity."""

import json

import pytest
from builders.jobs import a_job, a_status

from ddpjob.core.api.kueue import (
    Demand,
    Domain,
    free_places,
    new_workload,
    placement_of,
    read_workload,
)
from ddpjob.core.api.pod_groups import GroupName, group_of_pod
from ddpjob.core.api.queue import Queue
from ddpjob.core.api.scheduling import Topology
from ddpjob.core.observe.placement import read_placement
from ddpjob.core.render.merged_pod import NO_CONSTRAINTS, Constraints
from ddpjob.core.render.objects import pods
from ddpjob.core.render.pod_context import Settings

RACK = "example.com/rack"
HOST = "kubernetes.io/hostname"


def a_job_near(field="required", **spec):
    return a_starting(scheduling={"topology": {field: RACK}}, **spec)


def a_starting(**spec):
    return a_job(nodes=3, status=a_status(nodes=3), **spec)


def affinity_of(job, constraints=NO_CONSTRAINTS):
    (pod,) = pods(job, [0], Settings(), constraints)
    return pod["spec"].get("affinity", {}).get("podAffinity", {})


def near(job):
    return {
        "labelSelector": {"matchLabels": {"ddpjob.dev/job-uid": job.uid}},
        "topologyKey": RACK,
    }


def test_without_a_queue_and_a_group_the_topology_is_affinity():
    job = a_job_near()
    assert affinity_of(job) == {"requiredDuringSchedulingIgnoredDuringExecution": [near(job)]}
    job = a_job_near("preferred")
    wish = {"weight": 100, "podAffinityTerm": near(job)}
    assert affinity_of(job) == {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}


@pytest.mark.parametrize(
    ("field", "is_near", "has_affinity"),
    [
        pytest.param("required", True, False, id="the group has the constraint"),
        pytest.param("required", False, True, id="the group has lost it, or has no such field"),
        pytest.param("preferred", True, True, id="a group knows no wish"),
    ],
)
def test_a_group_may_have_the_constraint_itself(field, is_near, has_affinity):
    group = Constraints(group=GroupName("Kubernetes", "digits-0"), is_near=is_near)
    assert bool(affinity_of(a_job_near(field), group)) is has_affinity


def test_affinity_of_the_user_stays():
    own = {
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "a"}]}
    }
    job = a_job_near(affinity=own)
    (terms,) = affinity_of(job).values()
    assert terms == [{"topologyKey": "a"}, near(job)]


@pytest.mark.parametrize("backend", ["Kubernetes", "Volcano", "Coscheduling"])
def test_a_pod_names_its_group_where_its_scheduler_looks(backend):
    group = GroupName(backend, "digits-0")
    (pod,) = pods(a_starting(), [0], Settings(), Constraints(group=group))
    assert group_of_pod(pod) == group
    assert pod["spec"].get("schedulerName") == {"Volcano": "volcano"}.get(backend)


# What Kueue 0.19 has answered, shortened.
ASSIGNMENT = {
    "levels": [RACK, HOST],
    "slices": [
        {
            "domainCount": 2,
            "podCounts": {"individual": [2, 1]},
            "valuesPerLevel": [
                {"universal": "r1"},
                {"individual": {"prefix": "node-", "roots": ["a", "b"], "suffix": ".local"}},
            ],
        },
        {
            "domainCount": 1,
            "podCounts": {"universal": 1},
            "valuesPerLevel": [{"universal": "r2"}, {"universal": "node-c.local"}],
        },
    ],
}


NEAR = Topology(required=RACK)


def a_workload(assignment, topology=NEAR, **status):
    job = a_job(nodes=4)
    body = new_workload(job.identity, 1, Demand(Queue("team"), 4, {}, None, topology))
    body["metadata"] |= {"uid": "w", "resourceVersion": "1"}
    assigned = {"name": "main", "count": 4, "topologyAssignment": assignment}
    body["status"] = {"admission": {"podSetAssignments": [assigned]}, **status}
    return read_workload(body)


def test_an_assignment_of_kueue_gives_each_node_its_place():
    workload = a_workload(ASSIGNMENT)
    assert workload.domains == (
        Domain({RACK: "r1", HOST: "node-a.local"}, 2),
        Domain({RACK: "r1", HOST: "node-b.local"}, 1),
        Domain({RACK: "r2", HOST: "node-c.local"}, 1),
    )
    free = free_places(workload, [])
    placement = placement_of(workload, [], dict(enumerate(free)))
    made = list(pods(a_job_near(), range(4), Settings(), Constraints(placement)))
    hosts = [pod["spec"]["nodeSelector"][HOST] for pod in made]
    assert hosts == ["node-a.local", "node-a.local", "node-b.local", "node-c.local"]
    annotations = made[0]["metadata"]["annotations"]
    assert annotations["kueue.x-k8s.io/podset-required-topology"] == RACK
    assert "affinity" not in made[0]["spec"]


def test_a_pod_that_is_replaced_gets_the_place_that_is_left():
    # Kueue has replaced node-a by node-d, and sorts the places by their names.
    hosts = ["node-b", "node-c", "node-d"]
    levels = [{"individual": {"roots": hosts}}]
    one_each = {"domainCount": 3, "podCounts": {"universal": 1}, "valuesPerLevel": levels}
    workload = a_workload({"levels": [HOST], "slices": [one_each]})
    stay = [{HOST: "node-b", "pool": "training"}, {HOST: "node-c"}]
    assert free_places(workload, stay) == [{HOST: "node-d"}]
    # A pod on a lost node has no place any more.
    assert free_places(workload, [{HOST: "node-a"}, {HOST: "node-c"}]) == [
        {HOST: "node-b"},
        {HOST: "node-d"},
    ]


def test_places_that_kueue_gives_by_itself_are_marked_too():
    # Otherwise Kueue would count each pod twice.
    workload = a_workload(ASSIGNMENT, topology=None)
    annotations = placement_of(workload, []).annotations
    assert annotations["kueue.x-k8s.io/podset-unconstrained-topology"] == "true"


def test_another_topology_needs_another_workload():
    workload = a_workload(ASSIGNMENT)
    queue = Queue("team")
    assert workload.is_for(queue, 4, Topology(required=RACK))
    assert not workload.is_for(queue, 4, Topology(preferred=RACK))
    assert not workload.is_for(queue, 4, None)


def test_jobs_with_the_same_topology_compete_for_the_same_nodes():
    (first,), (second,) = (pods(job, [0], Settings()) for job in (a_job_near(), a_job_near()))
    second = json.loads(json.dumps(second).replace("0b4c6f3e", "another0"))
    assert read_placement(first["spec"]) == read_placement(second["spec"])


@pytest.mark.parametrize(
    "assignment",
    [
        None,
        {},
        {"levels": "rack", "slices": [{"domainCount": "two"}]},
        {"levels": [RACK], "slices": [{"domainCount": 2, "valuesPerLevel": [{"individual": 1}]}]},
        {"levels": [RACK], "slices": [{"podCounts": {"individual": {"roots": 3}}}]},
    ],
)
def test_no_shape_of_an_assignment_is_an_error(assignment):
    assert all(domain.size >= 0 for domain in a_workload(assignment).domains)


def test_a_node_for_which_kueue_looks_for_another_is_known():
    assert a_workload(ASSIGNMENT, unhealthyNodes=[{"name": "node-b"}]).unhealthy == ("node-b",)


def test_a_workload_asks_for_the_topology():
    job = a_job_near("preferred")
    topology = job.spec.scheduling.topology
    body = new_workload(job.identity, 1, Demand(Queue("team"), 3, {}, None, topology))
    (pod_set,) = body["spec"]["podSets"]
    assert pod_set["topologyRequest"] == {"preferred": RACK, "podIndexLabel": "ddpjob.dev/index"}
