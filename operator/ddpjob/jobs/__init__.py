"""Jobs and runs as people write and read them: manifests, metrics and progress.

Nothing is decided here. This package is as pure as the core, with one exception: `from_script`
reads the user's files. May import `core.api` and `sources`.
"""
