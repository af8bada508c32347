"""Train a small classifier with Lightning Fabric, and resume it exactly after any end.

    python train.py
    torchrun --standalone --nproc-per-node 2 train.py
    ddpjob run --local job.yaml --config-map lightning=train.py

Fabric sets up the device, the process group, DDP and the precision. On this group, `attach()`
provides ddp_trainer's sampler, checkpoints and handling of signals. The script needs torch,
lightning and ddp_trainer. The data are random, and nothing is downloaded.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_trainer import (
    Checkpoints,
    GlobalBatchSampler,
    Shard,
    ShardLoader,
    StopVote,
    attach,
    evaluate,
    evaluation_shards,
)
from ddp_trainer.run.evaluation import Sums, classification_sums


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--checkpoint-dir", default=os.environ.get("DDP_CHECKPOINT_DIR"), help="none: no resume")
    add("--epochs", type=int, default=20, help="passes over the data")
    add("--batch-size", type=int, default=32, help="samples per step, over all processes")
    add("--save-every", type=int, default=10, help="steps between two checkpoints")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def some_data(count: int, seed: int) -> TensorDataset:
    """Return points of 16 dimensions. The class is the index of the largest of the first four."""
    points = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, points[:, :4].argmax(1))


def train(options: argparse.Namespace, fabric: Fabric) -> None:
    """Train, evaluate, and print the accuracy."""
    data, test_data = some_data(400, seed=1), some_data(100, seed=2)
    fabric.seed_everything(options.seed)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(net, optimizer)

    with attach(device=fabric.device) as runtime:
        ranks = (runtime.rank, runtime.world_size)
        sampler = GlobalBatchSampler(len(data), options.batch_size, *ranks, seed=options.seed)
        loader = ShardLoader(data, sampler, seed=options.seed)

        # Continue from the newest checkpoint.
        parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
        checkpoints = Checkpoints(options.checkpoint_dir, runtime, parts)
        step = checkpoints.restore()
        stop = StopVote(runtime, checkpoints)
        steps = step + sampler.batches_until(options.epochs)
        while sampler.epoch < options.epochs:
            model.train()
            for shard, batch in loader:
                points, labels = fabric.to_device(batch)
                loss = F.cross_entropy(model(points), labels, reduction="sum")
                # DDP averages over the ranks. This makes it the mean over the whole batch.
                fabric.backward(loss * (runtime.world_size / shard.batch_size))
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

        def sums_of(batch: tuple[Shard, list[Tensor]]) -> Sums:
            points, labels = fabric.to_device(batch[1])
            return classification_sums(net(points), labels)

        shards = evaluation_shards(len(test_data), options.batch_size, runtime)
        sums = evaluate(net, ShardLoader(test_data, shards), sums_of, runtime=runtime)
        if runtime.is_main:
            accuracy = sums["correct"] / sums["samples"]
            print(json.dumps({"event": "eval", "step": step, "accuracy": accuracy}), flush=True)


def main() -> None:
    options = read_options()
    # torchrun tells how many processes it has started. Without it there is one.
    fabric = Fabric(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
    )
    fabric.launch()
    train(options, fabric)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
