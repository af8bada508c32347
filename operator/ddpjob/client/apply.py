"""Server-side apply of any objects: their paths come from the API server's discovery."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ddpjob.client.errors import NO_CRD, NotConnected, Rejected, client_errors
from ddpjob.core.api.readers import Dict, child, did_you_mean, quoted
from ddpjob.jobs.documents import is_job
from ddpjob.kube.api import ApiClient
from ddpjob.kube.kinds import Kind
from ddpjob.kube.request import ReadDocument, Request, Verb

# The owner of the fields submitted by a user. Fields of other managers are taken over.
FIELD_MANAGER = "ddpjob"
CREATE = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
APPLY = {**CREATE, "force": "true"}
DRY_RUN = {"dryRun": "All"}

# The fields changed by each write.
CHANGED_BY_WRITES = ("managedFields", "resourceVersion", "generation")


@dataclass(frozen=True)
class Applied:
    """An object after it was applied. `action` is created, configured or unchanged."""

    action: str
    body: Dict

    @property
    def name(self) -> str:
        kind = str(self.body["kind"]).lower()
        name = self.body["metadata"]["name"]
        return f"{kind}/{name}"


@dataclass
class Applier:
    """Applies objects to one API server. Those without a namespace get `namespace`."""

    api: ApiClient
    namespace: str
    _kinds: dict[tuple[str, str], Kind] = field(default_factory=dict)

    async def apply(self, documents: Iterable[Dict], *, dry_run: bool = False) -> list[Applied]:
        """Apply documents, namespaces first and the jobs last.

        All of them are tried in a dry run first, so a mistake in one changes nothing. Raises
        ClientError.
        """
        ordered = sorted(documents, key=_order)
        namespaces = [one for one in ordered if one["kind"] == "Namespace"]
        new = set(map(_name, namespaces))
        tried = []
        for document in ordered:
            namespace = _namespace(document) or self.namespace
            # A namespace created in a dry run does not exist for the next dry run.
            if namespace not in new:
                tried.append(await self._apply(document, DRY_RUN))
        if dry_run:
            return tried
        return [await self._apply(document, {}) for document in ordered]

    async def _apply(self, document: Dict, query: Mapping[str, str]) -> Applied:
        name = f"{document['kind']} {_name(document)}".strip()
        kind = await self._kind(document)
        body = self._in_namespace(kind, document)
        try:
            with client_errors():
                return await self._write(kind, body, query)
        except Rejected as error:
            raise Rejected(f"{name}: {error}", error.status) from error.__cause__

    async def _write(self, kind: Kind, body: dict[str, Any], query: Mapping[str, str]) -> Applied:
        metadata = body["metadata"]
        namespace = str(metadata.get("namespace", ""))
        name = metadata.get("name")
        if not name:
            # A server-side apply needs a name. The API server makes one from generateName.
            create = Request(
                Verb.CREATE,
                kind,
                namespace,
                body=body,
                query={**CREATE, **query},
            )
            created = await self.api.call(create)
            return Applied("created", created)
        read = Request(Verb.GET, kind, namespace, str(name))
        before = await self.api.read(read)
        apply = replace(
            read,
            verb=Verb.APPLY,
            body=body,
            query={**APPLY, **query},
        )
        after = await self.api.call(apply)
        return Applied(_action(before, after), after)

    def _in_namespace(self, kind: Kind, document: Dict) -> dict[str, Any]:
        metadata = dict(child(document, "metadata"))
        if kind.namespaced:
            metadata.setdefault("namespace", self.namespace)
        return {**document, "metadata": metadata}

    async def _kind(self, document: Dict) -> Kind:
        """Return the kind of a document. Raises Rejected if the API server does not have it."""
        api_version = str(document["apiVersion"])
        name = str(document["kind"])
        key = (api_version, name)
        if key not in self._kinds:
            await self._discover(api_version)
        found = self._kinds.get(key)
        if found is not None:
            return found
        if is_job(document):
            raise NotConnected(NO_CRD)
        known = [kind for version, kind in self._kinds if version == api_version]
        hint = did_you_mean(name, known)
        message = f"the cluster has no kind {quoted(name)} in {quoted(api_version)}{hint}"
        raise Rejected(message)

    async def _discover(self, api_version: str) -> None:
        """Read the kinds of an API group and version."""
        group, _, version = api_version.rpartition("/")
        api = Kind(group, version, "").api
        with client_errors():
            answer = await self.api.read(ReadDocument(api))
        if answer is None:
            return
        for resource in answer.get("resources", []):
            plural = resource["name"]
            # Subresources have a `/` in their names.
            if "/" in plural:
                continue
            kind = Kind(
                group,
                version,
                plural,
                namespaced=resource["namespaced"],
            )
            key = (api_version, resource["kind"])
            self._kinds[key] = kind


def _order(document: Dict) -> int:
    """Return 0 for what other documents need, 2 for a job, and 1 for the rest."""
    if document["kind"] in ("Namespace", "CustomResourceDefinition"):
        return 0
    if is_job(document):
        return 2
    return 1


def _name(document: Dict) -> str:
    metadata = child(document, "metadata")
    return str(metadata.get("name") or "")


def _namespace(document: Dict) -> str | None:
    metadata = child(document, "metadata")
    return metadata.get("namespace")


def _action(before: Dict | None, after: Dict) -> str:
    if before is None:
        return "created"
    # A dry run does not change the version, so the content is compared too.
    if _content(before) == _content(after):
        return "unchanged"
    return "configured"


def _content(body: Dict) -> Any:
    """Return an object without the fields changed by each write."""
    metadata = dict(body["metadata"])
    for key in CHANGED_BY_WRITES:
        metadata.pop(key, None)
    return {**body, "metadata": metadata}
