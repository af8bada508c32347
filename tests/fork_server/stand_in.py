"""Stand in for a fork, and end as it ends: python -IS stand_in.py OPERATOR FOLDER ARGUMENTS...

OPERATOR: the folder with the package ddpjob. FOLDER: the one with the server's socket.
"""

import os
import sys

_, operator, folder, *arguments = sys.argv
sys.path[:0] = operator, os.path.dirname(__file__)

import descriptors  # noqa: E402

from ddpjob.agent import FOLDER, launch  # noqa: E402


def run_new_python() -> None:
    # This process has the descriptors itself.
    os.environ.pop(descriptors.VARIABLE, None)
    os.execv(sys.executable, [sys.executable, *arguments])


# A spawned process of multiprocessing takes descriptors from this one.
if "--multiprocessing-fork" in arguments:
    # The options of Python come before -c. The server was started with the same ones.
    del arguments[: arguments.index("-c")]
    if not descriptors.offer():
        run_new_python()
# Its resource tracker and its own fork server need no torch.
elif any(word.startswith("from multiprocessing.") for word in arguments):
    run_new_python()

os.environ[FOLDER] = folder
# torchrun signals the process groups of its workers.
kind = "worker" if "TORCHELASTIC_RUN_ID" in os.environ else "python"
launch.run_by_zygote(kind, arguments)
# The server has refused, or does not run.
del os.environ[FOLDER]
run_new_python()
