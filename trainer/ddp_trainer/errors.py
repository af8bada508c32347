"""What may go wrong through the user's doing. Every such error is one sentence that says what to do."""

import signal


class UserError(ValueError):
    """Wrong use: a flag, a folder, an environment or a checkpoint that cannot be what the user meant."""


class Interrupted(Exception):
    """The ranks agreed to stop at a signal; the checkpoint, if any, is written.

    `received` tells whether this very process got the signal. A process that did not was only following its peers,
    and whoever looks for the cause of the end must not blame it.
    """

    def __init__(self, number: signal.Signals, received: bool, step: int) -> None:
        self.exit_code = 128 + number
        cause = f"received {number.name}" if received else f"another rank received {number.name}"
        super().__init__(f"{cause}; stopped after step {step}")
