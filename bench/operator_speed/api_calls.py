"""Count the requests to the API server and tell the controllers' own from others.

The API server counts requests in a metric. The metric does not name the caller, so callers are told
apart by resource: some resources are used only by the creator of the pods.
"""

import time
from collections import Counter
from collections.abc import Mapping

from bench.metric_text import samples
from ddpjob.core.api import names

from .client import Client

# The metric's labels for telling callers apart: verb, group, resource and subresource.
Call = tuple[str, str, str, str]

REQUESTS = "apiserver_request_total"

WRITES = ("POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION")
READS = ("GET", "LIST")

# Group, resource and subresource of objects used only by the creator of the pods while they start.
# Events are an exception: those about pods come from others, see measure.py. Bindings are the
# scheduler's. The subresource pods/status is kwok's. Endpoints and their slices are written by
# Kubernetes for the Service.
MADE_BY_CONTROLLERS = {
    ("", "pods", ""),
    ("", "services", ""),
    ("", "events", ""),
    (names.GROUP, names.PLURAL, ""),
    (names.GROUP, names.PLURAL, "status"),
    ("batch", "jobs", ""),
    ("batch", "jobs", "status"),
}

# The API server itself lists Services every few minutes, to check their addresses. No controller
# reads events.
NOT_BY_CONTROLLERS = {
    ("LIST", "", "services", ""),
    ("GET", "", "events", ""),
    ("LIST", "", "events", ""),
}

# Written by an idle cluster too: Leases, and the states of nodes.
WRITTEN_WHEN_QUIET = ("leases", "nodes")


def count_calls(client: Client) -> Counter[Call]:
    """Return the number of requests so far of each kind."""
    counts: Counter[Call] = Counter()
    for _, label, value in samples(client.text("GET", "/metrics"), REQUESTS):
        call = (label["verb"], label["group"], label["resource"], label["subresource"])
        counts[call] += round(value)
    return counts


def calls_by_controllers(calls: Mapping[Call, float]) -> dict[str, float]:
    """Return the calls of the operator, the Job controller or the bare client, by "VERB resource".

    Watches stay open and are not counted.
    """
    found = {}
    for call, count in sorted(calls.items()):
        verb, group, resource, subresource = call
        if (group, resource, subresource) not in MADE_BY_CONTROLLERS or call in NOT_BY_CONTROLLERS:
            continue
        if verb in WRITES + READS and abs(count) >= 0.01:
            path = f"{resource}/{subresource}" if subresource else resource
            found[f"{verb} {path}"] = count
    return found


def wait_until_quiet(client: Client, seconds: float = 120) -> Counter[Call]:
    """Wait until nothing but Leases and node states is written for two seconds.

    Returns the counts after these two seconds. Raises RuntimeError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    before = count_calls(client)
    while True:
        time.sleep(2)
        after = count_calls(client)
        if _writes(after - before) == 0:
            return after
        if time.monotonic() > deadline:
            raise RuntimeError(f"the cluster is not quiet: {dict(after - before)}")
        before = after


def _writes(calls: Counter[Call]) -> int:
    total = 0
    for (verb, _, resource, _), count in calls.items():
        if verb in WRITES and resource not in WRITTEN_WHEN_QUIET:
            total += count
    return total
