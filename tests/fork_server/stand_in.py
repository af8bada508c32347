"""Be the process that a test sees of a fork: python -IS stand_in.py OPERATOR FOLDER ARGUMENTS...

OPERATOR: the folder with the package ddpjob. FOLDER: that of the server's socket.
"""

import os
import sys

_, operator, folder, *arguments = sys.argv
sys.path.insert(0, operator)

from ddpjob.agent import FOLDER, launch  # noqa: E402

os.environ[FOLDER] = folder
launch.run_by_zygote("python", arguments)
# The server has refused, or does not run.
del os.environ[FOLDER]
os.execv(sys.executable, [sys.executable, *arguments])
