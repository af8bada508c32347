"""Reports of a run: JSON lines, a heartbeat file, a result file, TensorBoard, and where time went.

Standard output has one JSON object per line with the key "event" and nothing else, from global rank
0 only. Messages for people go to standard error.
"""

import json
import math
import os
import platform
import re
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.errors import UserError
from ddp_trainer.files import write_atomically
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.tensorboard import EventFile

# What Linux says about this process.
STATUS = Path("/proc/self/status")

# Seconds between two writes of the heartbeat file.
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

# Phases not counted as training when the speed is computed.
NOT_TRAINING = ("evaluate", "checkpoint")


def peak_memory_mib() -> float:
    """Return the highest resident memory of this process in MiB.

    Linux gives it as VmHWM in /proc/self/status, see proc(5). `ru_maxrss` of getrusage(2) is the
    second choice: Linux keeps it over exec, so the fork of a larger process reports the memory of
    the larger one.
    """
    if STATUS.is_file():
        peak = re.search(r"^VmHWM:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
        if peak:
            return round(int(peak[1]) / 2**10, 1)
    # Darwin counts bytes, Linux KiB.
    per_mib = 2**20 if platform.system() == "Darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / per_mib, 1)


def to_json(value: Any) -> str:
    """Return one line of JSON. JSON has neither NaN nor infinity: they become null."""
    return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class Progress:
    """The reports of one run.

    - `log_every`: steps between two reports of the loss.
    - `environment` has DDP_RESULT_FILE, DDP_HEARTBEAT_FILE and DDP_TENSORBOARD_DIR, if set.
    - `unit`: what the loss is a mean over, and what the speed counts, such as tokens.
    """

    def __init__(
        self,
        runtime: Runtime,
        log_every: int = 50,
        environment: Mapping[str, str] = os.environ,
        unit: str = "samples",
    ) -> None:
        self.runtime = runtime
        self.log_every = log_every
        self.unit = unit
        # Seconds spent in each phase.
        self.seconds = dict.fromkeys(PHASES, 0.0) | dict(runtime.seconds)
        is_main = runtime.is_main
        self._result_file = environment.get("DDP_RESULT_FILE") if is_main else None
        self._board_folder = environment.get("DDP_TENSORBOARD_DIR") if is_main else None
        self._board: EventFile | None = None
        self._heartbeat = Heartbeat.from_environment(runtime, environment)
        self._checkpoints: Checkpoints | None = None
        # A checkpoint is reported by the thread that writes it.
        self._printing = threading.Lock()
        self._warned_of_divergence = False
        self._step = 0
        self._total_steps = 0
        self._epochs = 0
        # Sums since the last report.
        self._loss_sum = torch.zeros((), dtype=runtime.hardware.sums, device=runtime.device)
        self._samples = 0
        self._interval_start = time.perf_counter()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the block's wall time to `phase`. Work of a GPU counts where the CPU waits for it."""
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.seconds[phase] += spent
            if phase in NOT_TRAINING:
                self._interval_start += spent

    def emit(self, event: str, **fields: Any) -> None:
        """Print an event on global rank 0. Numbers of `train` and `eval` go to TensorBoard too."""
        if self.runtime.is_main:
            line = {"event": event, "time": round(time.time(), 3), **fields}
            with self._printing:
                print(to_json(line), flush=True)
        if self._board and event in ("train", "eval"):
            numbers = {
                f"{event}/{name}": value
                for name, value in fields.items()
                if isinstance(value, float)
            }
            try:
                self._board.add(fields["step"], numbers)
            except OSError as error:
                self.runtime.warn(f"{self._board_folder}: no more events ({error})")
                self._board = None

    def start(self, *, epochs: int, steps: int, **fields: Any) -> None:
        """Report the size of the run.

        `steps` counts the whole run, with those before a resume (`resumed_step`). Raises UserError
        if TensorBoard's files cannot be written.
        """
        if self._board_folder:
            self._board = EventFile(Path(self._board_folder), fields.get("resumed_step"))
        self._step = fields.get("resumed_step", 0)
        self._epochs = epochs
        self._total_steps = steps
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
        """Note one training step. Report every `log_every` steps and at the last one.

        `loss_sum` is the sum of the losses of this rank's own samples. `samples` is the size of the
        global batch. Both count in `unit`. Every rank calls it.
        """
        self.beat(step)
        self._loss_sum += loss_sum.detach()
        self._samples += samples
        if step % self.log_every and step != self._total_steps:
            return
        loss = float(self.runtime.sum(self._loss_sum)) / self._samples
        elapsed = time.perf_counter() - self._interval_start
        self._warn_of_divergence(loss, step)
        self.emit(
            "train",
            epoch=epoch + 1,
            epochs=self._epochs,
            step=step,
            steps=self._total_steps,
            loss=loss,
            learning_rate=learning_rate,
            **{f"{self.unit}_per_second": round(self._samples / elapsed, 1)},
        )
        self._begin_interval()

    def _warn_of_divergence(self, loss: float, step: int) -> None:
        if math.isfinite(loss) or self._warned_of_divergence:
            return
        self._warned_of_divergence = True
        self.runtime.warn(
            f"the training diverges: the loss is {loss} at step {step}; try a lower learning rate"
        )

    def save(
        self, checkpoints: Checkpoints, step: int, *, score: float | None = None
    ) -> Path | None:
        """Save a checkpoint, and report it when it is written. Every rank calls it.

        A thread writes it. `end` waits for the last one. If the step is saved already, it is not
        saved again. See `Checkpoints.save_once`.
        """
        self._checkpoints = checkpoints
        with self.timed("checkpoint"):
            return checkpoints.save_once(step, score=score, on_written=self._report_checkpoint)

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is written. Every rank calls it."""
        if self._checkpoints:
            with self.timed("checkpoint"):
                self._checkpoints.wait()

    def _report_checkpoint(self, step: int, path: Path, seconds: float) -> None:
        self.emit("checkpoint", step=step, path=str(path), seconds=round(seconds, 4))

    def beat(self, step: int | None = None) -> None:
        """Note that `step` is done, by default again the last one. Renew the heartbeat file."""
        step = self._step = self._step if step is None else step
        if self.runtime.stragglers:
            self.runtime.stragglers.finished(step)
        if self._heartbeat:
            self._heartbeat.beat(step)

    def end(self, step: int, result: Mapping[str, Any]) -> None:
        """Report success, when the last checkpoint is written. Every rank calls it.

        It prints the last event, and writes the result file in place. In a container this file may
        be a bind mount of at most 4,096 bytes, and cannot be replaced. Raises UserError if it
        cannot be written; the event then has the result.
        """
        self.wait_for_checkpoint()
        seconds = {phase: round(spent, 4) for phase, spent in self.seconds.items()}
        self.emit(
            "end",
            step=step,
            result=dict(result),
            seconds=seconds,
            peak_memory_mib=peak_memory_mib(),
        )
        if self._result_file is None:
            return
        try:
            Path(self._result_file).write_text(to_json(result))
        except OSError as error:
            raise UserError(
                f"DDP_RESULT_FILE={self._result_file}: the training is complete, but its result "
                f"cannot be written ({error.strerror or error})"
            ) from error

    def _begin_interval(self) -> None:
        self._loss_sum.zero_()
        self._samples = 0
        self._interval_start = time.perf_counter()


class Heartbeat:
    """The heartbeat file of one node. It is renewed at most once per second."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_beat = float("-inf")
        self._warned = False

    @classmethod
    def from_environment(
        cls, runtime: Runtime, environment: Mapping[str, str]
    ) -> "Heartbeat | None":
        """Return the file in DDP_HEARTBEAT_FILE on local rank 0, else None."""
        path = environment.get("DDP_HEARTBEAT_FILE")
        return cls(Path(path)) if path and runtime.local_rank == 0 else None

    def beat(self, step: int) -> None:
        """Write the time and `step`. An error, such as a full disk, does not end the training."""
        now = time.monotonic()
        if now - self._last_beat < HEARTBEAT_SECONDS:
            return
        self._last_beat = now
        entry = json.dumps({"time": time.time(), "step": step}).encode()
        try:
            write_atomically(self._path, lambda file: file.write(entry), durable=False)
        except OSError as error:
            self._warn(f"{self._path}: no heartbeat at step {step} ({error.strerror or error})")

    def _warn(self, message: str) -> None:
        """Print a warning once. Every node prints it, because every node has its own file."""
        if not self._warned:
            self._warned = True
            print(f"ddp-trainer: {message}", file=sys.stderr, flush=True)
