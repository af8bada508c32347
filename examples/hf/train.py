"""Train a small GPT-2 with the Trainer of transformers, and resume it exactly after any end.

    python train.py
    torchrun --standalone --nproc-per-node 2 train.py
    ddpjob run --local job.yaml --config-map hf=train.py

The loop is the one of transformers. TrainingArguments makes the process group. On this group,
`attach()` provides ddp_trainer's sampler, checkpoints and handling of signals. The script needs
torch, transformers, accelerate and ddp_trainer. The data are random, and nothing is downloaded.
"""

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ddp_trainer import Checkpoints, GlobalBatchSampler, Runtime, ShardLoader, StopVote, attach


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--checkpoint-dir", default=os.environ.get("DDP_CHECKPOINT_DIR"), help="none: no resume")
    add("--epochs", type=int, default=20, help="passes over the data")
    add("--batch-size", type=int, default=16, help="sequences per step, over all processes")
    add("--save-every", type=int, default=10, help="steps between two checkpoints")
    add("--seed", type=int, default=0)
    return parser.parse_args()


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of random tokens. Each token occurs twice in a row."""

    def __init__(self, count: int = 160, length: int = 32) -> None:
        numbers = torch.Generator().manual_seed(0)
        half = torch.randint(64, (count, length // 2), generator=numbers)
        self.tokens = half.repeat_interleave(2, dim=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the model's arguments for a sequence. The model shifts the labels itself."""
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Batches:
    """This rank's batches from the position of the sampler to the end of the last epoch.

    It has no length, so the Trainer counts steps and not epochs.
    """

    def __init__(self, loader: ShardLoader, epochs: int) -> None:
        self.loader = loader
        self.epochs = epochs

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.loader.sampler.epoch < self.epochs:
            for _, batch in self.loader:
                yield batch


class OwnBatches(Trainer):
    """A Trainer with batches already split over the ranks."""

    def __init__(self, batches: Batches, **settings: Any) -> None:
        super().__init__(**settings)
        self.batches = batches

    def get_train_dataloader(self) -> Batches:
        return self.batches


class Resume(TrainerCallback):
    """Restores the newest checkpoint at the start, saves, and stops all ranks after a signal."""

    def __init__(
        self, runtime: Runtime, sampler: GlobalBatchSampler, options: argparse.Namespace
    ) -> None:
        self.runtime = runtime
        self.sampler = sampler
        self.options = options

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: Any,
        control: Any,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
        **_: Any,
    ) -> None:
        # The Trainer has made the optimizer and the schedule just before this call.
        parts = {
            "model": model,
            "optimizer": optimizer,
            "schedule": lr_scheduler,
            "sampler": self.sampler,
        }
        self.checkpoints = Checkpoints(self.options.checkpoint_dir, self.runtime, parts)
        state.global_step = self.checkpoints.restore()
        self.stop = StopVote(self.runtime, self.checkpoints)

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        if self.runtime.is_main:
            line = {"event": "train", "step": step, "steps": args.max_steps}
            print(json.dumps(line), flush=True)
        self.stop.after_step(step)
        if step % self.options.save_every == 0 or step == args.max_steps:
            self.checkpoints.save(step)


def main() -> None:
    options = read_options()
    data = Sequences()
    args = TrainingArguments(
        output_dir="unused",
        max_steps=options.epochs * -(-len(data) // options.batch_size),
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        seed=options.seed,
        use_cpu=not torch.cuda.is_available(),
        # The checkpoints and the reports are those of the callback.
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    # The process group exists as soon as the arguments know their device.
    device = args.device
    with attach(device=device) as runtime:
        sampler = GlobalBatchSampler(
            len(data), options.batch_size, runtime.rank, runtime.world_size, seed=options.seed
        )
        torch.manual_seed(options.seed)
        config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
        trainer = OwnBatches(
            Batches(ShardLoader(data, sampler, seed=options.seed), options.epochs),
            model=GPT2LMHeadModel(config),
            args=args,
            callbacks=[Resume(runtime, sampler, options)],
        )
        trainer.train()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
