"""Find and kill the processes of a pod on this machine.

torchrun starts each worker in a session of its own, and the workers of a killed agent become
orphans. So the processes of a pod are found by a variable in their environment.
"""

import contextlib
import os
from collections.abc import Iterable

import psutil

from ddpjob.core.api import names

# This variable marks the processes of a pod. Its value is the UID of the pod.
POD_UID = "DDPJOB_POD_UID"


def find_processes(uid: str, session: int | None = None) -> list[psutil.Process]:
    """Return the living processes of the pod `uid`, and their descendants.

    A process with an environment of its own is found as a child of another one, or in `session`,
    the session of the pod's agent.
    """
    found = []
    for process in psutil.process_iter():
        # A process may end, or belong to another user, while it is looked at.
        with contextlib.suppress(psutil.Error, OSError):
            in_session = os.getsid(process.pid) == session
            if in_session or process.environ().get(POD_UID) == uid:
                found.append(process)
                found += process.children(recursive=True)
    return living(found)


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the running processes, each once. Zombies have ended."""
    found = []
    for process in dict.fromkeys(processes):
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to processes. Some of them may have ended."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def inherited_environment() -> dict[str, str]:
    """Return this process's environment without the variables of a job.

    torchrun would read its own flags and ranks from such variables.
    """
    reserved = (*names.RESERVED_VARIABLES, POD_UID)
    prefixes = (names.RESERVED_PREFIX, "DDP_")
    env = {}
    for name, value in os.environ.items():
        if name not in reserved and not name.startswith(prefixes):
            env[name] = value
    return env
