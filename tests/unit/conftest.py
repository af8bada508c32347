"""How Hypothesis draws examples. `HYPOTHESIS_PROFILE` is dev (the default), ci or soak.

How many histories of a job it draws is in test_properties.py.
"""

import os

from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile("dev", max_examples=100, deadline=None, suppress_health_check=SLOW)
# The same examples in every run, so a change can be judged by its tests.
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True)
settings.register_profile("soak", settings.get_profile("dev"))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
