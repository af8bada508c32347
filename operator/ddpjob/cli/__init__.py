"""The command line: `ddpjob` and `kubectl ddpjob`."""
