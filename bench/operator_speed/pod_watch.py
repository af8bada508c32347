"""One watch on the namespace's pods. It reads the clock when an event arrives."""

import http.client
import json
import time

from .cases import PODS
from .client import Access, Client, Object


class PodWatch:
    """The time of each pod's first event, and of its first as Running (time.monotonic())."""

    def __init__(self, access: Access, pods: int) -> None:
        self.exist: dict[str, float] = {}
        self.running: dict[str, float] = {}
        self._access = access
        self._pods = pods
        newest = Client(access).json("GET", f"{PODS}?limit=1")
        self._version: str = newest["metadata"]["resourceVersion"]
        self._stream = self._open()

    def _open(self) -> http.client.HTTPResponse:
        return Client(self._access).send("GET", f"{PODS}?watch=1&resourceVersion={self._version}")

    def follow(self) -> None:
        """Wait until every pod runs. Raises RuntimeError if one is lost or an extra one appears."""
        while len(self.running) < self._pods:
            line = self._stream.readline()
            # Read the clock before the event is decoded.
            now = time.monotonic()
            if line:
                self._take(json.loads(line), now)
            else:
                # If a busy API server cannot serve a watch in time, it ends the watch and counts it
                # in apiserver_terminated_watchers_total.
                self._stream = self._open()

    def _take(self, event: Object, now: float) -> None:
        # For example, the API server no longer has the requested version.
        if event["type"] == "ERROR":
            raise RuntimeError(f"the watch on pods failed: {event['object'].get('message')}")
        metadata = event["object"]["metadata"]
        name = metadata.get("name")
        phase = event["object"].get("status", {}).get("phase")
        self._version = metadata.get("resourceVersion")
        if event["type"] not in ("ADDED", "MODIFIED") or phase not in ("Pending", "Running"):
            raise RuntimeError(
                f"pod {name}: expected Pending or Running, got {event['type']} with phase {phase}"
            )
        self.exist.setdefault(name, now)
        if phase == "Running":
            self.running.setdefault(name, now)
        if len(self.exist) > self._pods:
            raise RuntimeError(f"pod {name}: expected {self._pods} pods, got one more")
