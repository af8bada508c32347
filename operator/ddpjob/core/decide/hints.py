"""What a person can do about the end of a process, from its exit code and its exception."""

import re

from ddpjob.core.api.job import Job

# What may have ended a process, by its exit code as torchrun and as a shell report it: SIGKILL, and
# SIGBUS.
MEMORY = "if nobody killed it, memory ran out: raise resources.limits.memory or use less"
SHM = "/dev/shm may be full: raise resources.limits.memory, or use fewer DataLoader workers"
BY_EXIT_CODE = {-9: MEMORY, 137: MEMORY, -7: SHM, 135: SHM}

# The words of Python, of the trainer and of torch.save for a file that a process may not write.
NOT_WRITABLE = ("Permission denied", "cannot be opened")

# A kubelet changes the group of most volumes to the pod's fsGroup, but of NFS and hostPath never.
CHECKPOINTS = (
    "the user of the container may not write to claim {claim}; with NFS and hostPath, fsGroup has "
    "no effect: change the owner of the folder on the volume, or the pod's runAsUser"
)


def hint_for(job: Job, exit_code: int | None, exception: str) -> str:
    """Return what to do about a failed process, or an empty string."""
    if exit_code in BY_EXIT_CODE:
        return BY_EXIT_CODE[exit_code]
    checkpoint = job.spec.checkpoint if job.spec else None
    if checkpoint is None or not any(words in exception for words in NOT_WRITABLE):
        return ""
    is_path = rf"(?<![\w/.-]){re.escape(checkpoint.mount_path)}(?![\w.-])"
    return CHECKPOINTS.format(claim=checkpoint.claim) if re.search(is_path, exception) else ""
