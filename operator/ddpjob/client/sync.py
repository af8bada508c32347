"""The same client for programs and notebooks without `await`."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from ddpjob.client.apply import Applied
from ddpjob.client.async_client import AsyncClient, Jobs
from ddpjob.client.follow import Item
from ddpjob.client.logs import ALL_LINES, LogChoice, LogLine
from ddpjob.core.readers import Dict
from ddpjob.core.run_metrics import RunMetrics
from ddpjob.core.user_job import DDPJob

T = TypeVar("T")


class Client:
    """Jobs of one cluster, with the rights of a kubeconfig or of a pod's service account.

        client = Client()
        client.submit(DDPJob.create("digits", image=…, args=[…], nodes=2))
        job = client.wait("digits", timeout=600)

    Every method raises a ClientError, whose message says what is wrong. The requests run in a
    thread of their own, since a notebook has an event loop already.
    """

    def __init__(
        self,
        *,
        kubeconfig: Path | None = None,
        context: str | None = None,
        namespace: str | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="ddpjob-client", daemon=True).start()
        try:
            self._client = self._run(
                AsyncClient.connect(kubeconfig=kubeconfig, context=context, namespace=namespace)
            )
        except BaseException:
            self._stop()
            raise
        self.namespace = self._client.namespace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._run(self._client.close())
        self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        async def following() -> T | None:
            return await anext(items, None)

        try:
            while (item := self._run(following())) is not None:
                yield item
        finally:
            self._run(_close(items))

    def get(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Return a job. Raises NotFound."""
        return self._run(self._client.get(name, namespace=namespace))

    def list(self, *, namespace: str | None = None, all_namespaces: bool = False) -> Jobs:
        """Return the jobs of a namespace or of all namespaces, by their names."""
        return self._run(self._client.list(namespace=namespace, all_namespaces=all_namespaces))

    def watch(
        self, name: str | None = None, *, namespace: str | None = None, all_namespaces: bool = False
    ) -> Generator[Jobs, None, None]:
        """Yield the jobs, and again after each change of one of them, for ever."""
        return self._iterate(
            self._client.watch(name, namespace=namespace, all_namespaces=all_namespaces)
        )

    def pods(self, name: str, *, namespace: str | None = None) -> Sequence[Dict]:
        """Return the pods of a job, as the API server shows them."""
        return self._run(self._client.pods(name, namespace=namespace))

    def wait(
        self, name: str, *, namespace: str | None = None, timeout: float | None = None
    ) -> DDPJob:
        """Return the job once it is Complete or Failed. `timeout` is in seconds.

        Raises WaitTimeout, or NotFound if it is deleted before.
        """
        return self._run(self._client.wait(name, namespace=namespace, timeout=timeout))

    def follow(
        self, name: str, choice: LogChoice = ALL_LINES, *, namespace: str | None = None
    ) -> Generator[Item, None, None]:
        """Yield the job after each change of it, and the lines of its pods, until it has finished.

        The lines are those of all nodes and attempts, unless `choice` says less.
        """
        return self._iterate(self._client.follow(name, choice, namespace=namespace))

    def logs(
        self, name: str, choice: LogChoice = ALL_LINES, *, namespace: str | None = None
    ) -> Generator[LogLine, None, None]:
        """Yield what the pods of a job have written so far, in the order of time."""
        return self._iterate(self._client.logs(name, choice, namespace=namespace))

    def metrics(
        self, name: str, *, namespace: str | None = None, tail: int | None = None
    ) -> RunMetrics:
        """Return the events that the trainer of rank 0 has printed: losses, accuracies, speeds.

        `tail` limits how many lines of each log are read.
        """
        return self._run(self._client.metrics(name, namespace=namespace, tail=tail))

    def submit(self, job: DDPJob, *, namespace: str | None = None, dry_run: bool = False) -> DDPJob:
        """Create a job, or change the fields of it that may change. Raises Rejected."""
        return self._run(self._client.submit(job, namespace=namespace, dry_run=dry_run))

    def apply(
        self, documents: Iterable[Dict], *, namespace: str | None = None, dry_run: bool = False
    ) -> Sequence[Applied]:
        """Apply the documents of a manifest, of any kinds, by server-side apply.

        All are tried first, so that a mistake in one changes nothing. The ConfigMap of a job's code
        becomes the job's own, and is deleted with it.
        """
        return self._run(self._client.apply(documents, namespace=namespace, dry_run=dry_run))

    def suspend(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Suspend a job. Its pods get SIGTERM and their grace period; its checkpoints stay."""
        return self._run(self._client.suspend(name, namespace=namespace))

    def resume(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Resume a suspended job from its last checkpoint."""
        return self._run(self._client.resume(name, namespace=namespace))

    def scale(self, name: str, nodes: int, *, namespace: str | None = None) -> DDPJob:
        """Change the number of nodes. A running job begins a new attempt of that size."""
        return self._run(self._client.scale(name, nodes, namespace=namespace))

    def delete(self, name: str, *, namespace: str | None = None, wait: bool = True) -> DDPJob:
        """Delete a job with its pods, and return what it was. Its checkpoints stay."""
        return self._run(self._client.delete(name, namespace=namespace, wait=wait))

    def restart(self, name: str, *, namespace: str | None = None) -> DDPJob:
        """Begin a running job's next attempt, or run a finished job again.

        A running job is suspended and resumed. A finished one is deleted and created again with the
        same manifest, code and checkpoints.
        """
        return self._run(self._client.restart(name, namespace=namespace))

    def replace(self, job: DDPJob) -> DDPJob:
        """Delete a job and create it again with the same manifest.

        If that fails, `job` still has the manifest.
        """
        return self._run(self._client.replace(job))


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()
