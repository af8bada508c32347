"""SIGTERM and SIGINT: all ranks stop after the same step, and save a checkpoint of it.

Only rank 1 gets a signal here. The next vote is after step 12:

    rank 0   step 11 │ step 12 │ vote ─┐ save ── leave: exit code 143
    rank 1   step 11 │ step 12 │ vote ─┘ save ── leave: exit code 143
                 ▲                 the highest signal of all ranks
                 SIGTERM: noted by a handler, and written to the wake-up descriptor

A thread, the watchdog, reads the descriptor. If no vote follows within GRACE seconds, the peers are
gone and this rank waits in a collective, without running Python. Then the watchdog ends it:

    rank 1   step 11 │ step 12 (waits for rank 0) ............ exit code 143, no checkpoint
                 ▲ SIGTERM                        └ GRACE seconds later

Both ends have exit code 128 + signal. Launchers expect this code after their signal. The message
tells the two ends apart.

Forked processes, such as the workers of a DataLoader, take no part in this.
"""

import os
import signal
import socket
import sys
import threading
import time
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.checkpoint.claim import TakenOver
from ddp_trainer.errors import Interrupted, UserError
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.progress import Progress

SIGNALS = (signal.SIGTERM, signal.SIGINT)

# Time between two votes, and the most steps between them.
SECONDS_BETWEEN_VOTES = 0.5
STEPS_BETWEEN_VOTES = 64

# Seconds from a signal to the end of a process that makes no further step. torchrun kills its
# workers 30 s after it passed the signal on, and a checkpoint must fit in between.
GRACE = 20.0

# Seconds between two looks at an unfinished checkpoint.
LOOK_INTERVAL = 0.1


