"""A Kubernetes node is read from any state that the API server can show."""

import pytest
from builders.jobs import a_running_job
from builders.nodes import a_node, nodes_of
from builders.plans import observation

from ddpjob.core.decide.dead_nodes import is_cut_off, is_unreachable
from ddpjob.core.observe.nodes import read_node
from ddpjob.core.observe.observation import NodeHealth, Nodes


def a_taint(key, effect="NoSchedule"):
    return {"key": key, "effect": effect}


@pytest.mark.parametrize(
    ("ready", "health"),
    [
        ("True", NodeHealth.READY),
        ("False", NodeHealth.NOT_READY),
        ("Unknown", NodeHealth.UNREACHABLE),
    ],
)
def test_the_health_of_a_node_is_its_condition_ready(ready, health):
    assert read_node(a_node("node-0", ready)).health is health


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"conditions": []},
        {"conditions": [{"type": "MemoryPressure", "status": "True"}]},
        {"conditions": [{"type": "Ready", "status": "Strange"}]},
        {"conditions": [{"type": "Ready"}]},
        {"conditions": "x"},
    ],
)
def test_a_node_that_has_not_reported_yet_is_neither_ready_nor_unreachable(status):
    assert read_node({"metadata": {"name": "node-0"}, "status": status}).health is (
        NodeHealth.NOT_READY
    )


def test_taints_that_keep_pods_away_are_read():
    taints = [a_taint("b"), a_taint("a", "NoExecute"), a_taint("c", "PreferNoSchedule")]
    node = read_node({"metadata": {"name": "node-0"}, "spec": {"taints": taints}})
    assert node.taints == ("a", "b")


def test_a_taint_with_two_effects_is_listed_once():
    taints = [a_taint("a"), a_taint("a", "NoExecute")]
    assert read_node({"spec": {"taints": taints}}).taints == ("a",)


@pytest.mark.parametrize("body", [{}, {"metadata": None}, {"spec": 7, "status": []}])
def test_an_object_of_another_shape_is_a_node_without_a_name(body):
    assert read_node(body).name == ""


# The whole cluster


def test_a_node_that_kubernetes_does_not_have_is_unreachable():
    obs = observation(a_running_job(), nodes=nodes_of(a_node("node-0")))
    assert is_unreachable(obs, "node-1")
    assert not is_unreachable(obs, "node-0")


def test_a_pod_that_has_no_node_yet_is_not_on_an_unreachable_one():
    assert not is_unreachable(observation(a_running_job(), nodes=nodes_of()), "")


@pytest.mark.parametrize("nodes", [None, {}])
def test_without_nodes_nothing_is_known_about_them(nodes):
    obs = observation(a_running_job(), nodes=nodes)
    assert not is_unreachable(obs, "node-1")
    assert not is_cut_off(obs)


def test_nodes_that_are_not_ready_and_unreachable_ones_count_for_a_cut_off_control_plane():
    bodies = [a_node("node-0", "Unknown"), a_node("node-1", "False"), a_node("node-2")]
    nodes = Nodes(map(read_node, bodies))
    assert is_cut_off(observation(a_running_job(), nodes=nodes))
