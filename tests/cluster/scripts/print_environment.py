"""What a process of a DDPJob sees of its accelerator, as one JSON line; without torch, so that 32 of them are cheap."""

import json
import os
import sys

NAMES = ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE", "CCOM_SOCKET_IFNAME")
NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK")

seen = {name: os.environ.get(name) for name in NAMES} | {
    name: int(os.environ[name]) for name in NUMBERS
}
sys.stdout.write(json.dumps(seen) + "\n")  # one write, so that lines of 32 processes do not mix
