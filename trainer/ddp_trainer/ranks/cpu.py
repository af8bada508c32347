"""Settings of Linux and of malloc that make training on CPUs faster."""

import ctypes
import os
import platform
from contextlib import suppress

# Numbers of malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

# Variables by which a user chooses malloc's thresholds.
MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")

# Largest pieces of memory that malloc keeps, in bytes: the most that every version of mallopt(3)
# accepts.
LARGEST_KEPT = 32 << 20


def schedule_as_batch() -> None:
    """Set the policy SCHED_BATCH (sched(7)) for this thread and those that it starts later.

    A thread that wakes then does not preempt a running one. gloo's threads wake several times in an
    all-reduce, which takes milliseconds longer with the default policy
    (docs/decisions/0007-batch-scheduling.md). It needs no privilege.
    """
    # Only Linux has this policy.
    if not hasattr(os, "SCHED_BATCH"):
        return
    # A sandbox may forbid it, and the training works without it.
    with suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def keep_freed_memory(up_to: int = LARGEST_KEPT) -> None:
    """Let glibc's malloc keep freed pieces of up to `up_to` bytes for the next allocation.

    A step allocates and frees the same tensors as the step before. By default much of that memory
    goes back to Linux each time (docs/decisions/0008-freed-memory.md). If malloc's thresholds or
    tunables are set already, they are kept.
    """
    is_chosen = any(name in os.environ for name in MALLOC_VARIABLES)
    is_tuned = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if is_chosen or is_tuned or platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    if mallopt(M_MMAP_THRESHOLD, up_to):
        # -1: never give memory back from the top of the heap.
        mallopt(M_TRIM_THRESHOLD, -1)
