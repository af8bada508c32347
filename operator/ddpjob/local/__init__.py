"""Jobs on this machine: the core's decisions, with process groups instead of pods.

<<<<<<< HEAD
The way of the data: `manifest` reads and checks the file, `translate` turns a rendered pod into a
command with its environment and folders, `processes` plays the kubelet, and `run` is the loop that
observes, decides and acts.
=======
`manifest` reads the file and refuses what cannot run here. `run` is the loop that observes, decides
and acts. For each pod of a plan, `translate` turns the rendered pod into a command, and `local_pod`
runs that command as a kubelet would.
>>>>>>> w-local
"""
