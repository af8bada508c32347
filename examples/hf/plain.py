"""Train a small GPT-2 with the Trainer of transformers and the Trainer's own checkpoints.

    python plain.py
    torchrun --standalone --nproc-per-node 2 plain.py
    ddpjob run --local --script plain.py --nodes 2 --checkpoints ddpjob-checkpoints

Each start continues from the newest complete checkpoint. After SIGTERM, all ranks save one and
stop. It needs torch, transformers and accelerate. The data are random, and nothing is downloaded.
"""

import argparse
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# It keeps the process group of its import alive, so it comes before there is one.
import torch.distributed.nn
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    folder = os.environ.get("DDP_CHECKPOINT_DIR", "checkpoints")
    add("--checkpoint-dir", default=folder, help="where checkpoints are saved and looked for")
    add("--epochs", type=int, default=20, help="passes over the data")
    add("--batch-size", type=int, default=8, help="sequences per step and process")
    add("--save-every", type=int, default=10, help="steps between two checkpoints")
    add("--seed", type=int, default=0)
    return parser.parse_args()


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of random tokens, each of which occurs twice in a row."""

    def __init__(self, count: int = 160, length: int = 32) -> None:
        numbers = torch.Generator().manual_seed(0)
        half = torch.randint(64, (count, length // 2), generator=numbers)
        self.tokens = half.repeat_interleave(2, dim=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def newest_checkpoint(folder: str) -> str | None:
    """Return the newest checkpoint that is complete.

    The Trainer writes into the final folder, and trainer_state.json last. A process that is killed
    while it saves leaves a folder without it.
    """
    found = [path.parent for path in Path(folder).glob("checkpoint-*/trainer_state.json")]
    newest = max(found, key=lambda path: int(path.name.partition("-")[2]), default=None)
    return str(newest) if newest else None


class StopTogether(TrainerCallback):
    """After SIGTERM to any rank, all ranks save a checkpoint of the same step and stop."""

    def __init__(self) -> None:
        self.received = False
        self.stopped = False
        signal.signal(signal.SIGTERM, self.note)

    def note(self, *_: Any) -> None:
        self.received = True

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            line = {"event": "train", "step": state.global_step, "steps": state.max_steps}
            print(json.dumps(line), flush=True)
        received = torch.tensor(float(self.received), device=args.device)
        if dist.is_initialized():
            dist.all_reduce(received, dist.ReduceOp.MAX)
        if received:
            self.stopped = control.should_save = control.should_training_stop = True


def main() -> None:
    options = read_options()
    args = TrainingArguments(
        output_dir=options.checkpoint_dir,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        learning_rate=3e-3,
        seed=options.seed,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="steps",
        save_steps=options.save_every,
        save_total_limit=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(options.seed)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    stop = StopTogether()
    trainer = Trainer(
        model=GPT2LMHeadModel(config), args=args, train_dataset=Sequences(), callbacks=[stop]
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(options.checkpoint_dir))
    # A model in DDP keeps gloo's threads alive. One of them can abort a finished process.
    del trainer
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    if stop.stopped:
        # With 0, the job would count this process as finished.
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
