"""NetworkPolicies that keep the pods of a job apart, as `ddpjob doctor` finds them."""

from pathlib import Path

import pytest

from ddpjob.client.networks import find_gaps
from ddpjob.core.api.yaml_text import load_yaml

NAMESPACE = {"kubernetes.io/metadata.name": "ml", "team": "a"}
JOB_PODS = {"matchExpressions": [{"key": "ddpjob.dev/job", "operator": "Exists"}]}
ANY_POD = {"podSelector": {}}
EVERYTHING = [{}]
APART = {("each other", "Ingress")}
BOTH = {
    ("each other", "Ingress"),
    ("each other", "Egress"),
    ("the cluster's DNS", "Egress"),
}


def recommended():
    """Return the policy of the documentation."""
    text = (Path(__file__).parents[2] / "docs/users/teams.md").read_text()
    (found,) = [part for part in text.split("```") if "kind: NetworkPolicy" in part]
    return load_yaml(found.removeprefix("yaml"))


def a_policy(name="closed", *, pods=None, **spec):
    return {"metadata": {"name": name}, "spec": {"podSelector": pods or {}, **spec}}


def admits(*peers, ports=None):
    """Return a policy for ingress to all pods, with one rule."""
    rule = {"from": list(peers)} | ({"ports": ports} if ports else {})
    return a_policy(ingress=[rule])


def ranges(first, last):
    return [{"protocol": "TCP", "port": first, "endPort": last}]


DENY_ALL = a_policy("deny-all", policyTypes=["Ingress", "Egress"])

# (policies, what the pods of a job cannot reach)

POLICIES = {
    "no policy": ([], set()),
    "ingress is closed": ([a_policy()], APART),
    "both are closed": ([DENY_ALL], BOTH),
    "an empty list of types is that of the rules": (
        [a_policy(policyTypes=[], egress=EVERYTHING)],
        APART,
    ),
    "job pods are selected by their label": ([a_policy(pods=JOB_PODS)], APART),
    "job pods are selected by what they do not have": (
        [a_policy(pods={"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]})],
        APART,
    ),
    "job pods are selected by another value": (
        [
            a_policy(
                pods={"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}
            )
        ],
        APART,
    ),
    "other pods are selected": ([a_policy(pods={"matchLabels": {"app": "web"}})], set()),
    "other pods are selected by an expression": (
        [
            a_policy(
                pods={"matchExpressions": [{"key": "app", "operator": "In", "values": ["web"]}]}
            )
        ],
        set(),
    ),
    "an operator that Kubernetes does not have": (
        [a_policy(pods={"matchExpressions": [{"key": "app", "operator": "Gt"}]})],
        set(),
    ),
    "everything is admitted": ([a_policy(ingress=EVERYTHING)], set()),
    "all pods of the namespace": ([admits(ANY_POD)], set()),
    "all namespaces": ([admits({"namespaceSelector": {}})], set()),
    "the namespace itself": (
        [admits({"namespaceSelector": {"matchLabels": {"team": "a"}}, **ANY_POD})],
        set(),
    ),
    "another namespace": (
        [admits({"namespaceSelector": {"matchLabels": {"team": "b"}}, **ANY_POD})],
        APART,
    ),
    "other pods": ([admits({"podSelector": {"matchLabels": {"app": "web"}}})], APART),
    "a block of addresses may be that of the pods": (
        [admits({"ipBlock": {"cidr": "10.0.0.0/8"}})],
        set(),
    ),
    "the Internet": (
        [admits({"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}})],
        APART,
    ),
    "one address": ([admits({"ipBlock": {"cidr": "10.0.0.7/32"}})], APART),
    "no address": ([admits({"ipBlock": {"cidr": "x"}})], APART),
    "one port": ([admits(ANY_POD, ports=[{"port": 29400}])], APART),
    "a port with a name": ([admits(ANY_POD, ports=[{"port": "http"}])], APART),
    "UDP alone": ([admits(ANY_POD, ports=[{"protocol": "UDP"}])], APART),
    "TCP on all ports": ([admits(ANY_POD, ports=[{"protocol": "TCP"}])], set()),
    "all high ports": ([admits(ANY_POD, ports=ranges(1024, 65535))], set()),
    "some high ports": ([admits(ANY_POD, ports=ranges(29400, 32768))], APART),
    "another policy admits them": ([DENY_ALL, recommended()], set()),
    "the policy of the documentation": ([recommended()], set()),
    "only the DNS is closed": (
        [a_policy(policyTypes=["Egress"], egress=[{"to": [ANY_POD]}])],
        {("the cluster's DNS", "Egress")},
    ),
    "the DNS may be in another namespace": (
        [a_policy(policyTypes=["Egress"], egress=[{"to": [ANY_POD, {"namespaceSelector": {}}]}])],
        set(),
    ),
    "the DNS may be at an address of its node": (
        [
            a_policy(
                policyTypes=["Egress"],
                egress=[{"to": [ANY_POD]}, {"to": [{"ipBlock": {"cidr": "169.254.20.10/32"}}]}],
            )
        ],
        set(),
    ),
}


@pytest.mark.parametrize(("policies", "expected"), POLICIES.values(), ids=POLICIES)
def test_what_the_pods_of_a_job_cannot_reach(policies, expected):
    gaps = find_gaps(policies, NAMESPACE)
    assert {(gap.target, gap.direction) for gap in gaps} == expected
    assert all(gap.job == "" for gap in gaps)


def test_a_gap_names_the_policies_that_select_the_pods():
    other = a_policy("other", pods={"matchLabels": {"app": "web"}})
    gaps = find_gaps([a_policy("b"), other, a_policy("a")], NAMESPACE)
    assert [gap.policies for gap in gaps] == [("a", "b")]


ONE_JOB = {"matchLabels": {"ddpjob.dev/job": "train"}}
TWO_JOBS = {
    "matchExpressions": [{"key": "ddpjob.dev/job", "operator": "In", "values": ["one", "two"]}]
}


@pytest.mark.parametrize(
    ("policies", "jobs"),
    [
        ([a_policy(pods=ONE_JOB)], ["train"]),
        ([a_policy(pods=TWO_JOBS)], ["one", "two"]),
        # The pods of one job reach each other, and nobody else does.
        ([a_policy(pods=ONE_JOB, ingress=[{"from": [{"podSelector": ONE_JOB}]}])], []),
        # Of all jobs, only this one is admitted.
        (
            [a_policy(), a_policy(pods=ONE_JOB, ingress=[{"from": [{"podSelector": ONE_JOB}]}])],
            [""],
        ),
    ],
    ids=["one is closed", "two are closed", "one is isolated", "one is admitted"],
)
def test_a_policy_may_be_about_one_job(policies, jobs):
    assert [gap.job for gap in find_gaps(policies, NAMESPACE)] == jobs


def test_what_the_cluster_would_refuse_is_no_error():
    odd = [{}, {"metadata": None, "spec": {"podSelector": [], "ingress": {}, "policyTypes": 3}}]
    assert find_gaps(odd, NAMESPACE)
