"""Watch objects: a LIST, then the changes. After a gap, another LIST shows the differences."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ddpjob.core.api.backoff import exponential_delay
from ddpjob.kube.api import ApiClient, may_succeed_later
from ddpjob.kube.errors import ApiError, CallFailed, Unreachable
from ddpjob.kube.kinds import Kind
from ddpjob.kube.request import Request, Verb

# Seconds until the API server ends a request of a watch, and until the connection counts as dead.
WATCH_SECONDS = 240
DEAD_SECONDS = WATCH_SECONDS + 15.0

# Retries of a LIST after the first successful one, and the seconds in between.
TRIES = 10
FIRST_RETRY = 0.5
LONGEST_RETRY = 15.0

# The requested version of a watch is no longer known.
GONE = 410

Object = dict[str, Any]

# What happened to an object, ADDED, MODIFIED or DELETED, and the object.
Change = tuple[str, Object]


async def watch(
    api: ApiClient,
    kind: Kind,
    namespace: str | None,
    query: Mapping[str, str],
    on_list: Callable[[set[str], str], None] | None = None,
) -> AsyncGenerator[Change | None, None]:
    """Yield the existing objects, then None, then each change for ever.

    `query` selects objects by `fieldSelector` or `labelSelector`. None comes after each LIST, and
    before it `on_list` gets the UIDs and the resourceVersion of the LIST. An object deleted during
    a gap comes with its metadata and an empty spec.
    Raises ApiError or Unreachable if the first LIST fails, or all tries of a later one.
    """
    everything = Request(Verb.GET, kind, namespace, query=query)
    known: dict[str, Object] = {}
    has_listed = False
    failures = 0
    while True:
        try:
            listed, version = await list_objects(api, kind, namespace, query)
            for change in _differences(known, listed):
                yield change
            if on_list:
                on_list({_uid(found) for found in listed}, version)
            yield None
            known = {_uid(found): _kept(found) for found in listed}
            has_listed = True
            failures = 0
            async for change in _watch(api, everything, version):
                what, found = change
                known[_uid(found)] = _kept(found)
                if what == "DELETED":
                    del known[_uid(found)]
                yield change
        except CallFailed as error:
            if not has_listed or failures == TRIES or not may_succeed_later(error):
                raise
            failures += 1
            await asyncio.sleep(exponential_delay(failures, FIRST_RETRY, LONGEST_RETRY))


async def list_objects(
    api: ApiClient, kind: Kind, namespace: str | None, query: Mapping[str, str]
) -> tuple[list[Object], str]:
    """Return the selected objects, and the resourceVersion of the LIST."""
    objects: list[Object] = []
    rest: dict[str, str] = {}
    while True:
        request = Request(Verb.GET, kind, namespace, query={**query, **rest})
        answer = await api.call(request)
        # The items of Kubernetes' own kinds do not have these two fields.
        kind_of_items = {
            "apiVersion": answer["apiVersion"],
            "kind": answer["kind"].removesuffix("List"),
        }
        objects += [{**kind_of_items, **item} for item in answer["items"]]
        metadata = answer["metadata"]
        if not metadata.get("continue"):
            return objects, str(metadata["resourceVersion"])
        rest = {"continue": metadata["continue"]}


async def _watch(api: ApiClient, everything: Request, version: str) -> AsyncGenerator[Change, None]:
    """Yield the changes after a version. Return after a gap, raise CallFailed for other errors."""
    while True:
        query = {
            **everything.query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        try:
            async for line in api.stream(replace(everything, query=query), DEAD_SECONDS):
                what, found = _read_change(line)
                version = str(found["metadata"]["resourceVersion"])
                if what != "BOOKMARK":
                    yield what, found
        except ApiError as error:
            if error.status != GONE:
                raise
            return


def _read_change(line: bytes) -> Change:
    """Return a line of a watch. Raises ApiError for an error in it."""
    try:
        change = json.loads(line)
        what, found = str(change["type"]), change["object"]
    except (ValueError, KeyError, TypeError) as error:
        raise Unreachable(f"expected an event of a watch, got {line[:200]!r}") from error
    if what == "ERROR":
        raise ApiError(found.get("code", 500), found.get("reason", ""), found.get("message", ""))
    return what, found


def _differences(known: Mapping[str, Object], listed: list[Object]) -> Iterator[Change]:
    """Yield the changes between the known objects and those of a LIST."""
    uids = {_uid(found) for found in listed}
    for uid, found in known.items():
        if uid not in uids:
            yield "DELETED", found
    for found in listed:
        before = known.get(_uid(found))
        if before is None:
            yield "ADDED", found
        elif before["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            yield "MODIFIED", found


def _kept(found: Object) -> Object:
    """Return what is kept of an object, to find its deletion in a later LIST."""
    metadata = {key: value for key, value in found["metadata"].items() if key != "managedFields"}
    kind = {"apiVersion": found["apiVersion"], "kind": found["kind"]}
    return {**kind, "metadata": metadata, "spec": {}}


def _uid(found: Object) -> str:
    return str(found["metadata"]["uid"])
