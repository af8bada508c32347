"""The only way to write to the API server: a few at a time, and only with the Lease."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from ddpjob.controller.client import ApiClient
from ddpjob.controller.errors import ApiError, LeaseLost, Refused
from ddpjob.controller.lease import Lease

# Writes under way at the same time. With more, the throughput of one API server no longer grows.
MAX_WRITES = 16

# Seconds that a write waits for its answer. It must not wait long after the Lease has ended.
SHORTEST_TIMEOUT = 5.0
LONGEST_TIMEOUT = 10.0

Call = Coroutine[Any, Any, None]


class Writer:
    """Reads and writes single objects while the Lease is held."""

    def __init__(self, api: ApiClient, lease: Lease) -> None:
        self._api = api
        self._lease = lease
        self._slots = asyncio.Semaphore(MAX_WRITES)

    async def write(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any],
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Send one write request. Raises CallFailed or LeaseLost."""
        async with self._slots:
            await self._api.wait_until_allowed()
            self._lease.check()
            timeout = min(LONGEST_TIMEOUT, SHORTEST_TIMEOUT + self._lease.remaining / 2)
            return await self._api.call(method, path, body, query, timeout)

    async def get(self, path: str) -> dict[str, Any] | None:
        """Return an object, or None if it does not exist. Raises CallFailed."""
        return await self._api.get(path)


async def run_all(calls: Iterable[Call]) -> None:
    """Run every call, then raise the error of one that failed.

    LeaseLost comes before Refused, and Refused before errors that can be retried. Each call is
    taken from `calls` only when it can start, so that 1,000 pods are not rendered at once.

    LeaseLost ends the run: the next leader makes the remaining calls.
    """
    waiting = iter(calls)
    errors: list[BaseException] = []

    async def work() -> None:
        for call in waiting:
            try:
                await call
            except LeaseLost:
                raise
            except Exception as error:
                errors.append(error)

    workers = [work() for _ in range(MAX_WRITES)]
    results = await asyncio.gather(*workers, return_exceptions=True)
    ends = [result for result in results if result is not None]
    if ends or errors:
        raise _most_important([*ends, *errors])


def _most_important(errors: list[BaseException]) -> BaseException:
    for kind in (LeaseLost, Refused):
        for error in errors:
            if isinstance(error, kind):
                return error
    return errors[0]


def is_gone(error: ApiError) -> bool:
    """Return True if the object is gone, or its name belongs to another object by now."""
    return error.status in (404, 409)
