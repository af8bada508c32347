"""Errors that a user can solve. Each message is one sentence that says what to do.

May import no other package.
"""

import errno
import signal

# Errors of a path that is wrong, or that this user may not use. Another attempt would fail too,
# unless the path has worked before.
WRONG_PATH = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
)


class UserError(ValueError):
    """Wrong use: a flag, a folder, an environment or a checkpoint that cannot work.

    `is_common`: all ranks raise it together, so one of each node prints it. Any other error may be
    that of one rank alone, which prints it itself.
    """

    exit_code = 2

    def __init__(self, message: str = "", *, is_common: bool = False) -> None:
        super().__init__(message)
        self.is_common = is_common


class RetryableError(UserError):
    """A device or a storage that failed. Another attempt, maybe on another machine, may succeed.

    A launcher may take exit code 2 for wrong use, after which a restart is of no use.
    """

    exit_code = 1


def path_error(message: str, error: OSError, *, has_worked: bool = False) -> UserError:
    """Return the error of a path that cannot be used: retryable unless the path is wrong.

    A path that this process has used before is not wrong. Its storage has failed: a disk was
    mounted again as read-only, a ticket has expired, or a volume is gone.
    """
    is_wrong = error.errno in WRONG_PATH and not has_worked
    return UserError(message) if is_wrong else RetryableError(message)


class SlowRankError(RuntimeError):
    """A collective timed out. The message names the rank that the others waited for."""


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
