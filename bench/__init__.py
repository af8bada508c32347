"""Programs that measure. Each is run from the root of a clone, as `python -m bench.NAME`.

They use the API server, the clusters and the builders of the tests, so the folders of these can be
imported from.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "apiserver"), str(TESTS / "unit")]
