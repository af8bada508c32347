"""Share one cluster between the workers of pytest-xdist.

The first worker that needs the cluster creates it. A test has a turn on it: tests with the mark
`alone` have it for themselves, all others at the same time.
"""

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

# The cluster has one name on a machine, so the locks are those of the machine.
LOCKS = Path(tempfile.gettempdir()) / "ddpjob-test-locks"


@contextmanager
def locked(name: str, *, alone: bool = True) -> Iterator[None]:
    """Hold a lock of this machine during the block. Unless `alone`, others may share it."""
    LOCKS.mkdir(parents=True, exist_ok=True)
    with (LOCKS / name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        # The lock ends when the file is closed.
        yield


@contextmanager
def turn(*, alone: bool) -> Iterator[None]:
    """Hold the cluster during the block.

    A test waiting for exclusive use holds the queue, so later tests cannot overtake it.
    """
    with ExitStack() as stack:
        with locked("queue"):
            stack.enter_context(locked("cluster", alone=alone))
        yield
