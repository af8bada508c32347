"""The operator: the only package that imports kopf. May import `core` and `kube`.

`handlers` (kopf's watches) and `lister` (LISTs at the start and after gaps) fill the `cache` and
add a job's key to the `workqueue`. `reconcile` takes a key, observes the cache and decides. `act`
carries out the plan through `writer`, the only way to write to the API server.
"""
