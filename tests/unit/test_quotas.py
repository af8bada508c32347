"""What a ResourceQuota demands of each container, and what a LimitRange gives."""

import pytest

from ddpjob.client.quotas import unnamed_resources


def a_quota(*keys, **spec):
    return {"spec": {"hard": dict.fromkeys(keys, "1"), **spec}}


def a_limit_range(kind="Container", **fields):
    return {"spec": {"limits": [{"type": kind, **fields}]}}


@pytest.mark.parametrize(
    ("keys", "unnamed"),
    [
        (("pods", "requests.nvidia.com/gpu", "requests.storage"), []),
        (("cpu", "requests.cpu"), ["requests.cpu"]),
        (("memory", "limits.cpu"), ["requests.memory", "limits.cpu"]),
    ],
)
def test_a_quota_of_cpu_and_memory_demands_that_containers_name_them(keys, unnamed):
    assert unnamed_resources(a_quota(*keys), ()) == unnamed


@pytest.mark.parametrize(
    ("limit_range", "unnamed"),
    [
        (a_limit_range(defaultRequest={"cpu": "1"}), ["limits.cpu"]),
        (a_limit_range(default={"cpu": "1"}), []),
        (a_limit_range(default={"memory": "1Gi"}), ["requests.cpu", "limits.cpu"]),
        (a_limit_range("Pod", max={"cpu": "1"}), ["requests.cpu", "limits.cpu"]),
    ],
)
def test_a_limit_range_has_the_defaults_of_containers(limit_range, unnamed):
    assert unnamed_resources(a_quota("cpu", "limits.cpu"), [limit_range]) == unnamed


@pytest.mark.parametrize(
    ("spec", "concerns_jobs"),
    [
        ({"scopes": ["NotTerminating"]}, True),
        ({"scopes": ["Terminating"]}, False),
        ({"scopes": ["NotBestEffort"]}, False),
        ({"scopeSelector": {"matchExpressions": [{"scopeName": "PriorityClass"}]}}, False),
        (
            {
                "scopeSelector": {
                    "matchExpressions": [{"scopeName": "NotTerminating", "operator": "Exists"}]
                }
            },
            True,
        ),
    ],
)
def test_a_quota_of_other_pods_demands_nothing(spec, concerns_jobs):
    assert bool(unnamed_resources(a_quota("cpu", **spec), ())) is concerns_jobs
