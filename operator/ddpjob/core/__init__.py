"""Decisions about DDPJobs. This package is pure: it has no clock, no network and no client.

`pods` reads what the API server shows into an `observe.Observation`. `decide` turns that, and the
time, into a `plan.Plan`. `render` turns a planned pod into the object to create. Two packages carry
out plans: `controller` in a cluster, `local` on one machine.
"""
