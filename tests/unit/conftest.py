"""How many examples Hypothesis draws. `HYPOTHESIS_PROFILE` is dev (the default), ci or soak."""

import os

from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile("dev", max_examples=100, deadline=None, suppress_health_check=SLOW)
# The same examples in every run, so that a change can be judged by its tests.
settings.register_profile("ci", settings.get_profile("dev"), max_examples=2000, derandomize=True)
settings.register_profile("soak", settings.get_profile("dev"), max_examples=100_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
