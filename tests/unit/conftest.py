"""Settings of Hypothesis for these tests: few examples, and always the same ones in CI."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "unit",
    max_examples=1000,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("unit")
