"""Settings of Linux and of malloc for faster training on CPUs."""

import ctypes
import os
import platform
from contextlib import suppress

# Numbers of malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

# A user's variables for malloc's thresholds.
MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")

# Largest freed pieces of memory kept by malloc, in bytes: the highest value accepted by every
# version of mallopt(3).
LARGEST_KEPT = 32 << 20


def schedule_as_batch() -> None:
    """Set the policy SCHED_BATCH (sched(7)) for this thread and those started by it later.

    A waking thread then does not preempt a running one. gloo's threads wake several times in an
    all-reduce. With the default policy, it takes milliseconds longer ("Smaller choices" in
    docs/developers/design.md). The policy needs no privilege.
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
    goes back to Linux each time ("Smaller choices" in docs/developers/design.md). If malloc's
    thresholds or tunables are set already, they are kept.
    """
    is_chosen = any(name in os.environ for name in MALLOC_VARIABLES)
    is_tuned = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if is_chosen or is_tuned or platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    if mallopt(M_MMAP_THRESHOLD, up_to):
        # -1: never give memory back from the top of the heap.
        mallopt(M_TRIM_THRESHOLD, -1)
