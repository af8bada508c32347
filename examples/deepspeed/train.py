"""Train a small network with ZeRO stage 1 of DeepSpeed and DeepSpeed's own checkpoints.

    torchrun --standalone --nproc-per-node 2 train.py
    ddpjob run --local job.yaml --config-map deepspeed=train.py

Each start continues from the newest checkpoint. After SIGTERM, all ranks save one and stop. It
needs torch and deepspeed. The data are random, and nothing is downloaded.
"""

import argparse
import json
import os
import signal
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    folder = os.environ.get("DDP_CHECKPOINT_DIR", "checkpoints")
    add("--checkpoint-dir", default=folder, help="where checkpoints are saved and looked for")
    add("--epochs", type=int, default=20, help="passes over the data")
    add("--batch-size", type=int, default=8, help="samples per step and process")
    add("--save-every", type=int, default=10, help="steps between two checkpoints")
    add("--seed", type=int, default=0)
    return parser.parse_args()


class Received:
    """Tells whether a rank got SIGTERM."""

    def __init__(self) -> None:
        self.here = False
        signal.signal(signal.SIGTERM, self.note)

    def note(self, *_: Any) -> None:
        self.here = True

    def anywhere(self, device: torch.device) -> bool:
        """Return the same on all ranks, each of which calls it after a step."""
        received = torch.tensor(float(self.here), device=device)
        dist.all_reduce(received, dist.ReduceOp.MAX)
        return bool(received)


def main() -> None:
    options = read_options()
    if not torch.cuda.is_available():
        # On a CPU, DeepSpeed would compile a kernel for messages in shared memory.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(options.seed)
    points = torch.randn(192, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(points, points.sum(1, keepdim=True))
    # DeepSpeed's checkpoints have no state of the random numbers, so there is no dropout.
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    config = {
        "train_micro_batch_size_per_gpu": options.batch_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    sampler = DistributedSampler(data, seed=options.seed)
    loader = DataLoader(data, options.batch_size, sampler=sampler)

    # Continue from the checkpoint that the file `latest` names.
    path, saved = engine.load_checkpoint(options.checkpoint_dir)
    step = saved["step"] if path else 0
    steps = options.epochs * len(loader)
    received = Received()
    while step < steps:
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            if number < done:
                continue
            loss = F.mse_loss(engine(inputs.to(engine.device)), targets.to(engine.device))
            engine.backward(loss)
            engine.step()
            step += 1
            if dist.get_rank() == 0:
                print(json.dumps({"event": "train", "step": step, "steps": steps}), flush=True)

            # All ranks save: each has a part of the state of the optimizer.
            must_stop = received.anywhere(engine.device)
            if must_stop or step % options.save_every == 0 or step == steps:
                tag = f"step-{step}"
                engine.save_checkpoint(options.checkpoint_dir, tag, client_state={"step": step})
            if must_stop:
                # With 0, the job would count this process as finished.
                sys.exit(128 + signal.SIGTERM)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
