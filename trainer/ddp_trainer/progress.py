"""What a run tells the world: JSON lines on stdout, a heartbeat file, a result file, TensorBoard's, and where the time went.

stdout carries one JSON object per line with the key "event" and nothing else, from global rank 0 alone; everything
meant for people goes to stderr.
"""

import json
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_trainer.checkpoint import Checkpoints
from ddp_trainer.errors import UserError
from ddp_trainer.runtime import Runtime
from ddp_trainer.tensorboard import EventFile

HEARTBEAT_SECONDS = 1.0
PHASES = (
    "import",
    "rendezvous",
    "setup",
    "data",
    "forward",
    "backward",
    "optimizer",
    "evaluate",
    "checkpoint",
)


def peak_memory_mib() -> float:
    """The most memory that this process ever had resident, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(
        peak / (2**20 if platform.system() == "Darwin" else 2**10), 1
    )  # Darwin counts bytes, Linux KiB


def as_json(value: Any) -> str:
    """One line of JSON. It has neither NaN nor infinity, for which stands null."""

    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: finite(found) for name, found in value.items()}
        if isinstance(value, list | tuple):
            return [finite(found) for found in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value))


class Progress:
    """The reporter of one run.

    `environment` is where DDP_RESULT_FILE, DDP_HEARTBEAT_FILE and DDP_TENSORBOARD_DIR are looked up.
    """

    def __init__(
        self, runtime: Runtime, log_every: int = 50, environment: Mapping[str, str] = os.environ
    ) -> None:
        self.runtime, self.log_every = runtime, log_every
        self.seconds = dict.fromkeys(PHASES, 0.0) | dict(runtime.seconds)
        self._result_file = environment.get("DDP_RESULT_FILE") if runtime.is_main else None
        self._heartbeat_file = (
            environment.get("DDP_HEARTBEAT_FILE") if runtime.local_rank == 0 else None
        )
        self._board_folder = environment.get("DDP_TENSORBOARD_DIR") if runtime.is_main else None
        self._board: EventFile | None = None
        self._last_beat = float("-inf")
        self._told_of_heartbeat = self._told_of_divergence = False
        self._total_steps = self._epochs = 0
        self._loss_sum = torch.zeros((), dtype=runtime.hardware.sums, device=runtime.device)
        self._samples = 0
        self._interval_began = time.perf_counter()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Book the block's wall time to `phase`. On a GPU, work counts where the CPU waits for it."""
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self.seconds[phase] += spent
            if phase in ("evaluate", "checkpoint"):  # not part of the training speed
                self._interval_began += spent

    def emit(self, event: str, **fields: Any) -> None:
        """Print one event (global rank 0 only); what `train` and `eval` measured goes to TensorBoard too."""
        if self.runtime.is_main:
            print(as_json({"event": event, "time": round(time.time(), 3), **fields}), flush=True)
        if self._board and event in ("train", "eval"):
            try:
                measured = {
                    name: value for name, value in fields.items() if isinstance(value, float)
                }
                self._board.add(
                    fields["step"], {f"{event}/{name}": value for name, value in measured.items()}
                )
            except OSError as error:
                self.runtime.warn(f"nothing more is written to {self._board_folder}: {error}")
                self._board = None

    def start(self, *, epochs: int, steps: int, **fields: Any) -> None:
        """Report the run's size. `steps` counts the whole run, those before a resume, its `resumed_step`, included.

        Raises UserError where TensorBoard's files are wanted and cannot be written.
        """
        if self._board_folder:
            self._board = EventFile(Path(self._board_folder), fields.get("resumed_step"))
        self._epochs, self._total_steps = epochs, steps
        self.emit(
            "start",
            world_size=self.runtime.world_size,
            device=self.runtime.device.type,
            backend=self.runtime.backend,
            epochs=epochs,
            steps=steps,
            **fields,
        )
        self._begin_interval()

    def step(
        self, step: int, epoch: int, *, loss_sum: Tensor, samples: int, learning_rate: float
    ) -> None:
        """Note one training step; report every `log_every` steps and at the last one. Every rank calls it.

        `loss_sum` is the sum of the losses of this rank's own samples, `samples` the size of the global batch.
        """
        self.beat(step)
        self._loss_sum += loss_sum.detach()
        self._samples += samples
        if step % self.log_every and step != self._total_steps:
            return
        loss = float(self.runtime.sum(self._loss_sum)) / self._samples
        elapsed = time.perf_counter() - self._interval_began
        if not math.isfinite(loss) and not self._told_of_divergence:
            self._told_of_divergence = True
            self.runtime.warn(
                f"the loss is {loss} at step {step}: the training diverges, a lower learning rate may help"
            )
        self.emit(
            "train",
            epoch=epoch + 1,
            epochs=self._epochs,
            step=step,
            steps=self._total_steps,
            loss=loss,
            learning_rate=learning_rate,
            samples_per_second=round(self._samples / elapsed, 1),
        )
        self._begin_interval()

    def save(self, checkpoints: Checkpoints, step: int) -> Path | None:
        """Save a checkpoint, and report it where there was none of this step. Every rank calls it."""
        began, before = time.perf_counter(), checkpoints.newest
        with self.timed("checkpoint"):
            path = checkpoints.save(step)
        if path and path != before:
            self.emit(
                "checkpoint",
                step=step,
                path=str(path),
                seconds=round(time.perf_counter() - began, 4),
            )
        return path

    def beat(self, step: int) -> None:
        """Note that `step` is done; renew the heartbeat file (local rank 0, where DDP_HEARTBEAT_FILE is set) once a second."""
        if self.runtime.ledger:
            self.runtime.ledger.finished(step)
        now = time.monotonic()
        if self._heartbeat_file is None or now - self._last_beat < HEARTBEAT_SECONDS:
            return
        self._last_beat = now
        path = Path(self._heartbeat_file)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_text(json.dumps({"time": time.time(), "step": step}))
            partial.replace(path)
        except OSError as error:  # a full disk is no reason to lose the training, and it may pass
            if not self._told_of_heartbeat:
                self._told_of_heartbeat = True
                said = f"ddp-trainer: no heartbeat at step {step}: {path} cannot be written ({error.strerror or error})"
                print(
                    said, file=sys.stderr, flush=True
                )  # by each node, which has a file of its own

    def end(self, step: int, result: Mapping[str, Any]) -> None:
        """Report success: the last event, and the result file.

        The result file is written in place: in a container it may be a bind mount (a termination log) that cannot be renamed
        over, of at most 4,096 bytes. Raises UserError where it cannot be written; the event has the result by then.
        """
        seconds = {phase: round(spent, 4) for phase, spent in self.seconds.items()}
        self.emit(
            "end",
            step=step,
            result=dict(result),
            seconds=seconds,
            peak_memory_mib=peak_memory_mib(),
        )
        if self._result_file is not None:
            try:
                Path(self._result_file).write_text(as_json(result))
            except OSError as error:
                raise UserError(
                    f"the training is done, but its result cannot be written to DDP_RESULT_FILE={self._result_file}: "
                    f"{error.strerror or error}"
                ) from error

    def _begin_interval(self) -> None:
        self._loss_sum.zero_()
        self._samples = 0
        self._interval_began = time.perf_counter()
