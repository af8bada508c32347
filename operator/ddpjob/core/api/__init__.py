"""A DDPJob as data: names, spec and status, and the readers of their values.

Nothing of a cluster is known here. May import no other package.
"""
