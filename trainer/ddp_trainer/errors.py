"""Errors that a user can solve. Each message is one sentence that says what to do."""

import signal


class UserError(ValueError):
    """Wrong use: a flag, a folder, an environment or a checkpoint that cannot work."""

    exit_code = 2


class Interrupted(SystemExit):
    """The ranks agreed to stop after a signal. The checkpoint, if any, is written.

    If it is not caught, Python ends with 128 + signal. `received` tells whether this process itself
    got the signal. A process that only followed its peers must not be blamed for the end.
    """

    def __init__(self, number: signal.Signals, received: bool, step: int) -> None:
        super().__init__(128 + number)
        self.exit_code = 128 + number
        who = "received" if received else "another rank received"
        self._cause = f"{who} {number.name}"
        self._step = step

    def __str__(self) -> str:
        return f"{self._cause}; stopped after step {self._step}"
