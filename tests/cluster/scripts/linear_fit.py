"""A user's own script: plain torch, DistributedDataParallel over gloo, and nothing of this project.

Fits y = 3 x + 1 and leaves the line it found as the job's result.
"""

import getpass
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
line = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(line.parameters(), lr=0.5)
for _ in range(300):
    x = torch.rand(32, 1)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(line(x), 3 * x + 1).backward()
    optimizer.step()

mine = torch.cat([parameter.detach().flatten() for parameter in line.parameters()])
everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(everyone, mine)
assert all(torch.equal(mine, other) for other in everyone), everyone

Path.home().joinpath("scratch").write_text(
    getpass.getuser()
)  # both fail for a user without name or home
if dist.get_rank() == 0:
    slope, offset = (round(number, 1) for number in mine.tolist())
    result = {"slope": slope, "offset": offset, "uid": os.getuid(), "world": dist.get_world_size()}
    Path(os.environ["DDP_RESULT_FILE"]).write_text(json.dumps(result))
dist.destroy_process_group()
