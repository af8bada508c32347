"""Names stay within what Kubernetes, c10d and Neuron accept."""

from hypothesis import given
from hypothesis import strategies as st

from ddpjob.core import names

sizes = st.integers(1, 1000)
attempts = st.integers(0, 9999)
job_names = st.from_regex(r"[a-z]([-a-z0-9]{0,6}[a-z0-9])?", fullmatch=True)
pods = st.tuples(job_names, attempts, sizes)


@given(sizes, attempts)
def test_hostnames_sorted_as_strings_are_in_the_order_of_the_nodes(nodes, attempt):
    hostnames = [names.hostname(attempt, index, nodes) for index in range(nodes)]
    assert hostnames == sorted(hostnames)
    assert len(set(hostnames)) == nodes


@given(sizes, attempts)
def test_a_local_address_has_at_most_63_characters(nodes, attempt):
    longest = f"{names.hostname(attempt, nodes - 1, nodes)}.{'j' * names.MAX_JOB_NAME}"
    assert len(longest) <= 63


def test_the_index_in_a_hostname_is_padded_to_the_width_of_the_largest():
    hostnames = [names.hostname(3, 7, nodes) for nodes in (1, 10, 11, 1000)]
    assert hostnames == ["a3-n7", "a3-n7", "a3-n07", "a3-n007"]


def test_every_attempt_has_its_own_rendezvous_id():
    assert names.rendezvous_id("uid", 0) != names.rendezvous_id("uid", 1)


@given(pods, pods)
def test_pods_of_different_jobs_have_different_names(one, other):
    assert (names.pod_name(*one) == names.pod_name(*other)) is (one == other)
