"""Write to the API server, only here: with the Lease, and a few requests at a time.

Requests of different kinds wait in separate lines. So a status never waits for the creates of
another job. Their admission webhook may hang.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from ddpjob.controller.errors import GaveWay, LeaseLost, Refused
from ddpjob.controller.lease import Lease
from ddpjob.controller.slots import Slots
from ddpjob.kube.api import ApiClient
from ddpjob.kube.errors import ApiError, Unreachable, is_admission
from ddpjob.kube.kinds import PODS, SERVICES
from ddpjob.kube.request import Request, Verb

# Requests of one kind that load the API server at the same time. With more, the throughput of one
# API server no longer grows.
MAX_LOADING = 16

# Requests of each kind under way at the same time, including hanging ones. Each has a connection of
# its own; the rest of kube.api.CONNECTIONS is for the Lease and the LISTs. A request in a hanging
# webhook also occupies one of the API server's seats (API Priority and Fairness). By default all
# service accounts share about 245 of them.
MAX_CREATES = 40
MAX_DELETES = 30
MAX_OTHER_WRITES = 30
MAX_READS = 20

# Of these, requests of hanging groups: more of their requests would probably hang too. With more, a
# webhook that hangs for some namespaces would use up the places of all others. No webhook applies
# to reads.
MAX_HANGING_CREATES = 16
MAX_HANGING = 8

# Calls of one job under way at the same time.
MAX_CALLS_PER_JOB = 16

# The longest wait of a create for its answer, in seconds, while the Lease is held. An admission
# webhook has up to 30 s. Only then does the API server answer with the name of the webhook.
CREATE_TIMEOUT = 35.0

# The longest wait of another write for its answer, in seconds. It must not last long after the end
# of the Lease.
SHORTEST_TIMEOUT = 5.0
LONGEST_TIMEOUT = 10.0

# The objects of a gang. Events and other objects are created like other writes.
GANG = (PODS, SERVICES)

# Errors of one call after which the job's other calls do not start. The most important is first.
# kopf cancels all calls when it ends.
STOPPING = (asyncio.CancelledError, LeaseLost, Refused, Unreachable)

GAVE_UP = "gave up a request that had no answer for long, because newer requests wait"

Call = Coroutine[Any, Any, object]


class Writer:
    """Reads and writes single objects while the Lease is held."""

    def __init__(self, api: ApiClient, lease: Lease) -> None:
        self._api = api
        self._lease = lease
        self._creates = Slots(MAX_LOADING, MAX_CREATES, MAX_HANGING_CREATES)
        self._deletes = Slots(MAX_LOADING, MAX_DELETES, MAX_HANGING)
        self._other_writes = Slots(MAX_LOADING, MAX_OTHER_WRITES, MAX_HANGING)
        self._reads = Slots(MAX_LOADING, MAX_READS)

    async def write(self, request: Request) -> dict[str, Any]:
        """Send one write request. Raises CallFailed or LeaseLost."""
        slots = self._slots_of(request)
        async with self._turn(slots, request):
            if slots is not self._other_writes:
                return await self._lease.while_held(self._api.call(request, CREATE_TIMEOUT))
            timeout = min(LONGEST_TIMEOUT, SHORTEST_TIMEOUT + self._lease.remaining / 2)
            return await self._api.call(request, timeout)

    async def read(self, request: Request) -> dict[str, Any] | None:
        """Return the object of a GET, or None if it is gone. Raises CallFailed or LeaseLost."""
        async with self._turn(self._reads, request):
            return await self._api.read(request)

    def _slots_of(self, request: Request) -> Slots:
        """Return the slots of a write."""
        if request.verb is Verb.CREATE and request.kind in GANG:
            return self._creates
        if request.verb is Verb.DELETE and request.kind == PODS:
            return self._deletes
        return self._other_writes

    @asynccontextmanager
    async def _turn(self, slots: Slots, request: Request) -> AsyncIterator[None]:
        """Wait until a request may be sent. Raises CallFailed or LeaseLost."""
        # A webhook mostly concerns some namespaces, and one kind of objects.
        group = (request.namespace, request.kind)
        try:
            async with slots.take(group) as slot:
                await self._api.wait_until_allowed()
                self._lease.check()
                slot.start()
                yield
        except TimeoutError as error:
            raise GaveWay(GAVE_UP) from error


async def run_all(calls: Iterable[Call]) -> None:
    """Run the calls of one job, then raise the error of a failed one.

    One call runs at first. Each ended call lets one more run, up to MAX_CALLS_PER_JOB. So few
    requests wait if a webhook or a quota stops the job. Kubernetes' own controllers create pods in
    the same way. Each call is taken from `calls` only when it starts, so 1,000 pods are not
    rendered at once.

    After one of the errors STOPPING no call starts, because the others would probably fail in the
    same way. These errors are raised before others, and in their order.
    """
    waiting = iter(calls)
    running: set[asyncio.Task[object]] = set()
    errors: list[BaseException] = []
    limit = 1
    try:
        while True:
            try:
                while len(running) < limit and not any(isinstance(e, STOPPING) for e in errors):
                    running.add(asyncio.create_task(next(waiting)))
            except StopIteration:
                pass
            except Exception as error:
                # A pod cannot be rendered, so `calls` has ended.
                errors.append(error)
            if not running:
                break
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            errors += filter(None, map(_error_of, ended))
            limit = min(limit + len(ended), MAX_CALLS_PER_JOB)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if errors:
        raise _most_important(errors)


def _error_of(task: asyncio.Task[object]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def _most_important(errors: list[BaseException]) -> BaseException:
    for kind in STOPPING:
        for error in errors:
            if isinstance(error, kind):
                return error
    return errors[0]


def is_gone(error: ApiError) -> bool:
    """Return True if the object is gone, or its name belongs to another object by now.

    A webhook or a policy may refuse a request with 409 too. The object is not gone then.
    """
    return error.is_absent or (error.status == 409 and not is_admission(error.message))
