"""The client of this machine: methods of a cluster's client, over a folder of local runs."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from ddpjob.client.errors import NotFound, Rejected, WaitTimeout
from ddpjob.client.logs import ALL_LINES, LogChoice, LogLine, PodLog
from ddpjob.client.reader import Jobs
from ddpjob.core.api.readers import Dict, SpecError, did_you_mean, quoted, require_object
from ddpjob.core.api.status import Account, Status
from ddpjob.core.api.yaml_text import load_yaml
from ddpjob.core.decide.accounting import seconds_until
from ddpjob.jobs.progress import Progress
from ddpjob.jobs.run_metrics import RunMetrics, parse_metric
from ddpjob.jobs.user_job import DDPJob
from ddpjob.local.run_files import RunFiles, running_process
from ddpjob.show import notebook

# Seconds between two looks at the files of a run.
INTERVAL = 0.1

# Seconds for a run to write its first status, and for its processes to end after SIGTERM.
START_SECONDS = 60.0
END_SECONDS = 120.0

# Bytes read from the end of a log to find its last lines.
TAIL_BYTES = 1 << 20

# Folder for the manifests of runs and what `ddpjob run` prints. No job has such a name.
SUBMITTED = ".submitted"


class LocalClient:
    """Jobs on this machine, each run by `ddpjob run --local` in a process of its own.

        client = LocalClient()
        client.submit(DDPJob.create("digits", image="any", args=["train.py"], nodes=2))
        job = client.wait("digits")

    `runs` is the folder of all runs. The runs go on when this program ends.
    """

    def __init__(self, runs: str | Path = "ddpjob-runs") -> None:
        self.runs = Path(runs).resolve()

    def submit(self, job: DDPJob, *, others: Iterable[Dict] = ()) -> DDPJob:
        """Start a job, and return it with its first status. Raises Rejected.

        `others` are objects needed by its manifest, such as ConfigMaps. An ended run of the same
        name is replaced.
        """
        name = job.name
        if self._process(name) is not None:
            raise Rejected(f"job {name} runs already; delete it first or choose another name")
        folder = self.runs / SUBMITTED
        folder.mkdir(parents=True, exist_ok=True)
        manifest = folder / f"{name}.yaml"
        text = yaml.safe_dump_all([*others, *job.documents], sort_keys=False)
        manifest.write_text(text)
        # An ended run of the same name may have left one.
        status = self._files(name).status
        status.unlink(missing_ok=True)
        process = self._start(manifest, name)
        deadline = time.monotonic() + START_SECONDS
        while not status.exists() and time.monotonic() < deadline:
            if process.poll() is not None:
                error = self._output(name).read_text(errors="replace")
                raise Rejected(error.strip())
            time.sleep(INTERVAL)
        return self.get(name)

    def _start(self, manifest: Path, name: str) -> "subprocess.Popen[bytes]":
        program = [sys.executable, "-m", "ddpjob.cli.main"]
        options = ["--local", str(manifest), "--runs", str(self.runs)]
        with self._output(name).open("wb") as output:
            return subprocess.Popen(
                [*program, "run", *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C in a notebook or a terminal is not for the run.
                start_new_session=True,
            )

    def _output(self, name: str) -> Path:
        return self.runs / SUBMITTED / f"{name}.log"

    def _files(self, name: str) -> RunFiles:
        return RunFiles(self.runs / name)

    def _process(self, name: str) -> int | None:
        return running_process(self.runs / name)

    def get(self, name: str) -> DDPJob:
        """Return a job by the name of its folder. Raises NotFound."""
        job = self._read(name)
        if job is None:
            hint = did_you_mean(name, self._names())
            raise NotFound(f"job {quoted(name)} not found in {self.runs}{hint}")
        return job

    def list(self) -> Jobs:
        """Return the jobs of the folder, by their names.

        If two runs of a job go on at once, the second one has the name of its folder, `NAME.2`.
        """
        found = [self._read(name) for name in self._names()]
        return Jobs(job for job in found if job is not None)

    def _names(self) -> Sequence[str]:
        manifests = self.runs.glob("*/job.yaml")
        return sorted(path.parent.name for path in manifests)

    def _read(self, name: str) -> DDPJob | None:
        """Return a job, or None if the folder has no readable manifest of a job."""
        if not _is_name_of_folder(name):
            return None
        files = self._files(name)
        try:
            content = _read_yaml(files.manifest)
            manifest = require_object(content, "the manifest")
            job = DDPJob.from_manifest(manifest)
        except SpecError:
            return None
        status = Status.from_dict(_read_yaml(files.status))
        if not status.finished and self._process(name) is None:
            status = _stopped(status, files)
        return replace(job, name=name, status=status)

    def wait(self, name: str, *, timeout: float | None = None) -> DDPJob:
        """Return the job once it has ended. `timeout` is in seconds. Raises WaitTimeout."""
        start = time.monotonic()
        while self._process(name) is not None:
            waited = time.monotonic() - start
            if timeout is not None and waited > timeout:
                raise WaitTimeout(f"job {name} has not finished after {timeout:g} s")
            time.sleep(INTERVAL)
        return self.get(name)

    def watch_progress(self, name: str) -> DDPJob:
        """Show a progress bar, also in a notebook, until a job has ended. Return the job."""

        def progress(job: DDPJob) -> Progress:
            metrics = self.metrics(job.name)
            return Progress.from_events(metrics.events)

        return notebook.watch(
            lambda: self.get(name),
            progress,
            lambda job: self._process(job.name) is None,
        )

    def plot(self, name: str) -> notebook.Picture | None:
        """Return the curves of a job as a picture, or None if it has printed no figures."""
        return notebook.picture(name, self.metrics(name))

    def logs(self, name: str, choice: LogChoice = ALL_LINES) -> Iterator[LogLine]:
        """Yield what the nodes of a job have written, one node after the other."""
        job = self.get(name)
        choice = replace(choice, ranks_per_node=job.processes_per_node)
        for path, log in _pod_logs(self._files(name).logs):
            if not choice.has_pod(log):
                continue
            texts = _read_lines(path, choice.requested_tail)
            lines = (log.read("", text) for text in texts)
            chosen = filter(choice.has_line, lines)
            yield from deque(chosen, choice.tail)

    def metrics(self, name: str) -> RunMetrics:
        """Return the events printed by the trainer of rank 0: losses, accuracies, speeds."""
        self.get(name)
        metrics = RunMetrics()
        for line in _read_lines(self._files(name).metrics):
            event = parse_metric(line)
            if event is not None:
                metrics.events.append(event)
        return metrics

    def delete(self, name: str) -> DDPJob:
        """End the processes of a job and delete its files, apart from its claims."""
        job = self.get(name)
        process = self._process(name)
        if process is not None:
            os.kill(process, signal.SIGTERM)
            self._wait_for_end(name)
        folder = self.runs / name
        for path in folder.iterdir():
            if path.name != "claims":
                _remove(path)
        return job

    def _wait_for_end(self, name: str) -> None:
        deadline = time.monotonic() + END_SECONDS
        while self._process(name) is not None:
            if time.monotonic() > deadline:
                message = f"the processes of job {name} still run after {END_SECONDS:.0f} s"
                raise WaitTimeout(message)
            time.sleep(INTERVAL)


def _is_name_of_folder(name: str) -> bool:
    """Return True if a user's name is safe as the name of a folder."""
    if name in ("", "..") or "\0" in name:
        return False
    return Path(name).name == name


