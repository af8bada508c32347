"""Print what a process of a DDPJob sees of its accelerator, as one JSON line.

Without torch, 32 processes need little CPU time.
"""

import json
import os
import sys

STRINGS = ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE", "CCOM_SOCKET_IFNAME")
INTEGERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK")

seen: dict[str, str | int | None] = {}
for name in STRINGS:
    seen[name] = os.environ.get(name)
for name in INTEGERS:
    seen[name] = int(os.environ[name])
# One write, so the lines of 32 processes do not mix.
sys.stdout.write(json.dumps(seen) + "\n")
