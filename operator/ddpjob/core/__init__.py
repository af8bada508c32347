"""Decisions about DDPJobs. This package is pure: it has no clock, no network and no client.

    api ─▶ observe ─▶ plan ─┬─▶ decide
                            └─▶ render      imports go from the right to the left

`observe` reads what the API server shows into an Observation. `decide` turns it, and the time, into
a Plan. `render` turns a planned pod into the object to create. Both know the version of the agent
by `agent_files`. Two packages carry out plans: `controller` in a cluster, `local` on one machine.
"""
