"""A training loop with Accelerate. The parts of ddp_trainer let it resume exactly."""

import argparse
import json

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from ddp_trainer import Checkpoints, GlobalBatchSampler, ShardLoader, StopVote, attach


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint-dir")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    data = torch.randn(200, 8)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(net, optimizer)
    with attach(device=accelerator.device) as runtime:
        sampler = GlobalBatchSampler(len(data), 16, runtime.rank, runtime.world_size)
        loader = ShardLoader(data, sampler)
        parts = {"model": net, "optimizer": optimizer, "sampler": sampler}
        checkpoints = Checkpoints(options.checkpoint_dir, runtime, parts)
        step = checkpoints.restore()
        stop = StopVote(runtime, checkpoints)
        while sampler.epoch < options.epochs:
            for shard, batch in loader:
                loss = (model(batch) - batch.sum(1, keepdim=True)).square().sum()
                accelerator.backward(loss * (runtime.world_size / shard.batch_size))
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if runtime.is_main:
                    print(json.dumps({"event": "train", "step": step}), flush=True)
                stop.after_step(step)
                if step % 10 == 0:
                    checkpoints.save(step)
        # The last step may be one of those above.
        checkpoints.save_once(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
