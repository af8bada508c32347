"""Stand in for a fork, and end as it ends: python -IS stand_in.py OPERATOR FOLDER ARGUMENTS...

OPERATOR: the folder with the package ddpjob. FOLDER: the one with the server's socket.
"""

import os
import stat
import sys
from contextlib import suppress

_, operator, folder, *arguments = sys.argv
sys.path.insert(0, operator)

from ddpjob.agent import FOLDER, launch  # noqa: E402


def inherited_descriptors() -> list[int]:
    """Return the descriptors passed on by the parent process. Python's own are not inheritable."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def run_new_python() -> None:
    os.execv(sys.executable, [sys.executable, *arguments])


# A spawned process of multiprocessing takes descriptors from this one. Its helpers need no torch.
if "--multiprocessing-fork" in arguments:
    # The options before are those of the server.
    del arguments[: arguments.index("-c")]
    descriptors = inherited_descriptors()
    # A fork can open pipes by their descriptors here, but not sockets.
    if not all(stat.S_ISFIFO(os.fstat(each).st_mode) for each in descriptors):
        run_new_python()
    os.environ["FORK_SERVER_DESCRIPTORS"] = " ".join(map(str, descriptors))
elif any(word.startswith("from multiprocessing.") for word in arguments):
    run_new_python()

os.environ[FOLDER] = folder
# torchrun signals the process groups of its workers.
kind = "worker" if "TORCHELASTIC_RUN_ID" in os.environ else "python"
launch.run_by_zygote(kind, arguments)
# The server has refused, or does not run.
del os.environ[FOLDER]
run_new_python()
