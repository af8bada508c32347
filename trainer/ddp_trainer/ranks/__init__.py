"""The processes of a run: their group, their devices, and their common model.

`group` joins a process group and returns a Runtime. `runtime` has this class, with the collectives.
`hardware` has the differences between kinds of devices. `stragglers` finds the slow rank after a
timeout.

May import `errors`.
"""
