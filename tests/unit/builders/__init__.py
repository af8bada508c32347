"""Builders for the core's input: jobs, and pods and nodes from an API server."""
