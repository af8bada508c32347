"""The API server: requests, kinds of objects and errors, as the operator and its users need them.

Only this layer and the controller know the Kubernetes client. May import `core.api`.
"""
