"""The command line: options, the entry point, and two ways to start several processes.

`main` imports the module of a workload by its name, after the options are parsed.

May import `errors`, `ranks`, `checkpoint` and `run`.
"""
