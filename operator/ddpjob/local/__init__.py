"""Jobs on this machine: the core's decisions, with process groups instead of pods.

`manifest` reads the file and refuses what cannot run here. `run` is the loop that observes, decides
and acts. For each pod of a plan, `translate` turns the rendered pod into a command, and `local_pod`
runs that command as a kubelet would. May import `core` and `jobs`.
"""
