"""A DDPJob as data: names, spec and status, with the readers, times and delays that all share.

Nothing of a cluster is known here. May import no other package.
"""
