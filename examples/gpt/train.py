"""Train a small GPT on the bytes of a text file, on any number of processes.

    python train.py --data tinyshakespeare.txt
    torchrun --standalone --nproc-per-node 2 train.py --data tinyshakespeare.txt
    torchrun --standalone --nproc-per-node 2 train.py --data tinyshakespeare.txt --fsdp
    ddpjob run --local job.yaml

Read it from top to bottom: options, data, model, and the training step by step. It needs torch and
ddp_trainer. Copy it to begin a training of your own.

The model follows GPT-2 (Radford et al., Language Models are Unsupervised Multitask Learners, 2019),
with 256 tokens: one for each value of a byte.
"""

import argparse
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from ddp_trainer import (
    Checkpoints,
    Progress,
    Runtime,
    ShardLoader,
    StopVote,
    UserError,
    accumulate,
    process_group,
)
from ddp_trainer.data.sampler import GlobalBatchSampler, Shard
from ddp_trainer.run.evaluation import IGNORED, evaluate, evaluation_shards, without_repeats

VOCABULARY = 256


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="a text file; its last tenth is for evaluations")
    add("--checkpoint-dir", default=os.environ.get("DDP_CHECKPOINT_DIR"), help="none: no resume")
    add("--epochs", type=int, default=2, help="passes over the text")
    add("--batch-size", type=int, default=32, help="sequences per step, over all processes")
    add("--part-size", type=int, default=32, help="sequences of a process in memory at a time")
    add("--context", type=int, default=128, help="bytes of a sequence")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=128, help="size of the vector of each token")
    add("--dropout", type=float, default=0.1)
    add("--learning-rate", type=float, default=2e-3, help="highest rate of the cosine schedule")
    add("--weight-decay", type=float, default=0.1)
    add("--bf16", action="store_true", help="compute in bfloat16; the weights stay float32")
    add("--fsdp", action="store_true", help="shard model and optimizer (FSDP2) instead of DDP")
    add("--recompute", action="store_true", help="save memory: compute activations twice")
    add("--compile", action="store_true", help="compile the model's blocks")
    add("--workers", type=int, default=0, help="processes that load data for each process")
    add("--save-every", type=int, default=200, help="steps between two checkpoints")
    add("--log-every", type=int, default=20, help="steps between two reports of the loss")
    add("--seed", type=int, default=0)
    return parser.parse_args()


# Data


