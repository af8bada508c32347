"""The agent that runs in every pod of a job.

`agent.py` travels into the pod as a file, and uses nothing of this package. No module imports it.
"""
