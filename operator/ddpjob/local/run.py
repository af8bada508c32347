"""The loop of a run on this machine: observe, decide, act, until the job is Complete or Failed."""

import asyncio
import signal
import socket
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol

import yaml

from ddpjob.core.api import names
from ddpjob.core.api.job import Job
from ddpjob.core.api.readers import Dict
from ddpjob.core.api.status import Status
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.observation import observe
from ddpjob.core.observe.pods import read_pod
from ddpjob.core.plan import Assign, Delete, Plan
from ddpjob.core.render import objects
from ddpjob.core.render.assignment import assignment
from ddpjob.core.render.pod_context import Settings
from ddpjob.jobs.run_metrics import is_for_people, parse_metric
from ddpjob.local.addresses import LocalAddresses
from ddpjob.local.local_pod import LocalPod
from ddpjob.local.output import Output
from ddpjob.local.ports import free_port
from ddpjob.local.run_files import RunFiles, write_whole
from ddpjob.local.translate import translate

# Signals to end a run. SIGHUP comes when the terminal is closed.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Watcher(Protocol):
    """Shows a run to a person."""

    def status(self, status: Status) -> None: ...

    def note(self, text: str) -> None: ...

    def metric(self, metric: Dict, *, is_printed: bool = False) -> None: ...

    def line(self, index: int, text: str) -> None: ...


