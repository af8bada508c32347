"""What a DDPJob should become next. Pure: no clock, no network, no kopf, no Kubernetes client.

`pods` reads what the API server shows into an `observe.Observation`. `decide` turns that, and the
time, into a `plan.Plan`. `render` turns a planned pod into the object to create. Two packages carry
out plans: `controller` in a cluster, `local` on one machine.
"""
