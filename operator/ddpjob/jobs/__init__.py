"""Jobs and runs as people write and read them: manifests, metrics and progress.

Nothing is decided here, and this package is as pure as the core. May import `core.api`.
"""
