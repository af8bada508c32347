"""What may go wrong through the user's doing. Every such error is one sentence that says what to do."""

import signal


class UserError(ValueError):
    """Wrong use: a flag, a folder, an environment or a checkpoint that cannot be what the user meant."""


class Interrupted(SystemExit):
    """The ranks agreed to stop at a signal; the checkpoint, if any, is written. Uncaught it ends Python with 128 + signal.

    `received` tells whether this very process got the signal. A process that did not was only following its peers,
    and whoever looks for the cause of the end must not blame it.
    """

    def __init__(self, number: signal.Signals, received: bool, step: int) -> None:
        super().__init__(128 + number)
        self.exit_code = 128 + number
        self._cause = (
            f"received {number.name}" if received else f"another rank received {number.name}"
        )
        self._step = step

    def __str__(self) -> str:
        return f"{self._cause}; stopped after step {self._step}"
