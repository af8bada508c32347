"""SIGTERM and SIGINT: all ranks stop after the same step, or a rank whose peers are gone leaves on its own."""

import os
import signal
import socket
import sys
import threading
import time
from functools import cache
from types import FrameType
from typing import NoReturn

import torch

from ddp_trainer.checkpoint import Checkpoints
from ddp_trainer.errors import Interrupted
from ddp_trainer.progress import Progress
from ddp_trainer.runtime import Runtime

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SECONDS_BETWEEN_VOTES = 0.5
STEPS_BETWEEN_VOTES = 64
GRACE = 20.0  # torchrun kills 30 s after it passed the signal on; a checkpoint must fit in between


class StopVote:
    """Lets the ranks agree that one of them was told to stop.

    A node may get SIGTERM while its peers do not (a drained node), and a rank that simply left would take the others'
    last steps with it. So the ranks ask each other at step boundaries. An all-reduce per step would cost a small model
    a tenth of its speed; they ask about every half second instead, at steps that all know: with each vote rank 0
    says, from its own measured speed, how many steps later the next one is (64 at most, in case steps become slower).

    From the first signal on a watchdog ends the process with 128 + signal unless a vote takes place within `grace`
    seconds: a rank blocked in a collective whose peers are gone runs no Python, and would wait for the collective's
    own time-out. A second signal changes nothing; torchrun and a terminal both send several.
    """

    def __init__(self, runtime: Runtime, grace: float = GRACE) -> None:
        self._runtime, self._grace = runtime, grace
        self._received: signal.Signals | None = None
        self.agreed: signal.Signals | None = None  # what the last vote said
        self._voted = threading.Event()
        self.soon()
        self._listen()

    def soon(self) -> None:
        """Vote at the next step, and take the speed from there: another kind of steps begins. Every rank calls it."""
        self._steps_to_vote, self._steps_since_vote = 1, 0
        self._last_vote = time.monotonic()

    def at_step_boundary(self) -> signal.Signals | None:
        """The signal that all ranks agree to stop for, or None. Every rank calls it, equally often."""
        self._steps_to_vote -= 1
        self._steps_since_vote += 1
        if self._steps_to_vote > 0:
            return None
        ballot = self._runtime.maximum(
            torch.tensor([self._received or 0, self._steps_until_next()])
        )
        agreed, self._steps_to_vote = int(ballot[0]), int(ballot[1])
        self._steps_since_vote = 0
        self._last_vote = time.monotonic()
        if agreed:
            self.agreed = signal.Signals(agreed)
            self._voted.set()
        return self.agreed

    @property
    def received(self) -> bool:
        """Whether this process itself got a signal."""
        return self._received is not None

    def _steps_until_next(self) -> int:
        if not self._runtime.is_main:
            return 0
        per_step = (time.monotonic() - self._last_vote) / self._steps_since_vote
        return max(1, min(STEPS_BETWEEN_VOTES, int(SECONDS_BETWEEN_VOTES / max(per_step, 1e-6))))

    def _listen(self) -> None:
        # The wake-up descriptor is written by the C handler at once, while Python's own handler waits until the main
        # thread is back from whatever it is blocked in; the watchdog has to know without it.
        told, tell = socket.socketpair()
        tell.setblocking(False)
        signal.set_wakeup_fd(tell.detach(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._note)
        _keep_children_out()
        threading.Thread(
            target=self._watch, args=(told,), name="stop-watchdog", daemon=True
        ).start()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or signal.Signals(number)

    def _watch(self, told: socket.socket) -> None:
        number = told.recv(1)[0]
        while (
            number not in SIGNALS
        ):  # but of another with a handler in Python, such as DataLoader's SIGCHLD
            number = told.recv(1)[0]
        if not self._voted.wait(self._grace):
            name = signal.Signals(number).name
            print(
                f"ddp-trainer: {name}, and no step ended for {self._grace:g} s after it: leaving",
                file=sys.stderr,
            )
            sys.stderr.flush()
            os._exit(128 + number)


_before_the_fork = threading.local()


@cache
def _keep_children_out() -> None:
    """Once, as it lasts as long as the process."""
    os.register_at_fork(
        before=_hold, after_in_parent=_let_through, after_in_child=_leave_signals_to_the_parent
    )


def _leave_signals_to_the_parent() -> None:
    """A forked child, such as DataLoader's workers, has no vote: SIGTERM ends it, and Ctrl-C is the parent's affair."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _let_through()


def _hold() -> None:
    """Until a fork is over: a child that was told to end in its first instants would tell its parent by our descriptor."""
    _before_the_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_the_fork.mask)


def leave(
    number: signal.Signals,
    step: int,
    *,
    vote: StopVote,
    checkpoints: Checkpoints,
    progress: Progress,
) -> NoReturn:
    """Save, report, wait until every rank has got here, and raise Interrupted. Every rank calls it."""
    path = progress.save(checkpoints, step)
    progress.emit("interrupted", step=step, signal=number.name, path=path and str(path))
    progress.runtime.barrier()  # a rank that left early would have its agent kill rank 0 in the middle of writing
    raise Interrupted(number, vote.received, step)
