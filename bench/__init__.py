"""Programs that measure. Each is run from the root of a clone, as `python -m bench.NAME`.

`gpu_speed` and `tutorial_loop` need torchrun. The API server of the tests imports from its own
folder.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "apiserver")]
