"""Connect kopf, without logic: an event enters the cache, and its job's key the queue.

Only `on.event` is used. Handlers of other kinds write finalizers and annotations, and lose
deletions (docs/decisions/0002).
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf
from kopf._core.reactor.inventory import ResourceMemories, ResourceMemory
from kubernetes.aio.client.configuration import Configuration

from ddpjob.controller.act import SOON, Actor
from ddpjob.controller.cache import Cache, SeenJob, identity_of, key_of_pod
from ddpjob.controller.lister import Lister
from ddpjob.controller.store import namespace_of
from ddpjob.core.api.owned import owner_of
from ddpjob.core.api.readers import Dict
from ddpjob.kube.kinds import JOBS, NODES, PODS, WATCHED, Kind

# The delay of a pod's event in seconds. The pods of a gang change together, and one look at the job
# serves many of their events.
GATHER_SECONDS = 0.05

# Objects per page of kopf's own LISTs. It cannot change while a LIST runs, so it suits large jobs.
PAGE_SIZE = 25

# A service account's token lives for an hour; kopf asks for a new one after this time.
TOKEN_LIFETIME = timedelta(minutes=10)


def registry(lister: Lister, actor: Actor, configuration: Configuration) -> kopf.OperatorRegistry:
    """Return the handlers of one operator: one for each watched kind."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(id="login", registry=handlers)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await connection(configuration)

    for kind in WATCHED:
        if kind is not NODES or lister.reads_nodes:
            _watch(kind, lister, actor, handlers)
    return handlers


def _watch(kind: Kind, lister: Lister, actor: Actor, handlers: kopf.OperatorRegistry) -> None:
    cache, queue = lister.cache, lister.queue
    store = cache.stores[kind]
    labels = {kind.selector: kopf.PRESENT} if kind.selector else None
    delay = 0.0 if kind == JOBS else GATHER_SECONDS

    @kopf.on.event(
        kind.group, kind.version, kind.plural, labels=labels, id=kind.plural, registry=handlers
    )
    async def event(event: Mapping[str, Any], **_: Any) -> None:
        body = event["object"]
        lister.note_event(kind, is_listed=event["type"] is None)
        is_deleted = event["type"] == "DELETED"
        is_news = store.forget(body) if is_deleted else store.see(body)
        if is_deleted and kind == PODS:
            for waiting in _jobs_that_wait_for_end_of(body, cache, actor):
                actor.retry_soon(waiting.uid)
                queue.add(waiting.value.key, SOON)
        if is_news or is_deleted:
            for key in cache.keys_of(kind, body):
                queue.add(key, delay)


def _jobs_that_wait_for_end_of(pod: Dict, cache: Cache, actor: Actor) -> list[SeenJob]:
    """Return the jobs that may be able to create their pods after the end of a pod.

    One may wait for the pod's name, others for room in a quota.
    """
    under_quota = actor.next_under_quota(namespace_of(pod))
    waiting = [under_quota] if under_quota else []
    seen = cache.job(key_of_pod(pod))
    if seen and identity_of(seen) != owner_of(pod):
        waiting.append(seen)
    return waiting


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

    kopf copies every object twice to compare it with its older version. No handler reads that.
    """

    def build(
        self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None
    ) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None: ...


class NoMemories(ResourceMemories):
    """Keeps nothing about an object after its event.

    kopf keeps 1 KB for each object it has ever seen, for handlers not used by this operator.
    """

    async def recall(self, *args: Any, **options: Any) -> ResourceMemory:
        return await super().recall(*args, **{**options, "ephemeral": True})


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings: it only watches, reconnects early, and ends if it cannot watch."""
    chosen = kopf.OperatorSettings()
    chosen.peering.standalone = True  # Another operator's peering object must not pause this one.
    chosen.scanning.disabled = True  # Scanning needs rights on CRDs and namespaces.
    chosen.posting.enabled = False
    chosen.persistence.diffbase_storage = NoDiffs()
    # A silently dead connection is noticed when it should have ended.
    chosen.watching.server_timeout = 60
    chosen.watching.client_timeout = 75
    chosen.watching.connect_timeout = 10
    chosen.watching.chunk_size = PAGE_SIZE
    chosen.watching.label_selectors[PODS.plural] = PODS.selector
    chosen.queueing.idle_timeout = 0.2  # kopf keeps an object's last event for so many seconds.
    chosen.networking.request_timeout = 30
    # Long enough in sum for an upgrade of the API server.
    chosen.networking.error_backoffs = (1, 1, 2, 3, 5, 8, 13, 21, 34, 34, 34)
    chosen.networking.enforce_retry_after = True
    chosen.process.ultimate_exiting_timeout = 30
    return chosen
