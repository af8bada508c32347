"""Train a small network in a loop with Accelerate, and resume it exactly after any end.

    python train.py
    torchrun --standalone --nproc-per-node 2 train.py
    ddpjob run --local job.yaml --config-map accelerate=train.py

Accelerate sets up the device, the process group, DDP and the precision. `attach()` gives the
sampler, the checkpoints and the handling of signals of ddp_trainer on that group. It needs torch,
accelerate and ddp_trainer. The data are random, and nothing is downloaded.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from ddp_trainer import Checkpoints, GlobalBatchSampler, ShardLoader, StopVote, attach


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--checkpoint-dir", default=os.environ.get("DDP_CHECKPOINT_DIR"), help="none: no resume")
    add("--epochs", type=int, default=20, help="passes over the data")
    add("--batch-size", type=int, default=16, help="samples per step, over all processes")
    add("--save-every", type=int, default=10, help="steps between two checkpoints")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def train(options: argparse.Namespace, accelerator: Accelerator) -> None:
    """Train on random points, whose sum the network learns."""
    torch.manual_seed(options.seed)
    data = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(net, optimizer)

    with attach(device=accelerator.device) as runtime:
        ranks = (runtime.rank, runtime.world_size)
        sampler = GlobalBatchSampler(len(data), options.batch_size, *ranks, seed=options.seed)
        loader = ShardLoader(data, sampler, seed=options.seed)

        # Continue from the newest checkpoint.
        parts = {"model": net, "optimizer": optimizer, "sampler": sampler}
        checkpoints = Checkpoints(options.checkpoint_dir, runtime, parts)
        step = checkpoints.restore()
        stop = StopVote(runtime, checkpoints)
        steps = step + sampler.batches_until(options.epochs)
        while sampler.epoch < options.epochs:
            for shard, batch in loader:
                points = batch.to(accelerator.device)
                loss = (model(points) - points.sum(1, keepdim=True)).square().sum()
                # DDP averages over the ranks. This makes it the mean over the whole batch.
                accelerator.backward(loss * (runtime.world_size / shard.batch_size))
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if runtime.is_main:
                    line = {"event": "train", "step": step, "steps": steps}
                    print(json.dumps(line), flush=True)

                # Stop if a rank got a signal. Save from time to time.
                stop.after_step(step)
                if step % options.save_every == 0 or step == steps:
                    checkpoints.save(step)


def main() -> None:
    options = read_options()
    train(options, Accelerator(cpu=not torch.cuda.is_available()))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
