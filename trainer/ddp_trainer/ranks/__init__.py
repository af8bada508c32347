"""The processes of a run: their group, their devices, and the model that they train together.

`group` joins a process group and returns the Runtime of `runtime`, which has the collectives.
`hardware` has what differs between kinds of devices. `stragglers` finds the rank that the others
wait for.

May import `errors`.
"""
