"""kopf's wiring, without logic: an event enters the cache, and its job's key the queue.

Only `on.event` is used. Handlers of other kinds write finalizers and annotations, and lose
deletions (docs/decisions/0002).
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf
from kubernetes.aio.client.configuration import Configuration

from ddpjob.controller.act import Actor
from ddpjob.controller.cache import Cache, Key, key_of_job, key_of_pod
from ddpjob.controller.client import OUR_PODS, PAGE_SIZE
from ddpjob.controller.workqueue import WorkQueue
from ddpjob.core import names
from ddpjob.core.pods import owner_uid
from ddpjob.core.readers import Dict

# Seconds that a pod's event waits. The pods of a gang change together, and one look at the job
# serves many of their events.
GATHER_SECONDS = 0.05

# A service account's token lives for an hour; kopf asks for a new one after this time.
TOKEN_LIFETIME = timedelta(minutes=10)


def registry(
    cache: Cache, queue: WorkQueue[Key], actor: Actor, configuration: Configuration
) -> kopf.OperatorRegistry:
    """Return the handlers of one operator."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(id="login", registry=handlers)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await connection(configuration)

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, id="job", registry=handlers)
    async def job(event: Mapping[str, Any], **_: Any) -> None:
        body = event["object"]
        is_deleted = event["type"] == "DELETED"
        is_news = cache.forget_job(body) if is_deleted else cache.see_job(body)
        if is_news:
            queue.add(key_of_job(body))

    pod_labels = {names.LABEL_JOB: kopf.PRESENT}

    @kopf.on.event("", "v1", "pods", labels=pod_labels, id="pod", registry=handlers)
    async def pod(event: Mapping[str, Any], **_: Any) -> None:
        body = event["object"]
        is_deleted = event["type"] == "DELETED"
        is_news = cache.forget_pod(body) if is_deleted else cache.see_pod(body)
        if is_deleted:
            _retry_job_that_waits_for_name(cache, actor, body)
        if is_news or is_deleted:
            queue.add(key_of_pod(body), GATHER_SECONDS)

    return handlers


def _retry_job_that_waits_for_name(cache: Cache, actor: Actor, pod: Dict) -> None:
    """Let a new job try again if a pod of an earlier job with its name is gone."""
    seen = cache.job(key_of_pod(pod))
    if seen and seen.job.uid != owner_uid(pod):
        actor.retry_now(seen.job.uid)


async def connection(configuration: Configuration) -> kopf.ConnectionInfo:
    """Return the client's credentials for kopf."""
    header = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
    scheme, _, token = (header or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        ca_data=configuration.ca_cert_data,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy or None,
        expiration=datetime.now(UTC) + TOKEN_LIFETIME if token else None,
    )


class NoDiffs(kopf.DiffBaseStorage):
    """Stores no older version of an object.

    kopf copies every object twice to compare it with its older version, which no handler reads.
    """

    def build(
        self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None
    ) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None: ...


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings: it only watches, reconnects early, and ends if it cannot watch."""
    chosen = kopf.OperatorSettings()
    chosen.peering.standalone = True  # Another operator's peering object must not pause this one.
    chosen.scanning.disabled = True  # Scanning needs rights on CRDs and namespaces.
    chosen.posting.enabled = False
    chosen.persistence.diffbase_storage = NoDiffs()
    chosen.watching.server_timeout = 300
    chosen.watching.client_timeout = 330
    chosen.watching.connect_timeout = 10
    chosen.watching.chunk_size = PAGE_SIZE
    chosen.watching.label_selectors["pods"] = OUR_PODS
    chosen.queueing.idle_timeout = 0.2  # Seconds that kopf keeps an object's last event in memory.
    chosen.networking.request_timeout = 30
    # Long enough in sum for an upgrade of the API server.
    chosen.networking.error_backoffs = (1, 1, 2, 3, 5, 8, 13, 21, 34, 34, 34)
    chosen.networking.enforce_retry_after = True
    chosen.process.ultimate_exiting_timeout = 30
    return chosen
