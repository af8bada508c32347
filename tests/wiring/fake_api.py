"""A fake Kubernetes API server in the test's own loop. It can misbehave in every way.

It keeps objects under resourceVersions, answers LISTs by pages and WATCHes as streams with
bookmarks, and logs each request. The test plays scheduler, kubelet and garbage collector. Nothing
here knows what the operator does.
"""

import asyncio
import contextlib
import copy
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from aiohttp import web

Proceed = Callable[[], Awaitable[web.StreamResponse]]
Answer = Callable[[web.Request, Proceed], Awaitable[web.StreamResponse]]

PATH = re.compile(
    r"/(?P<root>api/v1|apis/[^/]+/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?P<status>/status)?"
)
KINDS = {
    "api/v1": {
        "pods": "Pod",
        "services": "Service",
        "configmaps": "ConfigMap",
        "events": "Event",
        "namespaces": "Namespace",
        "nodes": "Node",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "resourcequotas": "ResourceQuota",
        "limitranges": "LimitRange",
    },
    "apis/ddpjob.dev/v1alpha1": {"ddpjobs": "DDPJob"},
    "apis/coordination.k8s.io/v1": {"leases": "Lease"},
    "apis/networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "apis/apps/v1": {"deployments": "Deployment"},
    "apis/storage.k8s.io/v1": {"storageclasses": "StorageClass"},
    "apis/apiextensions.k8s.io/v1": {"customresourcedefinitions": "CustomResourceDefinition"},
}

CHANGING = ("POST", "PUT", "PATCH", "DELETE")

# The message of kube-apiserver if a webhook with failurePolicy Fail does not answer in time.
HANGING_WEBHOOK = (
    'Internal error occurred: failed calling webhook "pods.policy.example": failed to call '
    'webhook: Post "https://policy.example.svc:443/pods?timeout=10s": context deadline exceeded'
)


class Asked(NamedTuple):
    """One request: monotonic seconds, method (WATCH for a stream), and path without its query.

    `limit` is the limit of a LIST; 0: it has none.
    """

    time: float
    method: str
    path: str
    limit: int = 0


class Change(NamedTuple):
    """One change of an object, as a WATCH reports it."""

    version: int
    plural: str
    type: str
    object: dict[str, Any]


@dataclass
class Fault:
    """The answer to the next `times` matching requests, instead of their own."""

    method: str
    path: re.Pattern[str]
    answer: Answer
    times: float


def refusal(code: int, reason: str = "", message: str = "", **headers: str) -> Answer:
    """Return an error of the API server as an answer."""

    async def answer(_: web.Request, __: Proceed) -> web.StreamResponse:
        return _status(code, reason, message or f"injected {code}", headers)

    return answer


def hanging_webhook(seconds: float | None = None) -> Answer:
    """Return the answer to a create after `seconds` without a webhook's answer; None: no answer."""

    async def answer(_: web.Request, __: Proceed) -> web.StreamResponse:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.Event().wait()
        return _status(500, "InternalError", HANGING_WEBHOOK)

    return answer


async def unanswered(request: web.Request, proceed: Proceed) -> web.StreamResponse:
    """Carry out the request, and break the connection before the answer."""
    await proceed()
    assert request.transport
    request.transport.close()
    return web.Response()


def _status(
    code: int, reason: str, message: str, headers: dict[str, str] | None = None
) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
    return web.json_response(
        body | {"reason": reason, "message": message}, status=code, headers=headers
    )


