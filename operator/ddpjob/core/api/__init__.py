"""A DDPJob as data: names, spec and status, with their common readers, times and delays.

Nothing of a cluster is known here. May import no other package.
"""
