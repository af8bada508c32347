"""The agent in every pod of a job, and the programs that start torchrun and its workers there.

The files travel into the pod as they are, in one folder. They need Python 3.9, and torch in
`torchrun`, `zygote` and `worker`; they use nothing else of ddpjob.

    agent ──▶ torchrun ──▶ workers      each `──▶` is a process, started by `launch`
      └─────▶ zygote                    imports torch once; torchrun and workers are forks of it

This file has the names shared by these processes.
"""

import os

# The folder of these files.
PROGRAMS = os.path.dirname(os.path.abspath(__file__))

# Variables of torchrun and of workers: the agent's folder, and the Python of workers.
FOLDER = "DDP_AGENT_FOLDER"
PYTHON = "DDP_AGENT_PYTHON"

# A variable of a forked worker: the number of its stand-in, the process started by torchrun.
STAND_IN = "DDP_AGENT_STAND_IN"

# In the agent's folder: the pipe of each rank, the exception at the end of a fork, the socket of
# the zygote, and torchrun's record.
PIPE = "rank-{index}"
NOTE = "exception-{index}"
SOCKET = "zygote"
RECORD = "failures.json"

# The beginning of the first line in the pipe of a rank.
HEADER = b"DDP_AGENT_WORKER "

# The beginning of the agent's own lines in the output.
NOTICE = "ddpjob agent: "

# Characters of an exception in a report.
EXCEPTION = 500
