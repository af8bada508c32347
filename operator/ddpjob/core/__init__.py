"""What a DDPJob should become next: pure, with no clock, no network, no kopf and no Kubernetes client.

The way of the data: `observe` turns what the API server shows into an Observation, `decide` turns that and the time
into a Plan, `render` turns a planned pod into the object to create. Who carries a plan out (the controller on a
cluster, `local` on a laptop) is none of this room's business.
"""
