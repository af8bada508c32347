"""Read a manifest file for a run on this machine. A job that cannot run here is refused."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddpjob.core.api import names
from ddpjob.core.api.job import Job, require_job_name
from ddpjob.core.api.policy import Lifecycle
from ddpjob.core.api.readers import (
    Dict,
    SpecError,
    child,
    did_you_mean,
    quoted,
    refuse,
    require_object,
)
from ddpjob.core.api.resolved import Spec
from ddpjob.jobs.documents import decode, read_yaml, refuse_script, without_lists
from ddpjob.local.config_maps import ConfigMaps, read_config_maps
from ddpjob.local.notes import find_notes
from ddpjob.local.sizes import Overrides, fit
from ddpjob.local.user_pod import UserPod, projected_sources

STDIN = Path("-")
AS_WRITTEN = Overrides()

NO_SETUP = (
    "spec.setup: not run, the job has the packages of this Python environment; --setup runs it in "
    "a virtual environment of the run"
)


@dataclass(frozen=True)
class Manifest:
    """One DDPJob, and the ConfigMaps in the same file. `document` is the DDPJob as written.

    `claims` are the names of the claims mounted by the job. `notes` are about the fields without an
    effect on this machine.
    """

    job: Job
    spec: Spec
    document: Dict = field(default_factory=dict)
    config_maps: ConfigMaps = field(default_factory=dict)
    claims: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read(path: Path, wanted: Overrides = AS_WRITTEN, cores: int | None = None) -> Manifest:
    """Read the one DDPJob in a file, or in standard input if the path is `-`.

    `wanted` are values in place of those in the file. With `cores`, a job too large for this number
    of cores is made smaller. Raises SpecError for a job that cannot run on this machine.
    """
    return from_documents(_read_documents(path), wanted, cores)


def from_documents(
    documents: Sequence[Dict], wanted: Overrides = AS_WRITTEN, cores: int | None = None
) -> Manifest:
    """Return the manifest in the documents of a file, as `read` does."""
    # Other kinds, such as claims for a cluster, may be in the same file.
    jobs = [document for document in documents if document.get("kind") == names.KIND]
    if len(jobs) != 1:
        others = sorted({str(one["kind"]) for one in documents if "kind" in one} - {names.KIND})
        hint = f"; it has {', '.join(others)}" if others and not jobs else ""
        raise SpecError(f"must contain one {names.KIND}, got {len(jobs)}{hint}")
    manifest = _read_job(wanted.apply(jobs[0]), read_config_maps(documents))
    if wanted.runs_setup and not manifest.spec.setup:
        raise SpecError("--setup: the job has no spec.setup; leave the option out")
    if not wanted.runs_setup:
        manifest = _without_setup(manifest)
    if cores is None:
        return manifest
    size, sentence = fit(manifest.spec, wanted, cores)
    if size == (manifest.spec.nodes, manifest.spec.nproc_per_node):
        return manifest
    return _resized(manifest, size, sentence)


def _read_documents(path: Path) -> list[Dict]:
    refuse_script(str(path))
    try:
        data = sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot read the file: {error.strerror}") from error
    documents = without_lists(read_yaml(decode(data)))
    return [document for document in documents if isinstance(document, Mapping)]


def _read_job(document: Dict, config_maps: ConfigMaps) -> Manifest:
    version = document.get("apiVersion")
    if version != names.API_VERSION:
        raise refuse("apiVersion", names.API_VERSION, version)
    metadata = require_object(document.get("metadata"), "metadata")
    name = require_job_name(metadata.get("name"))
    spec = _with_own_restarts(Spec.from_user(document.get("spec")), document)
    pod = UserPod.from_spec(spec)
    _refuse_secrets(pod)
    return Manifest(
        job=Job(name, str(metadata.get("namespace", "local")), uid="", spec=_local_spec(spec)),
        spec=spec,
        document=document,
        config_maps=config_maps,
        claims=pod.claims,
        notes=(*spec.advice, *find_notes(document["spec"], spec, pod)),
    )


def _without_setup(manifest: Manifest) -> Manifest:
    if not manifest.spec.setup:
        return manifest
    spec = replace(manifest.spec, setup="")
    job = replace(manifest.job, spec=_local_spec(spec))
    return replace(manifest, job=job, spec=spec, notes=(*manifest.notes, NO_SETUP))


def _resized(manifest: Manifest, size: tuple[int, int], sentence: str) -> Manifest:
    """Return a manifest with another size. Limits of an accelerator do not matter here."""
    nodes, nproc = size
    spec = replace(manifest.spec, nodes=nodes, nproc_per_node=nproc)
    fields = {**manifest.document["spec"], "nodes": nodes, "nprocPerNode": nproc}
    notes = (sentence, *manifest.notes) if sentence else manifest.notes
    return replace(
        manifest,
        job=replace(manifest.job, spec=_local_spec(spec)),
        spec=spec,
        document={**manifest.document, "spec": fields},
        notes=notes,
    )


def _with_own_restarts(spec: Spec, document: Dict) -> Spec:
    """Return the spec without restarts after failures, unless the manifest sets their number.

    On their own machine, users try out a script, and need to see the first failure.
    """
    if sets_restarts(document):
        return spec
    return replace(spec, failure_policy=replace(spec.failure_policy, max_restarts=0))


def sets_restarts(document: Dict) -> bool:
    """Return True if a DDPJob sets its number of restarts after failures."""
    return child(child(document, "spec"), "failurePolicy").get("maxRestarts") is not None


def _local_spec(spec: Spec) -> Spec:
    """Return the spec without the parts of the lifecycle for a cluster only (see `notes`)."""
    default = Lifecycle()
    lifecycle = replace(
        spec.lifecycle,
        suspended=default.suspended,
        retries=default.retries,
        time_to_live=default.time_to_live,
        clean_pods=default.clean_pods,
        managed_by=default.managed_by,
    )
    return replace(spec, lifecycle=lifecycle)


def check_claims(manifest: Manifest, given: Iterable[str]) -> None:
    """Raise SpecError if the user chose a folder for a claim not mounted by the job."""
    for name in given:
        if name not in manifest.claims:
            hint = did_you_mean(name, manifest.claims)
            claims = ", ".join(manifest.claims)
            known = f"its claims are {claims}" if claims else "it has no claims"
            raise SpecError(f"the job has no claim {quoted(name)}{hint}; {known}")


def _refuse_secrets(pod: UserPod) -> None:
    for item in pod.env:
        if "secretKeyRef" in child(item, "valueFrom"):
            raise _secret(f"env {item.get('name')}")
    for source in pod.env_from:
        if "secretRef" in source:
            raise _secret("envFrom")
    for volume in pod.volumes:
        for source in (volume, *projected_sources(volume)):
            if "secret" in source:
                raise _secret(f"volume {volume.get('name')}")


def _secret(where: str) -> SpecError:
    return SpecError(
        f"{where}: uses a Secret, which is not available on this machine; in a copy of the "
        "manifest, give the value as a plain env entry; --env NAME=VALUE replaces an env entry"
    )
