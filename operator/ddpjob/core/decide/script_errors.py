"""The exception at the end of an attempt, and whether another attempt could succeed."""

import re

from ddpjob.core.api.history import MAX_ATTEMPT_MESSAGE

# The same script raises these exceptions again in the same image. No kind of OSError is among them:
# a volume, a network or another program may come back.
PERMANENT = frozenset(
    {
        "ImportError",
        "ModuleNotFoundError",
        "SyntaxError",
        "IndentationError",
        "TabError",
        "NameError",
        "UnboundLocalError",
        "AttributeError",
        "TypeError",
    }
)

# CUDA's error if torch was not built for the GPU.
NO_KERNEL = "no kernel image is available"

# The exception in the message on a failed attempt.
ERROR = re.compile(r"failed with exit code -?\d+: (.+)", re.DOTALL)


def is_permanent(exception: str) -> bool:
    """Return True if another attempt would most likely end by the same exception."""
    name = exception.partition(":")[0].rpartition(".")[2].strip()
    return name in PERMANENT or NO_KERNEL in exception


def error_in(message: str) -> str:
    """Return the exception in the message on a failed attempt, or an empty string."""
    found = ERROR.search(message)
    return found[1] if found else ""


def is_same_error(kept: str, message: str) -> bool:
    """Return True if a message in the history names the same exception as another message.

    The history keeps only the beginning of a long message.
    """
    error = error_in(message)
    known = error_in(kept)
    if len(kept) >= MAX_ATTEMPT_MESSAGE:
        error = error[: len(known)]
    return bool(known) and known == error
