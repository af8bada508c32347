"""The loop of a run on this machine: observe, decide, act, until the job is Complete or Failed."""

import asyncio
import contextlib
import fcntl
import shutil
import signal
import socket
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import yaml

from ddpjob.core import names, render
from ddpjob.core.decide import decide
from ddpjob.core.names import Condition
from ddpjob.core.observe import observe
from ddpjob.core.plan import Delete, Plan
from ddpjob.core.pod_context import GRACE_SECONDS, Settings
from ddpjob.core.pods import read_pod
from ddpjob.core.readers import SpecError
from ddpjob.core.status import Status
from ddpjob.local import run_metrics
from ddpjob.local.manifest import Manifest
from ddpjob.local.processes import LocalPod, free_port
from ddpjob.local.translate import Folders, LocalAddresses, translate

CLEARED = ("pods", "logs", "metrics.jsonl", "curve.png", "status.yaml")
"""What a new run of a job replaces; its claims stay, as they do on a cluster."""


class Watcher(Protocol):
    """Whoever shows a run to a person."""

    def status(self, status: Status) -> None: ...

    def note(self, text: str) -> None: ...

    def metric(self, metric: Mapping[str, Any]) -> None: ...

    def line(self, index: int, text: str) -> None: ...


class Stopped(Exception):
    """The run was told to end by the signal `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def run_folder(parent: Path, job: str) -> Iterator[Path]:
    """The folder of this run, locked: `parent/job`, or where another run of the job has that, `parent/job.2` and so on.

    No job's name has a dot. Raises SpecError where nothing can be written.
    """
    with contextlib.ExitStack() as held:
        try:
            folder = _lock_first(parent, job, held)
            _clear(folder)
        except OSError as error:
            raise SpecError(
                f"No run can be kept in {parent}: {error.filename}: {error.strerror}. Choose another folder with --runs."
            ) from error
        yield folder


def _lock_first(parent: Path, job: str, held: contextlib.ExitStack) -> Path:
    """The first folder that no other run has; the lock lasts as long as `held`."""
    for number in range(1, 1000):
        folder = parent / (job if number == 1 else f"{job}.{number}")
        folder.mkdir(parents=True, exist_ok=True)
        lock = held.enter_context((folder / ".lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        return folder
    raise SpecError(
        f"A thousand runs of {job} are under way in {parent}; choose another folder with --runs."
    )


def _clear(folder: Path) -> None:
    for name in CLEARED:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (folder / "logs").mkdir()


class LocalRun:
    """One job on this machine. Raises SpecError before anything is started for what this machine cannot answer."""

    def __init__(self, manifest: Manifest, folders: Folders, watcher: Watcher) -> None:
        self._manifest, self._folders, self._watcher = manifest, folders, watcher
        self._settings = Settings(addresses=LocalAddresses(free_port))
        self._job = replace(
            manifest.job, uid=str(uuid.uuid4()), generation=1, status=Status(), deleting=False
        )
        self._pods: dict[str, LocalPod] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._noted: set[str] = set()
        self._check()

    async def run(self) -> Status:
        """The job's last status; raises Stopped after a signal, when every process has ended."""
        stop = self._on_signals()
        try:
            while not self._over():
                if stop.done():
                    raise Stopped(stop.result())
                await self._pass(stop)
            return self._job.status
        finally:
            await self._end_everything()
            self._keep_status()

    def _keep_status(self) -> None:
        try:
            (self._folders.run / "status.yaml").write_text(
                yaml.safe_dump(self._job.status.to_dict(), sort_keys=False)
            )
        except OSError as error:
            self._note_once(f"{error.filename}: {error.strerror}")

    def _over(self) -> bool:
        return self._job.status.finished and all(
            pod.finished.is_set() for pod in self._pods.values()
        )

    async def _pass(self, stop: "asyncio.Future[int]") -> None:
        self._changed.clear()
        pods = [seen for pod in self._pods.values() if (seen := read_pod(pod.body))]
        plan = decide(observe(self._job, pods), datetime.now(UTC))
        self._act(plan)
        if plan.create or self._over():
            return
        changed = asyncio.ensure_future(self._changed.wait())
        waiting: list[asyncio.Future[Any]] = [changed, stop]
        await asyncio.wait(waiting, timeout=plan.wake_after, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()

    def _act(self, plan: Plan) -> None:
        self._job = replace(self._job, status=plan.status)
        self._watcher.status(plan.status)
        for delete in plan.delete:
            self._delete(delete)
        for body in render.pods(self._job, plan.create, self._settings):
            self._start(body)

    def _start(self, body: dict[str, Any]) -> None:
        command = translate(body, self._folders, self._manifest.config_maps, socket.gethostname())
        pod = LocalPod(body, str(uuid.uuid4()), self._changed.set)
        self._pods[pod.name] = pod
        index = int(body["metadata"]["labels"][names.LABEL_INDEX])
        self._spawn(
            pod.run(command, self._folders.log(pod.name), lambda line: self._line(index, line))
        )

    def _delete(self, delete: Delete) -> None:
        pod = self._pods.get(delete.name)
        if pod and pod.uid == delete.uid:
            pod.terminate(delete.grace if delete.grace is not None else GRACE_SECONDS)
            self._spawn(self._remove(pod))

    async def _remove(self, pod: LocalPod) -> None:
        await pod.finished.wait()
        if self._pods.get(pod.name) is pod:
            del self._pods[pod.name]
        self._changed.set()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _line(self, index: int, text: str) -> None:
        """A line of output; what cannot be shown of it is said once, and the run goes on."""
        try:
            self._show(index, text)
        except Exception as error:
            self._note_once(f"A line of node {index} could not be shown or kept: {error}")

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._watcher.note(text)

    def _show(self, index: int, text: str) -> None:
        metric = run_metrics.metric(text) if index == 0 else None
        if metric is None:
            self._watcher.line(index, text)
            return
        with (self._folders.run / "metrics.jsonl").open("a") as sink:
            sink.write(text + "\n")
        self._watcher.metric(metric)

    def _check(self) -> None:
        """Renders and translates every node once, so that what cannot work is said before anything starts."""
        status = decide(observe(self._job, ()), datetime.now(UTC)).status
        trial = Settings(addresses=LocalAddresses(lambda: 1))
        try:
            for body in render.pods(
                replace(self._job, status=status), range(self._manifest.spec.nodes), trial
            ):
                translate(body, self._folders, self._manifest.config_maps, "")
        except (
            TypeError,
            KeyError,
            AttributeError,
        ) as error:  # a shape that an API server would have refused
            raise SpecError(
                f"No pod can be made of this manifest: {type(error).__name__}: {error}."
            ) from error
        except OSError as error:  # a hostPath that may not even be looked at
            raise SpecError(f"{error.filename}: {error.strerror}.") from error

    def _on_signals(self) -> "asyncio.Future[int]":
        """A future with the first signal; a second one kills at once."""
        loop = asyncio.get_running_loop()
        stop: asyncio.Future[int] = loop.create_future()

        def told(number: int) -> None:
            if not stop.done():
                stop.set_result(number)
                return
            for pod in self._pods.values():
                pod.kill()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            loop.add_signal_handler(number, told, number)
        return stop

    async def _end_everything(self) -> None:
        """Every process gets SIGTERM and time for a last checkpoint, then SIGKILL; returns when none is left."""
        running = [pod for pod in self._pods.values() if not pod.finished.is_set()]
        for pod in running:
            pod.terminate(GRACE_SECONDS)
        await asyncio.gather(*(pod.finished.wait() for pod in running))
        await asyncio.gather(*self._tasks, return_exceptions=True)


def exit_code(status: Status) -> int:
    """0 Complete, 1 Failed."""
    return 0 if status.has(Condition.COMPLETE) else 1
