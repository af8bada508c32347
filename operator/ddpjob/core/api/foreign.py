"""Fields of other Kubernetes objects, written into a spec by mistake, and what to write instead."""

from ddpjob.core.api import shapes

CONTAINER = "spec.podTemplate.spec.containers[name=trainer]"
CONVERT = "ddpjob convert turns it into a DDPJob"

# Each sentence follows "unknown field; ". All other fields of a pod and of a container have their
# place in podTemplate.
INSTEAD = {
    # Of a Job, a JobSet and a StatefulSet.
    "backoffLimit": "write failurePolicy.maxRestarts",
    "maxRestarts": "write failurePolicy.maxRestarts",
    "restartPolicy": "write failurePolicy.maxRestarts",
    "podFailurePolicy": "write failurePolicy.nonRetryableExitCodes",
    "replicas": "write nodes",
    "completions": "write nodes",
    "parallelism": "write nodes",
    "numNodes": "write nodes",
    "template": "write podTemplate for what a spec has no field for",
    "volumeClaimTemplates": "write checkpoint.claimName, or volumes with a claim",
    # Of other operators for training.
    "pytorchReplicaSpecs": f"that is a PyTorchJob; {CONVERT}",
    "runPolicy": f"that is of a PyTorchJob; {CONVERT}",
    "elasticPolicy": f"that is of a PyTorchJob; {CONVERT}",
    "runtimeRef": f"that is a TrainJob; {CONVERT}",
    "trainer": f"that is of a TrainJob; {CONVERT}",
    "numProcPerNode": "write nprocPerNode",
    "processesPerNode": "write nprocPerNode",
    "resourcesPerNode": "write resources",
    "queue": "write the label kueue.x-k8s.io/queue-name in metadata.labels",
    # Of a pod and its container.
    "containers": "the spec itself has image and args; sidecars are in podTemplate.spec.containers",
    "command": "write args, which begins with the script, or torchrun.command for a wrapper",
    "script": "write args, which begins with the script",
    "workingDir": f"code sets the working directory; without code it is workingDir of {CONTAINER}",
    "labels": "write podTemplate.metadata.labels for the pods",
    "annotations": "write podTemplate.metadata.annotations for the pods",
}


def instead_of(path: str) -> str:
    """Return what to write in place of a field such as `spec.command`, or an empty string."""
    parent, _, key = path.rpartition(".")
    sentence = ""
    if parent == "spec":
        sentence = INSTEAD.get(key) or _in_a_pod(key)
    elif parent == "spec.podTemplate":
        sentence = _in_the_template(key)
    return f"; {sentence}" if sentence else ""


def _in_a_pod(key: str) -> str:
    """Return where a field of a pod or of its container belongs, or an empty string."""
    pod = shapes.shapes()["podTemplate"]["properties"]["spec"]["properties"]
    if key in pod:
        return f"write podTemplate.spec.{key}"
    if key in pod["containers"]["items"]["properties"]:
        return f"it is {key} of {CONTAINER}"
    return ""


def _in_the_template(key: str) -> str:
    """Return where a field belongs if it stands one level too high, or an empty string."""
    template = shapes.shapes()["podTemplate"]["properties"]
    for part in ("metadata", "spec"):
        if key in template[part]["properties"]:
            return f"write podTemplate.{part}.{key}"
    return ""
