"""Train a small network in a loop with Accelerate and Accelerate's own checkpoints.

    python plain.py
    torchrun --standalone --nproc-per-node 2 plain.py
    ddpjob run --local --script plain.py --nodes 2 --checkpoints ddpjob-checkpoints

Each start continues from the newest checkpoint. After SIGTERM, all ranks save one and stop. It
needs torch and accelerate. The data are random, and nothing is downloaded.
"""

import argparse
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    folder = os.environ.get("DDP_CHECKPOINT_DIR", "checkpoints")
    add("--checkpoint-dir", type=Path, default=folder, help="where checkpoints are saved")
    add("--epochs", type=int, default=20, help="passes over the data")
    add("--batch-size", type=int, default=8, help="samples per step and process")
    add("--save-every", type=int, default=10, help="steps between two checkpoints")
    add("--seed", type=int, default=0)
    return parser.parse_args()


class Position:
    """The epoch, the batches of it that are done, and all steps. It is a part of a checkpoint."""

    def __init__(self) -> None:
        self.epoch = self.batch = self.step = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the oldest first."""
    found = [path for path in folder.glob("step-*") if path.suffix != ".new"]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Save a checkpoint. It gets its name when all ranks have written their part."""
    new = folder / f"step-{step}.new"
    accelerator.save_state(str(new))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        new.rename(folder / f"step-{step}")
        for old in checkpoints(folder)[:-2]:
            shutil.rmtree(old)


def main() -> None:
    options = read_options()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        # The order of the samples then depends only on the seed and the epoch.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(options.seed)
    points = torch.randn(192, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(points, points.sum(1, keepdim=True))
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = DataLoader(data, options.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

    position = Position()
    accelerator.register_for_checkpointing(position)
    if saved := checkpoints(options.checkpoint_dir):
        accelerator.load_state(str(saved[-1]))
    steps = options.epochs * len(loader)

    def note(*_: Any) -> None:
        accelerator.set_trigger()

    signal.signal(signal.SIGTERM, note)
    while position.epoch < options.epochs:
        loader.set_epoch(position.epoch)
        for inputs, targets in accelerator.skip_first_batches(loader, position.batch):
            accelerator.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            position.batch += 1
            position.step += 1
            if position.batch == len(loader):
                position.epoch, position.batch = position.epoch + 1, 0
            if accelerator.is_main_process:
                line = {"event": "train", "step": position.step, "steps": steps}
                print(json.dumps(line), flush=True)

            # Every rank learns here whether one of them got SIGTERM.
            must_stop = accelerator.check_trigger()
            if must_stop or position.step % options.save_every == 0 or position.step == steps:
                save(accelerator, options.checkpoint_dir, position.step)
            if must_stop:
                accelerator.end_training()
                # With 0, the job would count this process as finished.
                sys.exit(128 + signal.SIGTERM)
    accelerator.end_training()


if __name__ == "__main__":
    main()
