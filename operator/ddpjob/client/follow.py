"""Follow a running job: the changes of its status, and the log lines of its pods."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ddpjob.client.errors import NotFound
from ddpjob.client.logs import (
    MAX_STREAMS,
    LogChoice,
    LogLine,
    PodLog,
    has_begun,
    has_ended,
    too_many_logs,
)
from ddpjob.core.api import names
from ddpjob.core.api.owned import owner_of
from ddpjob.core.api.readers import Dict
from ddpjob.jobs.user_job import DDPJob
from ddpjob.kube.api import ApiClient, may_succeed_later
from ddpjob.kube.errors import ApiError, CallFailed
from ddpjob.kube.kinds import JOBS, PODS
from ddpjob.kube.request import Request, Verb
from ddpjob.kube.watch import watch

# Lines of several pods are collected for this many seconds, and sorted by their times.
ORDER_SECONDS = 0.2

# Seconds between a broken connection to a log and the next request.
RETRY_SECONDS = 1.0

# Seconds for the pods of a finished job to end. Pods kept by cleanPodPolicy never end.
LAST_SECONDS = 15.0

# Seconds before a log is requested again, to replace a dead connection.
LOG_SECONDS = 300.0

# Limit of failed requests in a row for the log of an ended pod.
MAX_FAILURES = 10
UNREADABLE = "the rest of the log of this pod cannot be read"

# Limit of lines waiting to be shown. If the reader is slow, no more are requested.
MAX_WAITING = 10_000

# The container has not started yet. A pod may be shown as running a moment earlier.
BAD_REQUEST = 400
NOT_FOUND = 404

Item = LogLine | DDPJob


@dataclass
class Follower:
    """Follows one job until it has finished, or is gone."""

    api: ApiClient
    job: DDPJob
    choice: LogChoice
    # The items for the reader. None is the end; an exception also ends the iteration.
    _found: "asyncio.Queue[Item | Exception | None]" = field(
        default_factory=lambda: asyncio.Queue(MAX_WAITING)
    )
    _tasks: "set[asyncio.Task[None]]" = field(default_factory=set)
    # The tasks reading logs, and the ended pods, by the UIDs of the pods.
    _logs: "dict[str, asyncio.Task[None]]" = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)
    # Set once all existing pods are known.
    _listed: asyncio.Event = field(default_factory=asyncio.Event)

    async def items(self) -> AsyncGenerator[Item, None]:
        """Yield the job after each change of it, and the lines of its pods.

        Raises ApiError or Unreachable.
        """
        self._spawn(self._watch_job())
        self._spawn(self._watch_pods())
        try:
            while True:
                for found in await self._some():
                    if found is None:
                        return
                    if isinstance(found, Exception):
                        raise found
                    yield found
        finally:
            await self._close()

    async def _some(self) -> "list[Item | Exception | None]":
        """Wait for an item, and return it with those of the next 0.2 s, the lines in order."""
        found = [await self._found.get()]
        with suppress(TimeoutError):
            async with asyncio.timeout(ORDER_SECONDS):
                while len(found) < MAX_WAITING and found[-1] is not None:
                    found.append(await self._found.get())
        lines = sorted(item for item in found if isinstance(item, LogLine))
        others = [item for item in found if not isinstance(item, LogLine)]
        return [*lines, *others]

    async def _watch_job(self) -> None:
        """Report each change of the job, and the end once its logs have been read."""
        await self._wait_for_end()
        # The watch may report pods later than the job. Wait for them, then for their last lines.
        await self._listed.wait()
        clock = asyncio.get_running_loop().time
        deadline = clock() + LAST_SECONDS
        while reading := self._reading(self._logs.keys()):
            if clock() > deadline:
                break
            await asyncio.wait(reading, timeout=RETRY_SECONDS)
        # The remaining pods still write. Read only the logs of ended pods to their end.
        while reading := self._reading(self._ended):
            await asyncio.wait(reading, timeout=RETRY_SECONDS)
        await self._found.put(None)

    async def _wait_for_end(self) -> None:
        """Report each change of the job until it has finished. Raises NotFound if it is deleted."""
        query = {"fieldSelector": f"metadata.name={self.job.name}"}
        exists = False
        async for change in watch(self.api, JOBS, self.job.namespace, query):
            if change is None:
                if not exists:
                    break
                continue
            what, body = change
            job = DDPJob.from_manifest(body)
            if job.uid != self.job.uid:
                continue
            if what == "DELETED":
                break
            exists = True
            await self._found.put(job)
            if job.finished:
                return
        raise NotFound(f"job {self.job.name} was deleted")

    async def _watch_pods(self) -> None:
        query = {"labelSelector": f"{names.LABEL_JOB}={self.job.name}"}
        async for change in watch(self.api, PODS, self.job.namespace, query):
            if change is None:
                self._listed.set()
            else:
                self._see(*change)

    def _see(self, what: str, pod: Dict) -> None:
        """Begin to read the log of a pod once its container has started. Raises Rejected."""
        uid = str(pod["metadata"]["uid"])
        if what == "DELETED" or has_ended(pod):
            self._ended.add(uid)
        log = PodLog.from_pod(pod)
        if log is None or uid in self._logs or owner_of(pod) != self.job.identity:
            return
        if not has_begun(pod) or not self.choice.has_pod(log):
            return
        # Other connections are needed for the watches.
        reading = self._reading(self._logs.keys() - self._ended)
        if len(reading) >= MAX_STREAMS:
            raise too_many_logs(len(self._logs) + 1)
        choice = self.choice
        if self._listed.is_set():
            choice = choice.of_new_pods()
        self._logs[uid] = self._spawn(self._read(uid, log, choice))

    async def _read(self, uid: str, log: PodLog, choice: LogChoice) -> None:
        """Report the lines of a pod until it has ended, also over several connections."""
        request = Request(Verb.GET, PODS, log.namespace, log.name, "log")
        query = {**choice.query(), "follow": "true"}
        failures = 0
        while failures < MAX_FAILURES or uid not in self._ended:
            # A log requested after the end of its container is complete.
            is_last = uid in self._ended
            rest = replace(request, query=query)
            try:
                async for raw in self.api.stream(rest, LOG_SECONDS):
                    failures = 0
                    line = log.take(raw)
                    if line is not None and self.choice.has_line(line):
                        await self._found.put(line)
            except CallFailed as error:
                status = error.status if isinstance(error, ApiError) else 0
                if status == NOT_FOUND:
                    return
                if status != BAD_REQUEST and not may_succeed_later(error):
                    raise
                failures += 1
                is_last = is_last and status == BAD_REQUEST
            if is_last:
                return
            await asyncio.sleep(RETRY_SECONDS)
            query = _continued(query, log.last_time)
            log.resumed_after = log.last_time
        # The kubelet of the node does not answer any more.
        note = log.read(log.last_time, f"{names.AGENT_LINE}{UNREADABLE}")
        await self._found.put(note)

    def _reading(self, pods: Set[str]) -> "set[asyncio.Task[None]]":
        """Return the unfinished tasks for the logs of the pods with these UIDs."""
        found = {self._logs[uid] for uid in pods if uid in self._logs}
        return {task for task in found if not task.done()}

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._report_errors(work))
        self._tasks.add(task)
        return task

    async def _report_errors(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            await self._found.put(error)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _continued(query: dict[str, str], last_time: str) -> dict[str, str]:
    """Return the query for the lines after the last one."""
    if not last_time:
        return query
    following = {**query, "sinceTime": last_time}
    for key in ("sinceSeconds", "tailLines"):
        following.pop(key, None)
    return following
