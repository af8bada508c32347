"""The command `ddpjob`: options become calls, and results become output and exit codes."""
