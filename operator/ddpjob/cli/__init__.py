"""The command `ddpjob`. It turns options into calls, and results into output and exit codes.

May import `core`, `jobs`, `kube`, `show`, `local`, `client`, `ui` and `controller`.
"""
