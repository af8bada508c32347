"""kopf's wiring, no logic: each event goes into the cache, and its job's key into the queue.

Only `on.event`: other handler kinds write finalizers and annotations, and lose deletions (docs/decisions/0002).
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf
from kubernetes.aio.client.configuration import Configuration

from ddpjob.controller.act import Actor
from ddpjob.controller.cache import Cache, Key, key_of_job, key_of_pod
from ddpjob.controller.client import OUR_PODS, PAGE
from ddpjob.controller.workqueue import Wakeups
from ddpjob.core import names
from ddpjob.core.pods import owner_uid

GATHER_SECONDS = 0.05
"""Pods of a gang change together: one look at the job for many of their events."""


def registry(
    cache: Cache, queue: Wakeups[Key], actor: Actor, api: Configuration
) -> kopf.OperatorRegistry:
    """The handlers of one operator."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(id="login", registry=handlers)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await connection(api)

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, id="job", registry=handlers)
    async def job(event: Mapping[str, Any], **_: Any) -> None:
        body = event["object"]
        news = cache.forget_job(body) if event["type"] == "DELETED" else cache.see_job(body)
        if news:
            queue.add(key_of_job(body))

    @kopf.on.event(
        "", "v1", "pods", labels={names.LABEL_JOB: kopf.PRESENT}, id="pod", registry=handlers
    )
    async def pod(event: Mapping[str, Any], **_: Any) -> None:
        body = event["object"]
        deleted = event["type"] == "DELETED"
        news = cache.forget_pod(body) if deleted else cache.see_pod(body)
        if deleted:
            _the_name_is_free(cache, actor, key_of_pod(body), owner_uid(body))
        if news or deleted:
            queue.add(key_of_pod(body), GATHER_SECONDS)

    return handlers


def _the_name_is_free(cache: Cache, actor: Actor, key: Key, owner: str) -> None:
    """A pod of an earlier job of this name went: what waited for its name need not wait longer."""
    seen = cache.job(key)
    if seen and seen.job.uid != owner:
        actor.retry_now(seen.job.uid)


async def connection(api: Configuration) -> kopf.ConnectionInfo:
    """The client's own credentials for kopf; renewed well before a service account's token ends."""
    header = await api.get_api_key_with_prefix("BearerToken", alias="authorization") or ""
    scheme, _, token = header.rpartition(" ")
    return kopf.ConnectionInfo(
        server=api.host,
        ca_path=api.ssl_ca_cert,
        ca_data=api.ca_cert_data,
        insecure=not api.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=api.cert_file,
        private_key_path=api.key_file,
        proxy_url=api.proxy or None,
        expiration=datetime.now(UTC) + timedelta(minutes=10) if token else None,
    )


class NoDiffs(kopf.DiffBaseStorage):
    """kopf copies every object twice to compare it with an older self; nothing here asks for the difference."""

    def build(
        self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None
    ) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None: ...


def settings() -> kopf.OperatorSettings:
    """kopf as a watcher that dies loudly and reconnects early."""
    chosen = kopf.OperatorSettings()
    chosen.peering.standalone = True  # a peering object of somebody else must not pause us
    chosen.scanning.disabled = True  # no rights on CRDs and namespaces needed
    chosen.posting.enabled = False
    chosen.persistence.diffbase_storage = NoDiffs()
    chosen.watching.server_timeout = 300
    chosen.watching.client_timeout = 330
    chosen.watching.connect_timeout = 10
    chosen.watching.chunk_size = PAGE
    chosen.watching.label_selectors["pods"] = OUR_PODS
    chosen.queueing.idle_timeout = (
        0.2  # so long each object's last event, whole, and a task of its own stay in memory
    )
    chosen.networking.request_timeout = 30
    chosen.networking.error_backoffs = (
        1,
        1,
        2,
        3,
        5,
        8,
        13,
        21,
        34,
        34,
        34,
    )  # rides out an upgrade of the API server
    chosen.networking.enforce_retry_after = True
    chosen.process.ultimate_exiting_timeout = 30
    return chosen
