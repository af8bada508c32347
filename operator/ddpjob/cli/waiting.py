"""Wait for jobs: the time limit, and the output of a command stopped before the end."""

import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ddpjob.cli.session import Output, note, print_error

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient
    from ddpjob.jobs.user_job import DDPJob

# The exit code of the command `timeout`.
TIMED_OUT = 124


def place_of(client: "AsyncClient", job: "DDPJob") -> str:
    """Return the option for the job's namespace in a printed command, or an empty string."""
    return "" if job.namespace == client.namespace else f" -n {job.namespace}"


def report_end(job: "DDPJob") -> int:
    """Print how a job has ended, and return its exit code."""
    Output().print(f"{job.name} {job.phase}: {job.message}")
    return job.status.exit_code


async def wait_for_end(client: "AsyncClient", job: "DDPJob") -> int:
    """Wait for the end of a job, print it, and return the exit code."""
    return report_end(await client.wait(job.name, namespace=job.namespace))


class TimeLimit:
    """The time limit of --timeout. It begins now. None means no limit."""

    def __init__(self, seconds: int | None) -> None:
        self._seconds = seconds
        self._begin = time.monotonic()

    def _left(self) -> float | None:
        if self._seconds is None:
            return None
        return max(0.0, self._begin + self._seconds - time.monotonic())

    async def apply(
        self,
        client: "AsyncClient",
        job: "DDPJob",
        work: Coroutine[Any, Any, int],
        ended: "Callable[[DDPJob], int]" = report_end,
    ) -> int:
        """Return the exit code of `work`, or 124 when the time is over.

        `work` waits for the job. `ended` returns the exit code if the job has ended in the last
        moment.
        """
        # Imported late to keep `--help` quick.
        import asyncio

        place = place_of(client, job)
        goes_on = f"the job goes on; ddpjob logs {job.name}{place} -f follows it again"
        try:
            async with asyncio.timeout(self._left()) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
        except asyncio.CancelledError:
            # Ctrl-C.
            note(goes_on)
            raise
        job = await client.get(job.name, namespace=job.namespace)
        if job.finished:
            return ended(job)
        print_error(
            f"job {job.name} has not finished after {self._seconds} s: {job.phase}: {job.message}"
        )
        note(goes_on)
        return TIMED_OUT
