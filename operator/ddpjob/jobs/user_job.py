"""A DDPJob as a user writes and reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from html import escape
from pathlib import Path
from secrets import token_hex
from typing import Any, Self, Unpack

from ddpjob.core.api import names
from ddpjob.core.api.job import require_job_name
from ddpjob.core.api.kueue import workload_name
from ddpjob.core.api.names import Condition, Phase
from ddpjob.core.api.queue import read_queue
from ddpjob.core.api.queue_positions import Position
from ddpjob.core.api.readers import (
    Dict,
    SpecError,
    child,
    children,
    did_you_mean,
    integer_or_zero,
    quoted,
    require_object,
)
from ddpjob.core.api.requirements import code_advice
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.status import Status
from ddpjob.core.api.times import parse_time
from ddpjob.jobs.spec_fields import ScriptFields, SpecFields
from ddpjob.sources.code import (
    SUBMITTED_BYTES,
    check_size,
    config_map_of,
    read_code,
    size_note,
)
from ddpjob.sources.script import check_script, job_name

# Characters like the API server's own for the end of a `generateName`.
GENERATED = "x7k2p"

# The user's fields of the metadata, beside the name and the namespace.
USERS_METADATA = ("labels", "annotations")


@dataclass(frozen=True, repr=False)
class DDPJob:
    """A DDPJob: its name, its spec in the form of the manifest, and its status.

    Make one with `DDPJob.create("digits", image=…, args=[…], nodes=2)`. `namespace` is empty if the
    client chooses it. `metadata` has the other fields of the manifest's metadata. A job read from a
    cluster has its `status`. `needs` are documents submitted with it: its code. `notes` are part of
    its `advice`. `position` is the position in its queue, if the job waits and Kueue was asked.
    """

    name: str
    spec: Dict
    namespace: str = ""
    metadata: Dict = field(default_factory=dict)
    status: Status = field(default_factory=Status)
    needs: tuple[Dict, ...] = ()
    notes: tuple[str, ...] = ()
    position: Position | None = None

    @classmethod
    def create(cls, name: str, *, namespace: str = "", **spec: Unpack[SpecFields]) -> Self:
        """Return a job to submit. Raises SpecError for a wrong or unknown field."""
        job = cls(require_job_name(name), spec, namespace)
        job.check()
        return job

    @classmethod
    def from_script(
        cls,
        script: str | Path,
        args: Sequence[str] = (),
        *,
        folder: str | Path | None = None,
        name: str = "",
        namespace: str = "",
        **spec: Unpack[ScriptFields],
    ) -> Self:
        """Return a job for a script of your own. The script is submitted with the job.

        `args` are the arguments of the script. `folder` contains the script, and all its files are
        submitted, except hidden and ignored ones. The default name is the name of the script.
        `spec` are the other fields of the spec, such as `image` and `nodes`. Raises SpecError, also
        for more code than a ConfigMap can have.
        """
        path, place = Path(script), Path(folder) if folder is not None else None
        check_script(path)
        code = read_code(path, place)
        config_map = config_map_of(code)
        check_size(config_map, place or path, SUBMITTED_BYTES)
        fields: dict[str, Any] = {
            **spec,
            "args": [code.path_of(path, place), *args],
            "code": {"configMap": config_map["metadata"]["name"]},
        }
        job = cls(require_job_name(name or job_name(path)), fields, namespace, needs=(config_map,))
        job.check()
        files = {name: content for name, (content, _) in code.files.items()}
        advice = code_advice(spec.get("setup", ""), files)
        notes = (*filter(None, [size_note(config_map, place or path)]), *advice)
        return replace(job, notes=notes)

    @classmethod
    def from_manifest(cls, manifest: Dict) -> Self:
        """Return the job in a manifest, or in an answer of the API server. Raises SpecError."""
        kind = f"{_text(manifest.get('apiVersion'))} {_text(manifest.get('kind'))}"
        if kind != f"{names.API_VERSION} {names.KIND}":
            raise SpecError(f"expected a {names.API_VERSION} {names.KIND}, got {quoted(kind)}")
        for key in manifest:
            if key not in names.FIELDS:
                raise SpecError(f"{key}: unknown field{did_you_mean(str(key), names.FIELDS)}")
        metadata = require_object(manifest.get("metadata"), "metadata")
        return cls(
            name=_text(metadata.get("name")),
            spec=require_object(manifest.get("spec"), "spec"),
            namespace=_text(metadata.get("namespace")),
            metadata=metadata,
            status=Status.from_dict(manifest.get("status")),
        )

    def manifest(self) -> dict[str, Any]:
        """Return the job as a manifest, without its status and additions of the API server."""
        kept = {key: self.metadata[key] for key in USERS_METADATA if self.metadata.get(key)}
        metadata = {"name": self.name, **kept}
        if self.namespace:
            metadata["namespace"] = self.namespace
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": metadata,
            "spec": dict(self.spec),
        }

    def body(self) -> dict[str, Any]:
        """Return the job as the API server shows it."""
        metadata = {key: value for key, value in self.metadata.items() if key != "managedFields"}
        manifest = self.manifest()
        manifest["metadata"] = {**metadata, **manifest["metadata"]}
        return {**manifest, "status": self.status.to_dict()}

    def check(self) -> None:
        """Raise SpecError for a wrong name or label, or for a wrong or unknown field."""
        generated = self.metadata.get("generateName")
        # The API server completes the name before its checks.
        require_job_name(self.name or (f"{generated}{GENERATED}" if generated else None))
        queue = read_queue(self.metadata.get("labels"))
        if queue:
            queue.read_max_time()
        Spec.from_user(self.spec)

    def renamed_for_trial(self) -> Self:
        """Return the job under an unused name, for a dry run."""
        return replace(self, name=f"{self.name[:40].rstrip('-')}-{token_hex(4)}")

    @property
    def uid(self) -> str:
        return str(self.metadata.get("uid", ""))

    @property
    def identity(self) -> names.Identity:
        return names.Identity(self.namespace, self.name, self.uid)

    @property
    def queue(self) -> str:
        """Return the name of the job's queue, or an empty string."""
        found = read_queue(self.metadata.get("labels"))
        return found.name if found else ""

    @property
    def waiting_workload(self) -> str:
        """Return the name of the job's Workload while it waits for room, or an empty string."""
        number = self.status.place.number
        # A job suspended by a user does not wait, and has a phase of its own.
        waits = self.phase == Phase.PENDING and self.status.has(Condition.SUSPENDED)
        if not (self.queue and number and waits) or self.finished:
            return ""
        return workload_name(self.name, self.uid, number)

    @property
    def created(self) -> datetime | None:
        return parse_time(self.metadata.get("creationTimestamp"))

    @property
    def phase(self) -> str:
        return self.status.phase or Phase.PENDING

    @property
    def reason(self) -> str:
        return self.status.reason

    @property
    def message(self) -> str:
        return self.status.message

    @property
    def finished(self) -> bool:
        """Return True if the job has ended, and no retry of it is still to begin."""
        retries = integer_or_zero(self.spec.get("retries"))
        return self.status.finished and not self.status.is_retried_by(retries)

    @property
    def succeeded(self) -> bool:
        return self.status.has(Condition.COMPLETE)

    @property
    def processes_per_node(self) -> int:
        """Return the number of ranks on a node."""
        try:
            return Spec.from_dict(self.spec).nproc_per_node
        except SpecError:
            # The cluster has a newer version of the CRD.
            return self.status.resolved.nproc_per_node or 1

    @property
    def result(self) -> Mapping[str, str]:
        """Return the result written by rank 0 to `$DDP_RESULT_FILE`."""
        return self.status.result

    @property
    def checkpoint(self) -> str:
        """Return the claim and the folder of the job's checkpoints. It is empty without one."""
        claim = child(self.spec, "checkpoint").get("claimName")
        return f"claim {claim}, folder {self.name}/" if claim else ""

    @property
    def claims(self) -> tuple[str, ...]:
        """Return the names of the PersistentVolumeClaims mounted by the pods, each once."""
        overlay = child(child(self.spec, "podTemplate"), "spec")
        volumes = [*children(self.spec, "volumes"), *children(overlay, "volumes")]
        sources = [child(volume, "persistentVolumeClaim") for volume in volumes]
        found = [source.get("claimName") for source in (child(self.spec, "checkpoint"), *sources)]
        return tuple(dict.fromkeys(str(name) for name in found if name))

    @property
    def code(self) -> str:
        """Return the name of the ConfigMap with the job's code, or an empty string."""
        return str(child(self.spec, "code").get("configMap", ""))

    @property
    def recovery(self) -> str:
        """Return whether pods stay for the next attempt, and the reason."""
        try:
            recovery, reason = Spec.from_dict(self.spec).recovery
        except SpecError:
            # The cluster has a newer version of the CRD.
            return ""
        return f"{recovery} ({reason})"

    @property
    def advice(self) -> tuple[str, ...]:
        """Return advice on valid but doubtful fields: unused devices, shell variables."""
        try:
            return (*Spec.from_dict(self.spec).advice, *self.notes)
        except SpecError:
            # The cluster has a newer version of the CRD.
            return self.notes

    @property
    def documents(self) -> tuple[dict[str, Any], ...]:
        """Return the manifest of the job, after the documents needed by it."""
        place = {"namespace": self.namespace} if self.namespace else {}
        needs = [{**one, "metadata": {**one["metadata"], **place}} for one in self.needs]
        return (*needs, self.manifest())

    def __repr__(self) -> str:
        """Return the job in short. `manifest()` and `status` have all of it."""
        place = f"{self.namespace}/" if self.namespace else ""
        return f"<DDPJob {place}{self.name}: {self.phase}, {self._ready_nodes}>"

    @property
    def _ready_nodes(self) -> str:
        ready = self.status.pods.ready + self.status.pods.succeeded
        return f"{ready}/{self.spec.get('nodes', 1)} nodes"

    def _repr_html_(self) -> str:
        """Return the job as a notebook shows it."""
        cells = (self.name, self.phase, self._ready_nodes, self.message)
        return "<b>{}</b> · {} · {}<br>{}".format(*map(escape, cells))


def _text(value: Any) -> str:
    """Return a string as it is, nothing for a null, and another value as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else quoted(value)
