"""Stand in for a fork, and end as it ends: python -IS stand_in.py OPERATOR FOLDER ARGUMENTS...

OPERATOR: the folder with the package ddpjob. FOLDER: the one with the server's socket.
"""

import os
import sys

_, operator, folder, *arguments = sys.argv
sys.path.insert(0, operator)

from ddpjob.agent import FOLDER, launch  # noqa: E402

os.environ[FOLDER] = folder
# torchrun signals the process groups of its workers.
kind = "worker" if "TORCHELASTIC_RUN_ID" in os.environ else "python"
launch.run_by_zygote(kind, arguments)
# The server has refused, or does not run.
del os.environ[FOLDER]
os.execv(sys.executable, [sys.executable, *arguments])
