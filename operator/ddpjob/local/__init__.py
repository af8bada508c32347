"""Jobs on this machine: the core's decisions, with process groups instead of pods.

`manifest` reads the file and refuses a job that cannot run here. `run` is the loop: observe,
decide, act. For each pod of a plan, `translate` turns the rendered pod into a command, and
`local_pod` runs the command as a kubelet would. May import `core` and `jobs`.
"""
