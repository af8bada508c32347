"""Names stay within what Kubernetes, c10d and Neuron accept."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.core.api import names

sizes = st.integers(1, 1000)
attempts = st.integers(0, 999)
job_names = st.from_regex(r"[a-z]([-a-z0-9]{0,6}[a-z0-9])?", fullmatch=True)
pods = st.tuples(job_names, attempts, sizes)


@given(st.lists(attempts, min_size=1, max_size=1000))
def test_hostnames_sorted_as_strings_are_in_the_order_of_the_nodes(births):
    # The pods of a gang may be of different attempts.
    hostnames = [names.hostname(attempt, index) for index, attempt in enumerate(births)]
    assert hostnames == sorted(hostnames)
    assert len(set(hostnames)) == len(births)


@given(sizes, attempts)
def test_a_local_address_has_at_most_63_characters(nodes, attempt):
    longest = f"{names.hostname(attempt, nodes - 1)}.{'j' * names.MAX_JOB_NAME}"
    assert len(longest) <= 63


def test_a_hostname_begins_with_the_index_in_four_digits():
    assert names.hostname(2, 3) == "n0003-a2"


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("", "n0000-a2.digits:29404"),
        ("10.244.1.5", "10.244.1.5:29404"),
        ("fd00::5", "[fd00::5]:29404"),
    ],
)
def test_a_rendezvous_is_at_an_address_or_else_at_node_0_by_name(address, endpoint):
    assert names.rendezvous_endpoint("digits", 2, address) == endpoint


def test_the_port_of_an_attempt_is_neither_that_of_the_last_one_nor_the_agents():
    ports = [names.rendezvous_port(attempt) for attempt in range(100)]
    assert all(one != next_one for one, next_one in itertools.pairwise(ports))
    assert names.AGENT_PORT not in ports


def test_every_attempt_has_its_own_rendezvous_id():
    assert names.rendezvous_id("uid", 0) != names.rendezvous_id("uid", 1)


@given(pods, pods)
def test_pods_of_different_jobs_have_different_names(one, other):
    assert (names.pod_name(*one) == names.pod_name(*other)) is (one == other)
