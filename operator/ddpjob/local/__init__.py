"""The same jobs on this machine: core's decisions, with process groups in the place of pods.

The way of the data: `manifest` reads and checks the file, `translate` turns a rendered pod into a
command with its environment and folders, `processes` plays the kubelet, and `run` is the loop that
observes, decides and acts.
"""
