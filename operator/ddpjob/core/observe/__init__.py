"""A cluster as data: a job's pods, their nodes and what their processes have said.

`observation` has the result, an Observation. Nothing is decided here. May import `core.api`.
"""
