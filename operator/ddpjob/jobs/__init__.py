"""Jobs and runs as people write and read them: manifests, metrics and progress.

Nothing is decided here, and this package is as pure as the core, except that a job that is made of
a script reads it. May import `core.api` and `sources`.
"""
