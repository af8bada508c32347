"""The work of one decision grows with the number of nodes, not with its square.

The work is counted in opcodes of Python, so the tests do not depend on the machine.
"""

import sys
from types import SimpleNamespace

import pytest
from builders.containers import ended, failed, running
from builders.jobs import a_job, a_status
from builders.messages import torchrun_summary
from builders.nodes import a_node, nodes_of
from builders.pods import an_agents_pod, read_pods
from builders.surroundings import not_ready
from builders.times import at

from ddpjob.controller.cache import Cache
from ddpjob.controller.extension import Extension
from ddpjob.controller.fair import FairLine
from ddpjob.controller.lister import Lister
from ddpjob.controller.reconcile import Reconciler
from ddpjob.core.api.history import UnreachableNode
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.observation import ClusterPolicy, observe

TEXT = "step 7, loss 0.123\n" * 100


def opcodes(function, *arguments):
    """Return how many opcodes a call executes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments)
    finally:
        sys.settrace(before)
    return count


def gang(size, make_status, **spec):
    """Return a running job of so many nodes, and its pods, each on a node of its own."""
    pods = [an_agents_pod(index, make_status(index)) for index in range(size)]
    return a_job(nodes=size, status=a_status(nodes=size), **spec), read_pods(*pods)


def one_rank_failed(size):
    return gang(size, lambda index: failed(torchrun_summary(index)) if index == 5 else running())


def all_ended_without_a_report(size):
    return gang(size, lambda index: ended(137, f"{TEXT}{index}"))


def all_are_suspended(size):
    return gang(size, lambda index: running(), suspend=True)


def all_run(size):
    return gang(size, lambda index: running())


def look(job, pods, nodes):
    return decide(observe(job, pods, nodes=nodes), at(100))


@pytest.mark.parametrize(
    "scene", [all_run, one_rank_failed, all_ended_without_a_report, all_are_suspended]
)
def test_a_decision_about_twice_the_nodes_is_twice_the_work(scene):
    small, large = (opcodes(look, *scene(size), cluster(size)) for size in (60, 120))
    assert large < 2.3 * small


def test_a_decision_about_twice_the_unreachable_nodes_is_twice_the_work():
    small, large = (opcodes(look_at_dead_nodes, *lost_gang(size)) for size in (60, 120))
    assert large < 2.3 * small


def cluster(size, health="True"):
    nodes = [a_node(f"node-{index}", health) for index in range(size)]
    return nodes_of(*nodes, *(a_node(f"more-{index}") for index in range(size)))


def lost_gang(size):
    lost = tuple(UnreachableNode(f"node-{index}", at(99)) for index in range(size))
    status = a_status(nodes=size, unreachable_nodes=lost)
    _, pods = gang(size, lambda index: not_ready(running()))
    return a_job(nodes=size, status=status), pods, cluster(size, "Unknown")


def look_at_dead_nodes(job, pods, nodes):
    return decide(observe(job, pods, nodes=nodes, policy=ClusterPolicy()), at(100))


def test_a_look_at_a_job_does_not_depend_on_the_number_of_nodes_of_the_cluster():
    job, pods = all_run(4)
    small, large = (opcodes(look, job, pods, cluster(size)) for size in (60, 600))
    assert large < 1.1 * small


def test_the_next_of_twice_the_waiting_groups_is_no_more_work():
    def drain(line, size):
        for group in range(size):
            assert line.first() == group
            line.begin(group)
            line.remove(group, group)

    def filled(size):
        line = FairLine()
        for group in range(size):
            line.add(group, group)
        return line

    small, large = (opcodes(drain, filled(size), size) for size in (100, 200))
    assert large < 2.3 * small


# Looks at the jobs of a namespace


def jobs_in_namespaces(size):
    """Return a cache with one job in each of so many namespaces."""
    cache = Cache()
    for number in range(size):
        metadata = {"name": "digits", "namespace": f"team-{number:04}", "uid": f"uid-{number}"}
        cache.jobs.see({"metadata": {**metadata, "resourceVersion": "1"}, "spec": {}})
    return cache


def look_with_lister(cache, queue):
    """Look as at the start, with a page of pods for each namespace."""
    lister = Lister(None, cache, queue, None)
    return lister._pass


def look_with_watched_lister(cache, queue):
    return Lister(None, cache, queue, None, ("team-0000",))._note_listed


def look_with_extension(cache, queue):
    return Extension(None, cache, queue, None, None)._look_at_jobs


def look_with_reconciler(cache, queue):
    return Reconciler(None, cache, None, None, queue, *[None] * 5)._look_at_all


@pytest.mark.parametrize(
    "looks",
    [look_with_lister, look_with_watched_lister, look_with_extension, look_with_reconciler],
)
def test_looks_at_twice_the_namespaces_are_twice_the_work(looks):
    def look_at_each(look, size):
        for number in range(size):
            look(f"team-{number:04}")

    works = []
    for size in (50, 100):
        looked = []
        look = looks(jobs_in_namespaces(size), SimpleNamespace(add=looked.append))
        works.append(opcodes(look_at_each, look, size))
        # A page of pods says that the namespaces before its last one are complete.
        assert len(looked) == size - (looks is look_with_lister)
    small, large = works
    assert large < 2.3 * small
