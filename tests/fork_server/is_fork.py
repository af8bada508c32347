"""Print whether this process is a fork of the server."""

import sys

print("ddpjob.agent.zygote" in sys.modules)
