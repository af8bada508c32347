"""Fields of other objects of Kubernetes that users write into a spec, and what to write instead."""

CONTAINER = "spec.podTemplate.spec.containers[name=trainer]"

# Each sentence follows "unknown field; ".
INSTEAD = {
    "backoffLimit": "write failurePolicy.maxRestarts",
    "restartPolicy": "write failurePolicy.maxRestarts",
    "replicas": "write nodes",
    "completions": "write nodes",
    "parallelism": "write nodes",
    "pytorchReplicaSpecs": "that is a PyTorchJob; write nodes, image and args",
    "template": "write podTemplate for what a spec has no field for",
    "containers": "the spec itself has image and args; sidecars are in podTemplate.spec.containers",
    "command": "write args, which begins with the script, or torchrun.command for a wrapper",
    "script": "write args, which begins with the script",
    "workingDir": f"code sets the working directory; without code it is workingDir of {CONTAINER}",
    "securityContext": "write podTemplate.spec.securityContext",
    "schedulerName": "write podTemplate.spec.schedulerName",
    "initContainers": "write podTemplate.spec.initContainers",
    "hostNetwork": "write podTemplate.spec.hostNetwork",
    "labels": "write podTemplate.metadata.labels for the pods",
    "annotations": "write podTemplate.metadata.annotations for the pods",
}


def instead_of(path: str) -> str:
    """Return what to write in place of a field such as `spec.command`, or an empty string."""
    parent, _, key = path.rpartition(".")
    sentence = INSTEAD.get(key, "") if parent == "spec" else ""
    return f"; {sentence}" if sentence else ""
