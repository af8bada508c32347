"""The same client for programs and notebooks without `await`."""

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from ddpjob.client.apply import Applied
from ddpjob.client.async_client import AsyncClient
from ddpjob.client.errors import ClientError, NotConnected
from ddpjob.client.follow import Item
from ddpjob.client.logs import ALL_LINES, LogChoice, LogLine
from ddpjob.client.reader import PROGRESS_LINES, Jobs
from ddpjob.core.api.readers import Dict
from ddpjob.jobs.progress import Progress
from ddpjob.jobs.run_metrics import RunMetrics
from ddpjob.jobs.user_job import DDPJob
from ddpjob.show import notebook

T = TypeVar("T")


class Client:
    """Jobs of one cluster, with the rights of a kubeconfig or of a pod's service account.

        client = Client()
        client.submit(DDPJob.create("digits", image=…, args=[…], nodes=2))
        job = client.wait("digits", timeout=600)

    After a failure, every method raises a ClientError. Its message says what is wrong. The requests
    run in a thread of their own, since a notebook has an event loop already.
    """

    def __init__(
        self,
        *,
        kubeconfig: Path | None = None,
        context: str | None = None,
        namespace: str | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever,
            name="ddpjob-client",
            daemon=True,
        )
        self._thread.start()
        # A call before the loop runs would be taken for one after its end.
        first = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        first.result()
        connecting = AsyncClient.connect(
            kubeconfig=kubeconfig,
            context=context,
            namespace=namespace,
        )
        try:
            self._client = self._run(connecting)
        except BaseException:
            self._stop()
            raise
        self.namespace = self._client.namespace
        # Python would report connections left open at the end of the program.
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. The client cannot be used afterwards."""
        if self._loop.is_running():
            self._run(self._client.close())
            self._stop()
        atexit.unregister(self.close)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._loop.is_running():
            work.close()
            raise ClientError("the client is closed; make a new one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        # After Ctrl-C the generator may still run for a moment, and cannot be closed until then.
        using = asyncio.Lock()

        async def following() -> T | None:
            async with using:
                return await anext(items, None)

        async def close() -> None:
            async with using:
                await items.aclose()

        try:
            while (item := self._run(following())) is not None:
                yield item
        finally:
            if self._loop.is_running():
                self._run(close())

    def get(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Return a job. Raises NotFound."""
        return self._run(self._client.get(name, namespace=namespace))

    def list(
        self,
        *,
        namespace: str | None = None,
        all_namespaces: bool = False,
    ) -> Jobs:
        """Return the jobs of a namespace or of all namespaces, by their names."""
        work = self._client.list(namespace=namespace, all_namespaces=all_namespaces)
        return self._run(work)

    def watch(
        self,
        name: str | None = None,
        *,
        namespace: str | None = None,
        all_namespaces: bool = False,
    ) -> Generator[Jobs, None, None]:
        """Yield the jobs, and again after each change of one of them, for ever."""
        changes = self._client.watch(
            name,
            namespace=namespace,
            all_namespaces=all_namespaces,
        )
        return self._iterate(changes)

    def pods(self, job: DDPJob, *, node: int | None = None) -> Sequence[Dict]:
        """Return the pods of a job or of one of its nodes, as the API server shows them."""
        return self._run(self._client.pods(job, node=node))

    def progress(self, job: DDPJob, *, tail: int = PROGRESS_LINES) -> Progress:
        """Return how far a job is, as the last lines of its log tell."""
        return self._run(self._client.progress(job, tail=tail))

    def wait(
        self,
        name: str,
        *,
        namespace: str | None = None,
        timeout: float | None = None,
    ) -> DDPJob:
        """Return the job once it is Complete or Failed. `timeout` is in seconds.

        Raises WaitTimeout, or NotFound if it is deleted before.
        """
        work = self._client.wait(name, namespace=namespace, timeout=timeout)
        return self._run(work)

    def watch_progress(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Show a progress bar, also in a notebook, until a job has finished. Return the job."""
        last = self.get(name, namespace=namespace)

        def look() -> DDPJob:
            nonlocal last
            # The API server may restart during a long training.
            with suppress(NotConnected):
                last = self.get(name, namespace=namespace)
            return last

        def progress(job: DDPJob) -> Progress:
            try:
                return self.progress(job)
            except ClientError:
                return Progress()

        return notebook.watch(look, progress, lambda job: job.finished)

    def plot(self, name: str, *, namespace: str | None = None) -> notebook.Picture | None:
        """Return the curves of a job as a picture, or None if it has printed no figures.

        Needs matplotlib from the extra `local`.
        """
        metrics = self.metrics(name, namespace=namespace)
        return notebook.picture(name, metrics)

    def follow(
        self,
        name: str,
        choice: LogChoice = ALL_LINES,
        *,
        namespace: str | None = None,
    ) -> Generator[Item, None, None]:
        """Yield the job after each change of it, and the lines of its pods, until it has finished.

        The lines are those of all nodes and attempts, unless `choice` limits them.
        """
        items = self._client.follow(name, choice, namespace=namespace)
        return self._iterate(items)

    def logs(
        self,
        name: str,
        choice: LogChoice = ALL_LINES,
        *,
        namespace: str | None = None,
    ) -> Generator[LogLine, None, None]:
        """Yield what the pods of a job have written so far, in the order of time."""
        lines = self._client.logs(name, choice, namespace=namespace)
        return self._iterate(lines)

    def metrics(
        self,
        name: str,
        *,
        namespace: str | None = None,
        tail: int | None = None,
    ) -> RunMetrics:
        """Return the events printed by the trainer of rank 0: losses, accuracies, speeds.

        `tail` limits how many lines of each log are read.
        """
        work = self._client.metrics(name, namespace=namespace, tail=tail)
        return self._run(work)

    def submit(
        self,
        job: DDPJob,
        *,
        namespace: str | None = None,
        dry_run: bool = False,
    ) -> DDPJob:
        """Create a job, or change its mutable fields. Raises Rejected."""
        work = self._client.submit(job, namespace=namespace, dry_run=dry_run)
        return self._run(work)

    def apply(
        self,
        documents: Iterable[Dict],
        *,
        namespace: str | None = None,
        dry_run: bool = False,
    ) -> Sequence[Applied]:
        """Apply the documents of a manifest, of any kinds, by server-side apply.

        All are tried in a dry run first, so a mistake in one changes nothing. The job becomes the
        owner of its code's ConfigMap, so both are deleted together.
        """
        work = self._client.apply(documents, namespace=namespace, dry_run=dry_run)
        return self._run(work)

    def own_code(self, bodies: Sequence[Dict]) -> None:
        """Make jobs the owners of their code's ConfigMaps, so these are deleted with the jobs."""
        self._run(self._client.own_code(bodies))

    def suspend(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Suspend a job. Its pods get SIGTERM and their grace period; its checkpoints stay."""
        return self._run(self._client.suspend(name, namespace=namespace))

    def retry(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Take a Failed job up again, with its counters, its history and its last checkpoint."""
        return self._run(self._client.retry(name, namespace=namespace))

    def resume(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Resume a suspended job from its last checkpoint."""
        return self._run(self._client.resume(name, namespace=namespace))

    def scale(self, name: str, nodes: int, *, namespace: str | None = None) -> DDPJob:
        """Change the number of nodes. A running job begins a new attempt with the new number."""
        work = self._client.scale(name, nodes, namespace=namespace)
        return self._run(work)

    def delete(
        self,
        name: str,
        *,
        namespace: str | None = None,
        wait: bool = True,
    ) -> DDPJob:
        """Delete a job with its pods, and return what it was. Its checkpoints stay."""
        work = self._client.delete(name, namespace=namespace, wait=wait)
        return self._run(work)

    def restart(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Begin a running job's next attempt, or run a finished job again.

        A running job is suspended and resumed. A finished one is deleted and created again with the
        same manifest, code and checkpoints.
        """
        return self._run(self._client.restart(name, namespace=namespace))

    def replace(self, job: DDPJob) -> DDPJob:
        """Delete a job and create it again with the same manifest.

        The API server tries the manifest first, under another name. If the creation fails
        nevertheless, `job` still has the manifest.
        """
        return self._run(self._client.replace(job))

    def remove(self, job: DDPJob, *, keeps_code: bool) -> Sequence[Dict]:
        """Delete a job to make room for a new one.

        With `keeps_code`, keep the ConfigMap of its code for the new job, and return it.
        """
        return self._run(self._client.remove(job, keeps_code=keeps_code))
