"""Requests to the API server as values, from their creation until they are counted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from ddpjob.core.api.readers import Dict
from ddpjob.kube.kinds import Kind


class Verb(Enum):
    """What a request does, as an HTTP method and the media type of its body.

    - `GET`: of all objects of a kind if the request names none.
    - `MERGE`: replace the fields in the body, and whole lists.
    - `STRATEGIC_MERGE`: also join lists by Kubernetes' own keys, such as owners by their UID. It
      costs the API server more, and custom resources do not have it.
    - `APPLY`: a server-side apply.
    """

    GET = "GET"
    CREATE = "POST"
    UPDATE = "PUT"
    DELETE = "DELETE"
    MERGE = ("PATCH", "application/merge-patch+json")
    STRATEGIC_MERGE = ("PATCH", "application/strategic-merge-patch+json")
    APPLY = ("PATCH", "application/apply-patch+yaml")

    def __init__(self, method: str, media_type: str = "application/json") -> None:
        self.method = method
        self.media_type = media_type


@dataclass(frozen=True)
class Request:
    """A request about one object, or about all objects of a kind.

    - `namespace`: None or empty for all namespaces, and for objects of the whole cluster.
    - `name`: empty to create an object or to read all.
    """

    verb: Verb
    kind: Kind
    namespace: str | None = None
    name: str = ""
    subresource: str = ""
    body: Dict | None = None
    query: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Return the path in the API, without a slash at its beginning."""
        kind = self.kind
        scope = ("namespaces", self.namespace) if self.namespace and kind.namespaced else ()
        parts = (kind.api, *scope, kind.plural, self.name, self.subresource)
        return "/".join(part for part in parts if part)

    @property
    def resource(self) -> str:
        """Return the resource as Kubernetes' RBAC names it, such as `pods` or `ddpjobs/status`."""
        plural = self.kind.plural
        return f"{plural}/{self.subresource}" if self.subresource else plural


@dataclass(frozen=True)
class ReadDocument:
    """A request for a document instead of an object, such as `version` or the kinds of an API."""

    path: str

    verb: ClassVar[Verb] = Verb.GET
    resource: ClassVar[str] = ""
    body: ClassVar[Dict | None] = None
    query: ClassVar[Mapping[str, str]] = {}


AnyRequest = Request | ReadDocument