class FakeApi:
    """The server. `objects` are stored by (plural, namespace, name).

    While `stale_list` is set, LISTs are answered from this older `snapshot()`.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.log: list[Asked] = []
        self.faults: list[Fault] = []
        self.stale_list: tuple[int, dict[tuple[str, str, str], dict[str, Any]]] | None = None
        self.version = 1000
        self.url = ""
        self._history: list[Change] = []
        self._compacted = 0
        self._changed = asyncio.Event()
        self._streams = 0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{anything:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        assert self._runner
        self.flow()
        self.cut_watches()
        await self._runner.cleanup()

    # --- misbehaviour

    def fault(self, method: str, path: str, answer: Answer, times: float = 1) -> None:
        """Answer the next `times` matching requests with `answer`.

        `method` and `path` are regular expressions for the whole text. A stream's method is WATCH.
        """
        self.faults.append(Fault(method, re.compile(path), answer, times))

    def stall(self) -> None:
        """Accept requests and answer none of them, until `flow`."""
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def cut_watches(self) -> None:
        """End every stream."""
        self._streams += 1
        self._wake()

    def compact(self) -> None:
        """No stream can go on from what it has seen: 410 Gone for each."""
        self.version += 1
        self._compacted = self.version
        self.cut_watches()

    def snapshot(self) -> tuple[int, dict[tuple[str, str, str], dict[str, Any]]]:
        return self.version, copy.deepcopy(self.objects)

    def emit(self, plural: str, kind: str, obj: dict[str, Any]) -> None:
        """Send an event of an old object to every stream, as a server does that lags behind."""
        self._history.append(Change(self.version, plural, kind, copy.deepcopy(obj)))
        self._wake()

    # --- objects

    def get(self, plural: str, name: str, namespace: str = "ml") -> dict[str, Any] | None:
        return self.objects.get((plural, namespace, name))

    def all(self, plural: str) -> list[dict[str, Any]]:
        return [obj for (kind, _, _), obj in self.objects.items() if kind == plural]

    def create(self, plural: str, obj: dict[str, Any]) -> dict[str, Any]:
        """Store an object with what an API server adds to it."""
        made = copy.deepcopy(obj)
        metadata = made["metadata"]
        metadata.setdefault("namespace", "ml")
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata |= {"generation": 1, "creationTimestamp": "2026-11-21T12:00:00Z"}
        return self._store(plural, "ADDED", made)

    def change(
        self, plural: str, name: str, namespace: str = "ml", **fields: Any
    ) -> dict[str, Any]:
        """Top-level fields replaced; `metadata` is merged, and a new spec is a new generation."""
        old = self.objects[plural, namespace, name]
        new = copy.deepcopy(old) | fields
        new["metadata"] = old["metadata"] | fields.get("metadata", {})
        if "spec" in fields:
            new["metadata"]["generation"] = old["metadata"]["generation"] + 1
        return self._store(plural, "MODIFIED", new)

    def remove(self, plural: str, name: str, namespace: str = "ml") -> None:
        """Gone at once, whatever grace it had."""
        self.version += 1
        gone = copy.deepcopy(self.objects.pop((plural, namespace, name)))
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._history.append(Change(self.version, plural, "DELETED", gone))
        self._wake()

    def _store(self, plural: str, kind: str, obj: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        obj["metadata"] = obj["metadata"] | {"resourceVersion": str(self.version)}
        self.objects[plural, obj["metadata"]["namespace"], obj["metadata"]["name"]] = obj
        self._history.append(Change(self.version, plural, kind, copy.deepcopy(obj)))
        self._wake()
        return obj

    def _wake(self) -> None:
        waiting, self._changed = self._changed, asyncio.Event()
        waiting.set()

    # --- what was asked

    def writes(self, path: str = ".*") -> list[Asked]:
        """Return the changing requests, except those of the Lease."""
        changing = [a for a in self.log if a.method in CHANGING and "/leases" not in a.path]
        return [a for a in changing if re.fullmatch(path, a.path)]

    def reads(self, path: str = ".*/namespaces/.*") -> list[Asked]:
        """Return the GETs and LISTs, by default those within a namespace, except the Lease's."""
        return [
            a
            for a in self.log
            if a.method == "GET" and "/leases" not in a.path and re.fullmatch(path, a.path)
        ]

    # --- serving

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        method = "WATCH" if request.query.get("watch") == "true" else request.method
        self.log.append(
            Asked(time.monotonic(), method, request.path, int(request.query.get("limit", 0)))
        )
        await self._flowing.wait()

        async def proceed() -> web.StreamResponse:
            return await self._serve(request, method)

        for fault in self.faults:
            if re.fullmatch(fault.method, method) and fault.path.fullmatch(request.path):
                fault.times -= 1
                if fault.times <= 0:
                    self.faults.remove(fault)
                return await fault.answer(request, proceed)
        return await proceed()

    async def _serve(self, request: web.Request, method: str) -> web.StreamResponse:
        if found := self._discovery(request.path):
            return web.json_response(found)
        asked = PATH.fullmatch(request.path)
        if not asked:
            return _status(404, "NotFound", "the server could not find the requested resource")
        plural, namespace, name = asked["plural"], asked["namespace"], asked["name"]
        if method == "WATCH":
            return await self._watch(request, plural, namespace)
        if name is None and method == "GET":
            return self._list(request, plural, namespace)
        body = await request.json() if request.can_read_body else {}
        return self._object(
            method,
            plural,
            (namespace or "", name or body["metadata"]["name"]),
            body,
            asked["status"],
        )

    def _discovery(self, path: str) -> dict[str, Any] | None:
        if path == "/api":
            return {"versions": ["v1"]}
        groups = [root.split("/")[1:] for root in KINDS if root.startswith("apis/")]
        if path == "/apis":
            return {
                "groups": [
                    {"name": g, "versions": [{"version": v}], "preferredVersion": {"version": v}}
                    for g, v in groups
                ]
            }
        if kinds := KINDS.get(path.lstrip("/")):
            verbs = ["get", "list", "watch", "create", "update", "delete"]
            named = [
                {
                    "name": p,
                    "kind": k,
                    "singularName": "",
                    "namespaced": p != "nodes",
                    "verbs": verbs,
                }
                for p, k in kinds.items()
            ]
            return {"resources": named}
        return None

    def _object(
        self,
        method: str,
        plural: str,
        key: tuple[str, str],
        body: dict[str, Any],
        status: str | None,
    ) -> web.Response:
        old = self.objects.get((plural, *key))
        what = f'{plural} "{key[1]}"'
        if method == "POST":
            if old:
                return _status(409, "AlreadyExists", f"{what} already exists")
            assert "resourceVersion" not in body["metadata"], (
                "resourceVersion should not be set on objects to be created"
            )
            body["metadata"] |= {"namespace": key[0]}
            return web.json_response(self.create(plural, body), status=201)
        if old is None:
            return _status(404, "NotFound", f"{what} not found")
        if method == "PATCH":
            return self._patch(plural, old, body)
        if method == "PUT":
            return self._put(plural, old, body, status)
        if method == "DELETE":
            return self._delete(plural, old, body)
        return web.json_response(old)

    def _put(
        self, plural: str, old: dict[str, Any], body: dict[str, Any], status: str | None
    ) -> web.Response:
        asked, there = body["metadata"], old["metadata"]
        if any(key in asked and asked[key] != there[key] for key in ("uid", "resourceVersion")):
            return _status(
                409,
                "Conflict",
                "the object has been modified; please apply your changes to the latest version",
            )
        field = "status" if status else "spec"
        if old.get(field) == body.get(field):
            return web.json_response(old)
        return web.json_response(
            self._store(plural, "MODIFIED", copy.deepcopy(old) | {field: body.get(field)})
        )

    def _patch(self, plural: str, old: dict[str, Any], body: dict[str, Any]) -> web.Response:
        """Merge as a strategic merge patch does: maps by key, and owners by their UID."""
        there = old["metadata"]
        asked = body["metadata"]
        if asked.get("uid", there["uid"]) != there["uid"]:
            return _status(409, "Conflict", "Precondition failed: UID in precondition")
        if old.get("immutable") and body.get("data", old["data"]) != old["data"]:
            return _status(422, "Invalid", "data: Forbidden: field is immutable")
        owners = {owner["uid"]: owner for owner in there.get("ownerReferences", ())}
        owners |= {owner["uid"]: owner for owner in asked.get("ownerReferences", ())}
        merged = {"ownerReferences": list(owners.values())}
        for kind in ("labels", "annotations"):
            merged[kind] = there.get(kind, {}) | asked.get(kind, {})
        return web.json_response(
            self._store(plural, "MODIFIED", copy.deepcopy(old) | {"metadata": there | merged})
        )

    def _delete(self, plural: str, old: dict[str, Any], options: dict[str, Any]) -> web.Response:
        metadata = old["metadata"]
        if options.get("preconditions", {}).get("uid", metadata["uid"]) != metadata["uid"]:
            return _status(409, "Conflict", "the UID in the precondition does not match")
        on_a_node = plural == "pods" and old["spec"].get("nodeName")
        if on_a_node and options.get("gracePeriodSeconds") != 0:  # its kubelet has the last word
            ending = {"deletionTimestamp": "2026-11-21T12:00:30Z", "deletionGracePeriodSeconds": 30}
            return web.json_response(
                self.change(plural, metadata["name"], metadata["namespace"], metadata=ending)
            )
        self.remove(plural, metadata["name"], metadata["namespace"])
        return web.json_response(old)

    # --- LIST and WATCH

    def _list(self, request: web.Request, plural: str, namespace: str | None) -> web.Response:
        version, objects = self.stale_list or (self.version, self.objects)
        found = [
            o
            for (kind, _, _), o in objects.items()
            if kind == plural and _selected(o, namespace, request)
        ]
        start = int(request.query.get("continue", 0))
        end = start + int(request.query.get("limit", len(found) or 1))
        metadata = {
            "resourceVersion": str(version),
            "continue": str(end) if end < len(found) else "",
        }
        kind = {"apiVersion": "v1", "kind": "List"}
        return web.json_response({**kind, "metadata": metadata, "items": found[start:end]})

    async def _watch(
        self, request: web.Request, plural: str, namespace: str | None
    ) -> web.StreamResponse:
        stream, since = web.StreamResponse(), int(request.query["resourceVersion"])
        await stream.prepare(request)
        if since < self._compacted:
            await _send(
                stream,
                "ERROR",
                {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"},
            )
            return stream
        streams, place = self._streams, sum(change.version <= since for change in self._history)
        while streams == self._streams:
            await self._flowing.wait()
            news, changed = self._history[place:], self._changed
            for number, change in enumerate(news, place):
                if change.plural != plural:
                    continue
                before = self._before(number)
                if _selected(change.object, namespace, request):
                    await _send(stream, change.type, change.object)
                elif before and _selected(before, namespace, request):
                    # The API server shows the version still in the watch.
                    version = change.object["metadata"]["resourceVersion"]
                    gone = {
                        **before,
                        "metadata": {**before["metadata"], "resourceVersion": version},
                    }
                    await _send(stream, "DELETED", gone)
            place += len(news)
            if not news:
                await _send(
                    stream, "BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}}
                )
                await changed.wait()
        return stream

    def _before(self, number: int) -> dict[str, Any] | None:
        """Return the version of an object before a change, or None if it is new."""
        uid = self._history[number].object["metadata"]["uid"]
        earlier = (change.object for change in reversed(self._history[:number]))
        return next((obj for obj in earlier if obj["metadata"]["uid"] == uid), None)


async def _send(stream: web.StreamResponse, kind: str, obj: dict[str, Any]) -> None:
    await stream.write(json.dumps({"type": kind, "object": obj}).encode() + b"\n")


def _selected(obj: dict[str, Any], namespace: str | None, request: web.Request) -> bool:
    labels = obj["metadata"].get("labels", {})
    wanted = [
        term.partition("=") for term in request.query.get("labelSelector", "").split(",") if term
    ]
    return namespace in (None, obj["metadata"]["namespace"]) and all(
        key in labels and (not equals or labels[key] == value) for key, equals, value in wanted
    )
