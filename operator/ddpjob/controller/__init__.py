"""The operator: the only room that knows kopf and the Kubernetes client.

The way of the data: `handlers` (kopf's watches) and a periodic LIST fill the `cache` and put a job's key into `wake`;
`reconcile` takes a key, observes the cache, decides, and `act` carries the plan out, as the only writer.
"""
