"""Names stay within what Kubernetes, c10d and Neuron accept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.core import names
from ddpjob.core.job import require_job_name
from ddpjob.core.readers import SpecError

sizes = st.integers(1, 1000)
attempts = st.integers(0, 9999)


@given(sizes, attempts)
def test_the_string_order_of_hostnames_is_the_order_of_the_nodes(nodes, attempt):
    hostnames = [names.hostname(attempt, index, nodes) for index in range(nodes)]
    assert hostnames == sorted(hostnames)
    assert len(set(hostnames)) == nodes


@given(sizes, attempts)
def test_a_local_address_has_at_most_63_characters(nodes, attempt):
    longest = f"{names.hostname(attempt, nodes - 1, nodes)}.{'j' * names.MAX_JOB_NAME}"
    assert len(longest) <= 63


def test_a_hostname_is_padded_to_the_size_of_its_gang():
    assert [names.hostname(3, 7, nodes) for nodes in (1, 10, 11, 1000)] == [
        "a3-n7",
        "a3-n7",
        "a3-n07",
        "a3-n007",
    ]


def test_every_attempt_has_a_rendezvous_of_its_own():
    assert names.rendezvous_id("uid", 0) != names.rendezvous_id("uid", 1)


job_names = st.from_regex(r"[a-z]([-a-z0-9]{0,6}[a-z0-9])?", fullmatch=True)


@given(*[st.tuples(job_names, attempts, sizes)] * 2)
def test_no_two_jobs_share_a_pods_name(one, other):
    assert (names.pod_name(*one) == names.pod_name(*other)) is (one == other)


@pytest.mark.parametrize("name", ["a", "a1", "digits", "my-job-2", "a" * 52])
def test_a_good_name_is_accepted(name):
    assert require_job_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "1a", "-a", "a-", "A", "a_b", "a.b", "a" * 53, "ä", "a\n", None, 7]
)
def test_a_name_that_no_service_can_carry_is_refused(name):
    with pytest.raises(SpecError, match="at most 52 lower-case letters"):
        require_job_name(name)
