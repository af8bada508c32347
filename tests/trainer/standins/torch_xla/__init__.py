"""Stands in for torch_xla 2.9 in tests of several processes. PJRT on a CPU supports only one.

The calls have the meaning given in its documentation. The device is the CPU, and the group "xla" is
gloo's. The stand-in counts its calls, and writes the counts to $STANDIN_CALLS at the end, one file
per rank.
"""

import atexit
import json
import os
from collections import Counter
from pathlib import Path

import torch

calls = Counter()


def device(index=None):
    calls["device"] += 1
    return torch.device("cpu")


def sync(wait=False, reset_scope=True):
    calls["sync"] += 1


def manual_seed(seed, device=None):
    calls["manual_seed"] += 1


@atexit.register
def write():
    if folder := os.environ.get("STANDIN_CALLS"):
        Path(folder, f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(calls))
