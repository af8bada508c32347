"""A user's own script: plain torch and DistributedDataParallel over gloo.

It fits y = 3 x + 1 and writes the line as the job's result.
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

# All ranks must have the same parameters.
mine = torch.cat([parameter.detach().flatten() for parameter in line.parameters()])
gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, mine)
assert all(torch.equal(mine, other) for other in gathered), gathered

# Both calls fail for a user without a name or a home directory.
Path.home().joinpath("scratch").write_text(getpass.getuser())

if dist.get_rank() == 0:
    slope, offset = (round(number, 1) for number in mine.tolist())
    result = {"slope": slope, "offset": offset, "uid": os.getuid(), "world": dist.get_world_size()}
    Path(os.environ["DDP_RESULT_FILE"]).write_text(json.dumps(result))
dist.destroy_process_group()
