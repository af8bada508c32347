"""gloo's words for a timeout, and the end of its group: its threads may be slower than Python."""

import sys

import pytest

from ddp_trainer.ranks.gloo import TIMED_OUT

from . import launch

# gloo's threads get almost no time: they have the lowest priority on a busy core. So Python would
# end before they drop the tensors of the last collective.
SCRIPT = """
import atexit, os, subprocess, sys
from pathlib import Path
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from ddp_trainer.ranks.data_parallel import DistributedModel
from ddp_trainer.ranks.gloo import RUN_LOOP
from ddp_trainer.ranks.group import process_group

# The forks share the imports. Each ends as a new Python does, with the clean-up of the interpreter.
for kind in ("DDP", "FSDP2") * 2:
    fork = os.fork()
    if not fork:
        break
    code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    if code:
        sys.exit(f"{kind}: exit code {code}")
else:
    sys.exit()

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
torch.set_num_threads(1)
with process_group(device="cpu") as runtime:
    model = nn.Linear(4, 4)
    if kind == "FSDP2":
        fully_shard(model)
    else:
        model = DistributedModel(model)
    model(torch.ones(2, 4)).sum().backward()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    atexit.register(busy.kill)
    for path in Path("/proc/self/task").glob("*/comm"):
        if path.read_text().strip() == RUN_LOOP:
            os.sched_setscheduler(int(path.parent.name), os.SCHED_IDLE, os.sched_param(0))
    dist.all_reduce(torch.ones(3))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the scheduling policies of Linux")
def test_a_global_model_does_not_abort_the_end_of_a_process():
    """Without a wait for gloo's threads, five of six such processes ended with SIGABRT."""
    # A fork of the tests ends without the clean-up of the interpreter.
    (run,) = launch.ranks("-c", SCRIPT, processes=1, start=launch.new_python)
    assert run.finish() == 0, run.stderr


@pytest.mark.parametrize(
    ("words", "is_one"),
    [
        ("[unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete", True),
        # With several buckets under way.
        ("[pair.cc:546] Application timeout caused pair closure", True),
        ("[pair.cc:537] Read error [127.0.0.1]:15781: Connection reset by peer", False),
    ],
)
def test_both_messages_of_gloo_after_a_timeout_are_known(words, is_one):
    assert bool(TIMED_OUT.search(words)) == is_one