class StopVote:
    """Lets the ranks agree to stop after one of them got a signal.

        stop = StopVote(runtime, checkpoints)
        for step, batch in enumerate(batches, 1):
            ...
            stop.after_step(step)

    - `checkpoints`: where the last step is saved. Without it nothing is saved.
    - `progress`: reports the checkpoint and the end of the run.
    - `grace`: see below, in seconds.

    A node may get SIGTERM while its peers do not, for example if it is drained. If its ranks simply
    left, the last steps of the others would be lost. So the ranks vote at step boundaries. An
    all-reduce in each step would cost a small model a tenth of its speed. So they vote about every
    half second, at steps known to all ranks: with each vote rank 0 announces, from its own speed,
    the number of steps until the next one.

    From the first signal on, a watchdog ends the process with 128 + signal unless a vote takes
    place within `grace` seconds, or a checkpoint is being written. A rank in a collective with lost
    peers runs no Python, and would wait until the collective's own timeout. Further signals change
    nothing: torchrun and terminals send several.
    """

    def __init__(
        self,
        runtime: Runtime,
        checkpoints: Checkpoints | None = None,
        progress: Progress | None = None,
        *,
        grace: float = GRACE,
    ) -> None:
        self._runtime = runtime
        self._checkpoints = checkpoints
        self._progress = progress
        self._grace = grace
        self._received: signal.Signals | None = None
        self._voted = threading.Event()
        # The signal agreed on in the last vote.
        self.agreed: signal.Signals | None = None
        self.vote_at_next_step()
        self._listen()

    def after_step(self, step: int) -> None:
        """Vote after a training step. If the ranks agree to stop, save a checkpoint and leave.

        Every rank calls it after each step. If the step is saved already, it is not saved again.
        Raises Interrupted when the checkpoint is written.
        """
        if self._runtime.stragglers:
            self._runtime.stragglers.finished(step)
        if self.at_step_boundary():
            self.leave(step)

    def leave(self, step: int) -> NoReturn:
        """Save a checkpoint if the step has none, wait until it is written, and raise Interrupted.

        Every rank calls it when the ranks have agreed to stop. `after_step` does so. Call it
        yourself if an evaluation ended early: `if stop.agreed: stop.leave(step)`.
        """
        assert self.agreed is not None
        path = self._save(step)
        name = self.agreed.name
        if self._progress:
            where = str(path) if path else None
            self._progress.emit("interrupted", step=step, signal=name, path=where)
        else:
            saved = f"its checkpoint is {path}" if path else "no checkpoint is written"
            self._runtime.warn(f"stopped by {name} after step {step}; {saved}")
        # If one rank left early, its agent would kill rank 0 while it writes.
        self._runtime.barrier()
        raise Interrupted(self.agreed, self.received, step)

    def _save(self, step: int) -> Path | None:
        """Save a checkpoint and wait until it is written. Return its path on rank 0."""
        checkpoints = self._checkpoints
        if checkpoints is None:
            return None
        try:
            checkpoints.wait()
        except TakenOver:
            raise
        except UserError as error:
            # If the last checkpoint could not be written, this one is still tried.
            self._runtime.warn(str(error))
        save = checkpoints.save_once
        if self._progress:
            save = partial(self._progress.save, checkpoints)
        path = save(step)
        checkpoints.wait()
        return path

    def vote_at_next_step(self) -> None:
        """Vote at the next step, because steps of another kind begin. Every rank calls it."""
        self._steps_to_vote = 1
        self._steps_since_vote = 0
        self._last_vote = time.monotonic()

    def at_step_boundary(self) -> signal.Signals | None:
        """Return the signal if all ranks agree to stop, else None.

        Every rank calls it, equally often.
        """
        self._steps_to_vote -= 1
        self._steps_since_vote += 1
        if self._steps_to_vote > 0:
            return None
        ballot = torch.tensor([self._received or 0, self._steps_until_next()])
        result = self._runtime.maximum(ballot)
        agreed = int(result[0])
        self._steps_to_vote = int(result[1])
        self._steps_since_vote = 0
        self._last_vote = time.monotonic()
        if agreed:
            self.agreed = signal.Signals(agreed)
            self._voted.set()
        return self.agreed

    @property
    def received(self) -> bool:
        """True if this process itself got a signal."""
        return self._received is not None

    def _steps_until_next(self) -> int:
        """Return the steps until the next vote on rank 0, and 0 on the other ranks."""
        if not self._runtime.is_main:
            return 0
        seconds_per_step = (time.monotonic() - self._last_vote) / self._steps_since_vote
        steps = int(SECONDS_BETWEEN_VOTES / max(seconds_per_step, 1e-6))
        return max(1, min(STEPS_BETWEEN_VOTES, steps))

    def _listen(self) -> None:
        # Python's handlers run only after the main thread has returned from a call, such as a
        # collective. The handler in C writes to the wake-up descriptor at once, and the watchdog
        # reads it.
        receiver, sender = socket.socketpair()
        # It stays open after the watchdog has ended. DataLoader's SIGCHLD is written to it too.
        self._receiver = receiver
        sender.setblocking(False)
        signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._note)
        _exclude_child_processes()
        watchdog = threading.Thread(
            target=self._watch, args=(receiver,), name="stop-watchdog", daemon=True
        )
        watchdog.start()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or signal.Signals(number)

    def _watch(self, receiver: socket.socket) -> None:
        # Other signals with a handler in Python arrive too, such as DataLoader's SIGCHLD.
        number = receiver.recv(1)[0]
        while number not in SIGNALS:
            number = receiver.recv(1)[0]
        if self._voted.wait(self._grace):
            return
        while any(is_writing() for is_writing in self._runtime.is_writing):
            if self._voted.wait(LOOK_INTERVAL):
                return
        name = signal.Signals(number).name
        newest = self._checkpoints.newest if self._checkpoints else None
        message = (
            f"ddp-trainer: no step ended within {self._grace:g} s after {name}; exiting without a "
            f"checkpoint of the last steps{f'; the newest is {newest}' if newest else ''}"
        )
        print(message, file=sys.stderr, flush=True)
        os._exit(128 + number)


# The signal mask of the forking thread.
_before_fork = threading.local()


@cache
def _exclude_child_processes() -> None:
    """Register the fork hooks once. They last as long as the process."""
    os.register_at_fork(
        before=_block_signals,
        after_in_parent=_restore_mask,
        after_in_child=_reset_child,
    )


def _block_signals() -> None:
    """Block the signals during a fork.

    A child that gets a signal in its first moments would write to its parent's wake-up descriptor.
    """
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _restore_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _reset_child() -> None:
    """Reset the signals of a forked child, such as a worker of DataLoader. It does not vote.

    SIGTERM ends it. It ignores Ctrl-C, because Ctrl-C reaches the parent too, and the parent
    decides.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _restore_mask()


def leave(
    number: signal.Signals,
    step: int,
    *,
    vote: StopVote,
    checkpoints: Checkpoints,
    progress: Progress,
) -> NoReturn:
    """Save a checkpoint, and raise Interrupted. Every rank calls it.

    `StopVote.after_step` votes and does this in one call.
    """
    vote.agreed = number
    vote._checkpoints = checkpoints
    vote._progress = progress
    vote.leave(step)
