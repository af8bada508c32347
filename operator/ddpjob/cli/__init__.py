"""The command `ddpjob`. It turns options into calls, and results into output and exit codes."""