class Sequences(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The sequences of a text. Each is `context` bytes, and the next byte after each of them.

    The file is mapped into memory, so a text may be larger than the memory.
    """

    def __init__(self, path: Path, context: int, begin: float, end: float) -> None:
        if not path.is_file():
            raise UserError(f"--data {path}: file not found")
        text = np.memmap(path, np.uint8, mode="r")
        self.text = text[int(begin * len(text)) : int(end * len(text))]
        self.context = context
        if len(self) < 1:
            raise UserError(f"--data {path}: too short, needs more than {10 * context} bytes")

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets), both of shape (context,)."""
        start = index * self.context
        piece = torch.from_numpy(self.text[start : start + self.context + 1].astype(np.int64))
        return piece[:-1], piece[1:]


# Model


class Block(nn.Module):
    """Causal self-attention, then a network for each token, both added to their input."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.heads = options.heads
        self.dropout = options.dropout
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens' new vectors, shape (batch, context, width) as `x`."""
        batch, context, width = x.shape
        # Not -1: its value cannot be computed for a batch without sequences.
        size = width // self.heads
        heads = self.attention(self.norm1(x)).view(batch, context, 3, self.heads, size)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        x = x + self.drop(self.project(mixed.transpose(1, 2).reshape(batch, context, width)))
        return x + self.drop(self.contract(F.gelu(self.expand(self.norm2(x)))))

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Gpt(nn.Module):
    """A decoder of transformer blocks. The embedding is also the weight of the output."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.recompute = options.recompute
        self.tokens = nn.Embedding(VOCABULARY, options.width)
        self.positions = nn.Embedding(options.context, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue
            # GPT-2 scales down the initial weights of the outputs added to the sum of all layers.
            is_added = name.endswith(("project.weight", "contract.weight"))
            scale = math.sqrt(2 * options.layers) if is_added else 1.0
            nn.init.normal_(parameter, std=0.02 / scale)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of the next tokens, shape (batch, context, 256)."""
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the losses of all tokens. Without sequences it is 0, with a gradient."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def distribute(model: Gpt, options: argparse.Namespace, runtime: Runtime) -> nn.Module:
    """Return the model for all ranks: in DDP, or sharded in place."""
    if options.compile:
        for block in model.blocks:
            block.compile()
    if not options.fsdp:
        return runtime.wrap(model)
    if runtime.backend == "none":
        raise UserError("--fsdp needs a process group: start the script with torchrun")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    runtime.watch(model)
    return model


def make_optimizer(
    model: nn.Module, options: argparse.Namespace, runtime: Runtime
) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices, but not for biases and norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = runtime.hardware.fused_optimizers
    return torch.optim.AdamW(groups, options.learning_rate, betas=(0.9, 0.95), fused=fused)


def set_learning_rate(
    optimizer: torch.optim.Optimizer, options: argparse.Namespace, done: float
) -> float:
    """Set the rate after a share `done` of the run, from 0 to 1, and return it.

    It rises during the first twentieth and falls along a cosine to a tenth. It depends on samples
    and not on steps, so it stays the same at another number of processes.
    """
    cosine = 0.55 + 0.45 * math.cos(math.pi * done)
    rate: float = options.learning_rate * min(1.0, 20 * done) * cosine
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


# Training


@dataclass
class Training:
    """The objects shared by the steps and the evaluations."""

    options: argparse.Namespace
    runtime: Runtime
    model: Gpt
    distributed: nn.Module
    optimizer: torch.optim.Optimizer
    progress: Progress

    def autocast(self) -> torch.autocast:
        device = self.runtime.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.options.bf16)

    def step(self, shard: Shard, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train on this rank's share of a batch, and return the sum of its tokens' losses."""
        # All ranks have the same number of parts. Some may be empty.
        parts = [(inputs[part], targets[part]) for part in shard.slices(self.options.part_size)]
        total = torch.zeros((), device=self.runtime.device)
        # DDP and FSDP average over the ranks. This makes it the mean over the batch's tokens.
        factor = self.runtime.world_size / (shard.batch_size * self.options.context)
        for part, expected in accumulate(self.distributed, parts):
            with self.progress.timed("forward"), self.autocast():
                loss = loss_sum(self.distributed(part), expected)
            with self.progress.timed("backward"):
                (loss * factor).backward()
            total += loss.detach()
        with self.progress.timed("optimizer"):
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.runtime.step(self.optimizer)
        return total


def train(options: argparse.Namespace, runtime: Runtime) -> None:
    """Train, evaluate after each pass over the text, and report the result."""
    progress = Progress(runtime, options.log_every, unit="tokens")
    torch.set_float32_matmul_precision("high")

    # The first nine tenths of the text are for training, the rest is for evaluations.
    with progress.timed("setup"):
        texts = Sequences(options.data, options.context, 0.0, 0.9)
        held_out = Sequences(options.data, options.context, 0.9, 1.0)
        ranks = (runtime.rank, runtime.world_size)
        sampler = GlobalBatchSampler(len(texts), options.batch_size, *ranks, seed=options.seed)
        loader = ShardLoader(texts, sampler, num_workers=options.workers)

        # Every rank begins with the same weights, because every rank has the same seed.
        model = Gpt(options).to(runtime.device)
        distributed = distribute(model, options, runtime)
        optimizer = make_optimizer(model, options, runtime)
        training = Training(options, runtime, model, distributed, optimizer, progress)
        with training.autocast():
            example = torch.zeros(2, options.context, dtype=torch.long, device=runtime.device)
            runtime.warm_up(distributed, example)
        # From here on, each rank draws its own random numbers, for dropout.
        runtime.seed_rank(options.seed)

        # Continue from the newest checkpoint.
        names = ("context", "layers", "heads", "width")
        shape = {name: getattr(options, name) for name in names}
        parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
        checkpoints = Checkpoints(options.checkpoint_dir, runtime, parts, {"gpt": 1, **shape})
        step = checkpoints.restore()

    progress.start(
        workload="gpt",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        train_samples=len(texts),
        epochs=options.epochs,
        steps=step + sampler.batches_until(options.epochs),
        batch_size=sampler.batch_size,
        resumed_step=step,
    )
    stop = StopVote(runtime, checkpoints, progress)
    found = math.nan
    while sampler.epoch < options.epochs:
        model.train()
        for shard, (inputs, targets) in loader:
            # Take one step. Its rate is the one for its middle.
            middle = shard.start + shard.batch_size / 2
            done = (shard.epoch + middle / len(texts)) / options.epochs
            rate = set_learning_rate(optimizer, options, done)
            loss = training.step(shard, inputs.to(runtime.device), targets.to(runtime.device))
            step += 1
            tokens = shard.batch_size * options.context
            progress.step(step, shard.epoch, loss_sum=loss, samples=tokens, learning_rate=rate)

            # Stop if a rank got a signal. Save from time to time.
            stop.after_step(step)
            if step % options.save_every == 0:
                progress.save(checkpoints, step)

        # Evaluate, and keep the best checkpoint too: if the step is saved already, its score is
        # noted. A run resumed from such a step, or from the last one, evaluates again.
        found = test(training, held_out, stop)
        if stop.agreed:
            stop.leave(step)
        progress.emit("eval", epoch=sampler.epoch, step=step, loss=found)
        progress.save(checkpoints, step, score=-found)
    if math.isnan(found):  # the training was complete before this start
        found = test(training, held_out, stop)
    progress.end(step, {"loss": found})


def test(training: Training, held_out: Sequences, stop: StopVote) -> float:
    """Return the mean loss of the held-out tokens, on all ranks together.

    It is NaN if the ranks agree to stop before the end.
    """
    options, runtime, progress = training.options, training.runtime, training.progress
    batch_size = min(options.batch_size, options.part_size * runtime.world_size)
    loader = ShardLoader(held_out, evaluation_shards(len(held_out), batch_size, runtime))

    def sums_of(batch: tuple[Shard, list[Tensor]]) -> dict[str, Tensor | float]:
        shard, (inputs, targets) = batch
        targets = without_repeats(targets, shard).to(runtime.device)
        with training.autocast():
            logits = training.model(inputs.to(runtime.device))
        return {"loss": loss_sum(logits, targets), "tokens": (targets != IGNORED).sum()}

    with progress.timed("evaluate"):
        sums = evaluate(training.model, loader, sums_of, progress=progress, vote=stop)
    return math.nan if stop.agreed else sums["loss"] / sums["tokens"]


def main() -> None:
    options = read_options()
    try:
        with process_group(seed=options.seed, tune_cpu=True) as runtime:
            train(options, runtime)
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
