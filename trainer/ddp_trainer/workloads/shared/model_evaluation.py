"""Evaluation of a classifier after each epoch: scores, the best epoch, and the model's file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.cli.options import ClassifierOptions
from ddp_trainer.data.sampler import Shard
from ddp_trainer.run.evaluation import (
    Sums,
    classification_sums,
    evaluate,
    evaluation_shards,
    without_repeats,
)
from ddp_trainer.run.interrupt import StopVote
from ddp_trainer.run.progress import Progress
from ddp_trainer.workloads.shared.task import Task


def output_folders(options: ClassifierOptions) -> tuple[Path | None, Path | None]:
    """Return the folder of the checkpoints and the folder of the model's file.

    If only one of --checkpoint-dir and --model-dir is given, both folders are the same. If neither
    is given, both are None and nothing is written.
    """
    checkpoint_folder = options.checkpoint_dir or options.model_dir
    model_folder = options.model_dir or options.checkpoint_dir
    return checkpoint_folder, model_folder


@dataclass
class Scores:
    """The evaluations so far. Checkpoints contain them, so a resumed run knows its best epoch.

    Epochs count from 1.
    """

    # The last evaluated epoch.
    evaluated: int = 0
    best_epoch: int = 0
    best_accuracy: float = -1.0
    # The weights of the best epoch on the CPU, if the task keeps the best.
    best_weights: dict[str, Tensor] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


@dataclass
class Evaluator:
    """Evaluates the model, keeps the best scores, and writes the weights to the model's file."""

    task: Task
    options: ClassifierOptions
    progress: Progress
    checkpoints: Checkpoints
    scores: Scores
    stop: StopVote

    @property
    def model_file(self) -> Path | None:
        """Return the file of the weights, or None if there is no folder for it."""
        _, model_folder = output_folders(self.options)
        return model_folder / self.options.model_filename if model_folder else None

    def rewrite_best_model(self) -> None:
        """Write the best epoch's weights from the checkpoint, if it has any.

        The model's folder may be on another machine than before the resume, and no later epoch may
        be better.
        """
        if self.model_file and self.scores.best_weights:
            self._write_model(self.scores.best_weights, self.model_file)

    def run(self, epoch: int, step: int) -> dict[str, float]:
        """Evaluate the model after `epoch` epochs and return the result of the run so far.

        Every rank calls it. Raises Interrupted if the ranks agree to stop, and UserError if the
        model's file cannot be written.
        """
        found = self._evaluate(step)
        self.progress.emit("eval", epoch=epoch, step=step, **found)
        is_best = self._update_scores(epoch, found["accuracy"])
        if self.model_file and (is_best or not self.task.keep_best):
            with self.progress.timed("checkpoint"):
                self._write_model(self.task.model.state_dict(), self.model_file)

        result = {"accuracy": found["accuracy"], "loss": found["loss"]}
        if self.task.keep_best:
            result["best_accuracy"] = self.scores.best_accuracy
            result["best_epoch"] = self.scores.best_epoch
        return result

    def _evaluate(self, step: int) -> dict[str, Any]:
        """Return accuracy, loss and samples. Leave the training if the ranks agree to stop."""
        task = self.task
        runtime = self.progress.runtime
        autocast = torch.autocast(runtime.device.type, torch.bfloat16, enabled=task.bf16)
        batch_size = self.options.batch_size * runtime.world_size
        with self.progress.timed("evaluate"), autocast:
            sums = evaluate(
                task.model,
                evaluation_shards(task.test_samples, batch_size, self.progress),
                self._sums_of,
                progress=self.progress,
                vote=self.stop,
            )
        if self.stop.agreed:
            self.stop.leave(step)
        samples = task.test_samples
        assert sums["samples"] == samples
        return {
            "accuracy": sums["correct"] / samples,
            "loss": sums["loss"] / samples,
            "samples": samples,
        }

    def _sums_of(self, shard: Shard) -> Sums:
        if not len(shard.indices):
            return {}
        inputs, labels = self.task.fetch_test(shard.indices)
        return classification_sums(self.task.model(inputs), without_repeats(labels, shard))

    def _update_scores(self, epoch: int, accuracy: float) -> bool:
        """Record an evaluation and return True if it is the best so far."""
        scores = self.scores
        scores.evaluated = epoch
        if accuracy <= scores.best_accuracy:
            return False
        scores.best_epoch = epoch
        scores.best_accuracy = accuracy
        if self.task.keep_best:
            weights = self.task.model.state_dict()
            scores.best_weights = {
                name: tensor.detach().cpu().clone() for name, tensor in weights.items()
            }
        return True

    def _write_model(self, weights: Mapping[str, Tensor], path: Path) -> None:
        """Write only the weights to `path`, completely or not at all, on rank 0.

        Raises UserError if the file cannot be written, or if a newer start has the folder.
        """
        if not self.progress.runtime.is_main:
            return
        self.checkpoints.write_beside(path, weights)
        self.progress.emit("model", path=str(path))
