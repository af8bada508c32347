"""Pods near each other: what a queue has assigned, a PodGroup's constraint, or affinity."""

import pytest
from builders import a_job, a_status

from ddpjob.core.api.kueue import Demand, Domain, Queue, new_workload, placement_of, read_workload
from ddpjob.core.api.pod_groups import GroupName, group_of_pod
from ddpjob.core.api.scheduling import Topology
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
    ("field", "backend", "has_affinity"),
    [
        pytest.param("required", "Kubernetes", False, id="the group has the constraint"),
        pytest.param("preferred", "Kubernetes", True, id="a group knows no wish"),
        pytest.param("required", "Volcano", True, id="this group has no such field"),
    ],
)
def test_a_group_may_have_the_constraint_itself(field, backend, has_affinity):
    group = Constraints(group=GroupName(backend, "digits-0"))
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


def a_workload(assignment, **status):
    job = a_job(nodes=4)
    body = new_workload(job.identity, 1, Demand(Queue("team"), 4, {}))
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
    placement = placement_of(workload, [], Topology(required=RACK))
    made = list(pods(a_job_near(), range(4), Settings(), Constraints(placement)))
    hosts = [pod["spec"]["nodeSelector"][HOST] for pod in made]
    assert hosts == ["node-a.local", "node-a.local", "node-b.local", "node-c.local"]
    annotations = made[0]["metadata"]["annotations"]
    assert annotations["kueue.x-k8s.io/podset-required-topology"] == RACK
    assert "affinity" not in made[0]["spec"]


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
