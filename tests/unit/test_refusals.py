"""A quota's message says whether it counts ended pods. The rest is in tests/wiring."""

import pytest

from ddpjob.controller.errors import Refused
from ddpjob.controller.refusals import refused_or_error
from ddpjob.core.api.reasons import Reason
from ddpjob.kube.errors import ApiError


@pytest.mark.parametrize(
    ("resource", "counts_ended_pods"),
    [("count/pods", True), ("pods", False), ("requests.cpu", False)],
)
def test_only_a_quota_of_objects_counts_ended_pods(resource, counts_ended_pods):
    message = (
        f"exceeded quota: gangs, requested: {resource}=1, used: {resource}=2, limited: {resource}=2"
    )
    refused = refused_or_error(ApiError(403, "Forbidden", message))
    assert isinstance(refused, Refused)
    assert refused.reason == Reason.QUOTA
    assert refused.counts_ended_pods is counts_ended_pods
