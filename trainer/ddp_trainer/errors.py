"""Errors that a user can solve. Each message is one sentence, and says what to do.

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
    """Wrong use: an unusable flag, folder, environment or checkpoint.

    `is_common`: all ranks raise it together, so one of each node prints it. Any other error may
    occur on one rank alone, so this rank prints it.
    """

    exit_code = 2

    def __init__(self, message: str = "", *, is_common: bool = False) -> None:
        super().__init__(message)
        self.is_common = is_common


class RetryableError(UserError):
    """A failed device or storage. Another attempt, maybe on another machine, may succeed.

    The exit code is not 2, because a launcher may take 2 for wrong use, and not restart.
    """

    exit_code = 1


def path_error(message: str, error: OSError, *, has_worked: bool = False) -> UserError:
    """Return the error of an unusable path: retryable unless the path is wrong.

    If this process has used the path before (`has_worked`), it is not wrong. Its storage has
    failed: a disk was mounted again as read-only, a ticket has expired, or a volume is gone.
    """
    is_wrong = error.errno in WRONG_PATH and not has_worked
    return UserError(message) if is_wrong else RetryableError(message)


class SlowRankError(RuntimeError):
    """A collective timed out. The message names the slow rank, if it is known."""


class Interrupted(SystemExit):
    """The ranks agreed to stop after a signal. The checkpoint, if any, is written.

    If it is not caught, Python ends with 128 + signal. `received` is True if this process itself
    got the signal. Otherwise it only followed its peers, and did not cause the end.
    """

    def __init__(self, number: signal.Signals, received: bool, step: int) -> None:
        super().__init__(128 + number)
        self.exit_code = 128 + number
        who = "received" if received else "another rank received"
        self._cause = f"{who} {number.name}"
        self._step = step

    def __str__(self) -> str:
        return f"{self._cause}; stopped after step {self._step}"