def _read_yaml(path: Path) -> Any:
    """Return what a file has, or None. A file may be gone at any time."""
    try:
        return load_yaml(path.read_text())
    # Text in another encoding than UTF-8, and an impossible date, raise ValueError.
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None


def _pod_logs(folder: Path) -> Sequence[tuple[Path, PodLog]]:
    """Return the logs of a run with their pods, those of the first attempt first."""
    found = []
    for path in folder.glob("*.log"):
        log = _pod_log(path.stem)
        if log is not None:
            found.append((path, log))
    return sorted(found, key=_order_of_log)


def _pod_log(pod: str) -> PodLog | None:
    """Return the log of a pod, or None for a name without an attempt and an index at its end."""
    _, *numbers = pod.rsplit("-", 2)
    if len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
        return None
    born, index = map(int, numbers)
    return PodLog("", pod, index, born)


def _order_of_log(found: tuple[Path, PodLog]) -> tuple[int, int]:
    _, log = found
    return log.born, log.index


def _read_lines(path: Path, tail: int | None = None) -> Sequence[str]:
    """Return the lines of a file, or only the last ones. A missing file has none."""
    try:
        with path.open("rb") as file:
            if tail is not None:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    # Other characters than a newline also end a line for str.splitlines.
    lines = text.removesuffix("\n").split("\n") if text else []
    if tail is None:
        return lines
    first = max(0, len(lines) - tail)
    return lines[first:]


def _stopped(status: Status, files: RunFiles) -> Status:
    """Return the status of an unfinished job after the end of its run's process."""
    ended = _last_write(files)
    spent: Mapping[str, float] = status.account.seconds
    if ended is not None:
        spent = seconds_until(status, ended)
    whole = {activity: round(seconds) for activity, seconds in spent.items()}
    return replace(
        status,
        phase="Stopped",
        reason="Stopped",
        message="the process of the run has ended before the job",
        completion_time=ended,
        account=Account(seconds=whole),
        pods=replace(status.pods, active=0, ready=0),
    )


def _last_write(files: RunFiles) -> datetime | None:
    """Return the time of a run's last write to its status or its metrics."""
    times = []
    for path in (files.status, files.metrics):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    if not times:
        return None
    return datetime.fromtimestamp(max(times), UTC)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
