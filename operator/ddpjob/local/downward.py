"""The fields of a pod available to its variables and its files: the downward API."""

from ddpjob.core.api.readers import Dict, child, children


def pod_fields(pod: Dict) -> dict[str, str]:
    """Return the values of a pod available to a fieldRef here, by path."""
    metadata = pod["metadata"]
    fields = {f"metadata.{key}": str(value) for key, value in metadata.items()}
    for kind in ("labels", "annotations"):
        for key, value in child(metadata, kind).items():
            fields[f"metadata.{kind}['{key}']"] = str(value)
    fields["spec.nodeName"] = str(child(pod, "spec").get("nodeName", ""))
    # Pods of this machine have no address of their own.
    fields["status.podIP"] = "127.0.0.1"
    fields["status.hostIP"] = "127.0.0.1"
    return fields


def downward_files(volume: Dict, pod: Dict) -> dict[str, str]:
    """Return the content of a downwardAPI volume's files by their path in the volume.

    A field not available here becomes an empty file.
    """
    fields = pod_fields(pod)
    files = {}
    for item in children(child(volume, "downwardAPI"), "items"):
        field = str(child(item, "fieldRef").get("fieldPath", ""))
        files[str(item.get("path", ""))] = fields.get(field, "")
    return files
