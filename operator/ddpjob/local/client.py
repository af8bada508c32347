"""The client of this machine: the same methods as that of a cluster, over a folder of runs."""


class LocalClient:
    """Runs jobs on this machine."""
