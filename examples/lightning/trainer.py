"""Train a small classifier with the Trainer of Lightning and the Trainer's own checkpoints.

    python trainer.py
    torchrun --standalone --nproc-per-node 2 trainer.py
    ddpjob run --local --script trainer.py --nodes 2 --checkpoints ddpjob-checkpoints

Each start continues from last.ckpt. After SIGTERM, all ranks save it and stop. It needs torch,
lightning and torchdata. The data are random, and nothing is downloaded.
"""

import argparse
import gc
import json
import os
import signal
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

# It keeps the process group of its import alive, so it comes before there is one.
import torch.distributed.nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    folder = os.environ.get("DDP_CHECKPOINT_DIR", "checkpoints")
    add("--checkpoint-dir", default=folder, help="where checkpoints are saved and looked for")
    add("--epochs", type=int, default=20, help="passes over the data")
    add("--batch-size", type=int, default=16, help="samples per step and process")
    add("--save-every", type=int, default=10, help="steps between two checkpoints")
    add("--seed", type=int, default=0)
    return parser.parse_args()


class Classifier(L.LightningModule):
    """Finds the largest of the first four coordinates of a point."""

    def __init__(self, batch_size: int, seed: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed
        # Lightning's checkpoints have no state of the random numbers, so there is no dropout.
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        points, labels = batch
        return F.cross_entropy(self.net(points), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def train_dataloader(self) -> StatefulDataLoader:
        """Return a loader whose position in the epoch is part of a checkpoint."""
        points = torch.randn(384, 16, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(points, points[:, :4].argmax(1))
        ranks = (self.trainer.world_size, self.trainer.global_rank)
        sampler = DistributedSampler(data, *ranks, seed=self.seed)
        # Lightning calls this for each epoch, but not before it continues within one.
        sampler.set_epoch(self.trainer.current_epoch)
        return StatefulDataLoader(data, self.batch_size, sampler=sampler)


class StopTogether(Callback):
    """All ranks save last.ckpt after the last step; after SIGTERM to any rank they stop before.

    ModelCheckpoint saves after every so many steps, and the last step need not be one of them.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.received = False

    def note(self, *_: Any) -> None:
        self.received = True

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # It replaces Lightning's own handler. That one sends a message between the ranks at
        # whatever point it interrupts.
        signal.signal(signal.SIGTERM, self.note)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            steps = int(trainer.estimated_stepping_batches)
            line = {"event": "train", "step": trainer.global_step, "steps": steps}
            print(json.dumps(line), flush=True)
        received = torch.tensor(float(self.received), device=trainer.strategy.root_device)
        if trainer.strategy.reduce(received, reduce_op="max"):
            trainer.save_checkpoint(self.path)
            # With 0, the job would count this process as finished.
            raise SystemExit(128 + signal.SIGTERM)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def main() -> None:
    options = read_options()
    L.seed_everything(options.seed)
    folder = options.checkpoint_dir
    saves = ModelCheckpoint(folder, every_n_train_steps=options.save_every, save_last=True)
    trainer = L.Trainer(
        # torchrun tells how many processes it has started. Without it there is one.
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
        max_epochs=options.epochs,
        callbacks=[StopTogether(os.path.join(folder, "last.ckpt")), saves],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(options.batch_size, options.seed), ckpt_path="last")
    # A model in DDP keeps gloo's threads alive. One of them can abort a finished process.
    del trainer
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
