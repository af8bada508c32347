"""The files of a run: one folder for each job below the folder of all runs."""

import contextlib
import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ddpjob.local.config_maps import ConfigMaps

# Files and folders replaced by a new run of a job. The claims stay, as they do in a cluster.
REPLACED = ("pods", "logs", "metrics.jsonl", "status.yaml", "job.yaml")

# The process of a run holds a lock on this file. The file contains its process ID.
LOCK = ".lock"

# How often a run tries to lock it, and the seconds between two tries.
LOCK_TRIES, LOCK_SECONDS = 5, 0.02


class RunFolderError(ValueError):
    """The folder of the runs cannot be written. The message says what to do."""


@dataclass(frozen=True)
class RunFiles:
    """The paths of the files of a run, and the sources of its volumes.

    `folder` is the run's own. `claims` are the user's folders for claims, by claim name.
    `config_maps` are the ConfigMaps of the manifest. `cwd` is the working directory of processes if
    the job has none; None means the directory of this program.
    """

    folder: Path
    claims: Mapping[str, Path] = field(default_factory=dict)
    config_maps: ConfigMaps = field(default_factory=dict)
    cwd: Path | None = None

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def status(self) -> Path:
        return self.folder / "status.yaml"

    @property
    def manifest(self) -> Path:
        return self.folder / "job.yaml"

    def log(self, pod: str) -> Path:
        return self.logs / f"{pod}.log"

    def pod(self, name: str) -> Path:
        return self.folder / "pods" / name

    def claim(self, name: str) -> Path:
        return self.claims.get(name, self.folder / "claims" / name)


def write_whole(path: Path, text: str) -> None:
    """Write a file so another program can never read a part of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


@contextlib.contextmanager
def run_folder(parent: Path, job: str) -> Iterator[Path]:
    """Lock and clear the folder of a run, and yield it.

    It is `parent/job`, or `parent/job.2` and so on if other runs of the job hold the folders before
    it. The name of a job has no dot, so no two jobs share a folder. Raises RunFolderError if the
    folder cannot be written.
    """
    with contextlib.ExitStack() as held:
        try:
            folder = _lock_free_folder(parent, job, held)
            _clear(folder)
        except OSError as error:
            raise RunFolderError(
                f"cannot write {error.filename}: {error.strerror}; choose another folder with "
                "--runs"
            ) from error
        yield folder


def _lock_free_folder(parent: Path, job: str, held: contextlib.ExitStack) -> Path:
    """Return the first folder not held by another run, locked until `held` is closed."""
    for number in itertools.count(1):
        folder = parent / (job if number == 1 else f"{job}.{number}")
        folder.mkdir(parents=True, exist_ok=True)
        # The kernel releases the lock when this process ends, however it ends.
        lock = held.enter_context((folder / LOCK).open("a"))
        if _can_lock(lock):
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            return folder
    raise AssertionError("itertools.count() does not end")


def _can_lock(lock: IO[str]) -> bool:
    """Lock a file, and return True, unless another run holds it.

    A look at the run (`running_process`) holds it for a moment, too.
    """
    for _ in range(LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(LOCK_SECONDS)
    return False


def running_process(folder: Path) -> int | None:
    """Return the process of the run in a folder, or None if no run holds the folder."""
    try:
        with (folder / LOCK).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = lock.read().strip()
                return int(text) if text.isdecimal() else None
    except OSError:
        pass
    return None


def _clear(folder: Path) -> None:
    for name in REPLACED:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    (folder / "logs").mkdir()