class Stopped(Exception):
    """A signal ended the run."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def check(job: Job, files: RunFiles) -> None:
    """Raise SpecError for a job that cannot run on this machine. Nothing is created or started."""
    status = decide(observe(job, ()), datetime.now(UTC)).status
    settings = run_settings(lambda: names.RENDEZVOUS_PORT)
    first_attempt = replace(job, status=status)
    for body in objects.pods(first_attempt, range(status.pods.desired), settings):
        _assign_node(body)
        translate(body, files)


class LocalRun:
    """One job on this machine, from its first attempt to its end.

    The run plays the parts of a cluster around the core's decisions: it keeps the status as an API
    server does, names the node of each pod as a scheduler does, and starts and ends the pods.
    """

    def __init__(self, job: Job, files: RunFiles, watcher: Watcher) -> None:
        # Each run is a new object, as if the manifest had been deleted and applied again.
        self._job = replace(job, uid=str(uuid.uuid4()))
        self._files = files
        self._watcher = watcher
        self._settings = run_settings(free_port)
        self._pods: dict[str, LocalPod] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Set when a pod has changed since the last look.
        self._changed = asyncio.Event()
        self._notes: set[str] = set()

    async def run(self) -> Status:
        """Run the job and return its last status.

        Raises Stopped after a signal. In both cases all processes have ended.
        """
        stop = self._listen_for_signals()
        try:
            while not self._is_over():
                if stop.done():
                    raise Stopped(stop.result())
                plan = self._decide()
                self._act(plan)
                # New pods change the state, so decide again at once.
                if not plan.new_pods and not self._is_over():
                    await self._wait(stop, plan.wake_after)
        finally:
            await self._end_pods()
            self._write_status()
        return self._job.status

    def _is_over(self) -> bool:
        if not self._job.status.finished:
            return False
        return all(pod.finished.is_set() for pod in self._pods.values())

    # Observe and decide

    def _decide(self) -> Plan:
        # A change from here on needs another look.
        self._changed.clear()
        seen = [read_pod(pod.body) for pod in self._pods.values()]
        pods = [pod for pod in seen if pod is not None]
        answers = {pod.uid: state for pod in self._pods.values() if (state := pod.state)}
        return decide(observe(self._job, pods, answers=answers), datetime.now(UTC))

    async def _wait(self, stop: "asyncio.Future[int]", seconds: float | None) -> None:
        """Wait until a pod changes, a signal comes, or the seconds of the plan are over."""
        changed = asyncio.ensure_future(self._changed.wait())
        waiting: list[asyncio.Future[Any]] = [changed, stop]
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()

    # Act

    def _act(self, plan: Plan) -> None:
        is_new = plan.status != self._job.status
        self._job = replace(self._job, status=plan.status)
        self._watcher.status(plan.status)
        if is_new:
            self._write_status()
        for assign in plan.assign:
            self._assign(assign)
        for delete in plan.delete:
            self._delete(delete)
        for question in plan.ask:
            pod = self._pods.get(question.name)
            if pod and pod.uid == question.uid:
                self._spawn(pod.ask_state())
        for body in objects.pods(self._job, plan.new_pods, self._settings):
            self._start(body)

    def _start(self, body: dict[str, Any]) -> None:
        _assign_node(body)
        command = translate(body, self._files)
        if self._job.spec and self._job.spec.setup:
            environment = self._files.pod(body["metadata"]["name"]) / "environment"
            command = replace(command, environment=environment)
        index = int(body["metadata"]["labels"][names.LABEL_INDEX])
        port = self._settings.addresses.port(self._job, index)
        pod = LocalPod(body, self._changed.set, port)
        self._pods[pod.name] = pod
        output = Output(self._files.log(pod.name), lambda line: self._handle_line(index, line))
        self._spawn(pod.run(command, output))

    def _assign(self, assign: Assign) -> None:
        pod = self._pods.get(assign.name)
        if pod and pod.uid == assign.uid:
            addresses = self._settings.addresses
            text = assignment(self._job, assign.index, addresses, assign)
            pod.assign(self._job.status.attempt.number or 0, text, assign.ready_since)

    def _delete(self, delete: Delete) -> None:
        pod = self._pods.get(delete.name)
        # A new pod may have the same name as the pod in the plan.
        if pod is None or pod.uid != delete.uid:
            return
        pod.terminate(pod.grace if delete.grace is None else delete.grace)
        self._spawn(self._remove(pod))

    async def _remove(self, pod: LocalPod) -> None:
        """Forget a deleted pod once it has ended."""
        await pod.finished.wait()
        if self._pods.get(pod.name) is pod:
            del self._pods[pod.name]
        self._changed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        # asyncio itself keeps only weak references to tasks.
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Output

    def _handle_line(self, index: int, text: str) -> None:
        """Keep a metric or show a line. Note a failure once and let the run go on."""
        try:
            # Only global rank 0 reports metrics, and it runs on node 0.
            if text.startswith(names.AGENT_LINE):
                # The status tells a person the same, for all nodes at once.
                return
            metric = parse_metric(text) if index == 0 else None
            is_printed = metric is None or is_for_people(text)
            if is_printed:
                self._watcher.line(index, text)
            if metric is None:
                return
            with self._files.metrics.open("a") as file:
                file.write(f"{text}\n")
            self._watcher.metric(metric, is_printed=is_printed)
        except Exception as error:
            self._note_once(f"node {index}: cannot show or keep a line of output: {error}")

    def _note_once(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            self._watcher.note(text)

    # End

    def _listen_for_signals(self) -> "asyncio.Future[int]":
        """Return a future for the first signal. A second signal kills all pods at once."""
        loop = asyncio.get_running_loop()
        stop: asyncio.Future[int] = loop.create_future()

        def handle(number: int) -> None:
            if not stop.done():
                stop.set_result(number)
                return
            for pod in self._pods.values():
                pod.kill()

        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, handle, number)
        return stop

    async def _end_pods(self) -> None:
        """Delete all pods and wait for their end. They have time for a last checkpoint."""
        running = [pod for pod in self._pods.values() if not pod.finished.is_set()]
        for pod in running:
            pod.terminate(pod.grace)
        await asyncio.gather(*(pod.finished.wait() for pod in running))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _write_status(self) -> None:
        """Write the status for other programs."""
        text = yaml.safe_dump(self._job.status.to_dict(), sort_keys=False)
        try:
            write_whole(self._files.status, text)
        except OSError as error:
            self._note_once(f"cannot write {error.filename}: {error.strerror}")


def run_settings(find_port: Callable[[], int]) -> Settings:
    return Settings(addresses=LocalAddresses(find_port), isolated=False)


def _assign_node(body: dict[str, Any]) -> None:
    """Fill in what an API server and a scheduler add to a new pod."""
    body["metadata"]["uid"] = str(uuid.uuid4())
    body["spec"]["nodeName"] = socket.gethostname()
