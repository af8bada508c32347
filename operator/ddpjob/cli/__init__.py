"""The command `ddpjob`. It turns options into calls, and results into output and exit codes.

`main` has the table of the commands, `commands` a module for each, and the other modules are what
several commands share. May import `core`, `jobs`, `sources`, `show`, `kube` and `client`.
"""
