"""Starts the trainer as its users do: as one process, under torchrun, or as bare ranks.

Except with `new_python`, the processes are forks of a server with torch imported.
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from fork_server import ForkServer

from ddpjob.local.ports import free_port

DEADLINE = 240.0  # seconds; a test reaches it only if a process hangs
# Prefixes of variables that a launcher or a test may have set.
_OURS = (
    "MALLOC_",
    "GLIBC_",
    "SM_",
    # torch sets it in this process.
    "TORCHINDUCTOR_CACHE_DIR",
    "SLURM_",
    "DDP_",
    "TORCHELASTIC_",
    "PET_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
)


def environment(**extra: object) -> dict[str, str]:
    """Return the environment without variables of launchers, with one thread and `extra`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return clean | {"OMP_NUM_THREADS": "1", **{name: str(value) for name, value in extra.items()}}


@cache
def fork_server() -> ForkServer:
    """Return the server of this process. It starts for the first test that needs it."""
    server = ForkServer(environment())
    atexit.register(server.close)
    return server


def python() -> Path:
    """Return the program to start a fork in place of a new Python."""
    return fork_server().python


class Run:
    """A started command: its events so far, and its end."""

    def __init__(self, command: Sequence[object], variables: Mapping[str, str]) -> None:
        self.events: list[dict] = []
        self.stray: list[str] = []  # other lines on stdout
        self._stderr: deque[str] = deque(maxlen=400)
        self._deadline = time.monotonic() + DEADLINE
        self._changed = threading.Condition()
        # Other ranks of the same job: they end with this one.
        self.peers: list[Run] = []
        self.process = subprocess.Popen(
            [str(word) for word in command],
            env=dict(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._read_events, daemon=True),
            threading.Thread(target=lambda: self._stderr.extend(self.process.stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_events(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                try:
                    self.events.append(json.loads(line))
                except ValueError:
                    self.stray.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def stderr(self) -> str:
        return "".join(self._stderr)

    def of(self, event: str) -> list[dict]:
        return [entry for entry in self.events if entry["event"] == event]

    def wait_for(self, event: str, step: int = 0) -> dict:
        """Wait for the first such event at or after `step`. Fail if the run ends without it."""
        with self._changed:
            while True:
                for entry in self.of(event):
                    if entry.get("step", 0) >= step:
                        return entry
                left = self._deadline - time.monotonic()
                assert left > 0, f"no event {event!r} in time: {self.events}\n{self.stderr}"
                assert self._readers[0].is_alive(), (
                    f"ended without event {event!r}: {self.events}\n{self.stderr}"
                )
                self._changed.wait(min(left, 1.0))

    def finish(self) -> int:
        """Wait for the end and return the exit code."""
        try:
            code = self.process.wait(max(0.1, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"did not end in time: {self.events[-3:]}\n{self.stderr}"
            ) from None
        for reader in self._readers:
            reader.join(10)
        for peer in self.peers:
            code = peer.finish() or code
        return code

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to the process and its children, as if the machine were lost."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        # A fork ends after its stand-in. Then its output ends.
        for reader in self._readers:
            reader.join(10)
        for peer in self.peers:
            peer.kill()


# Starts a program of Python: `alone` or `new_python`.
Start = Callable[..., "Run"]


def alone(*arguments: object, **variables: object) -> Run:
    """Start `python …` as one process."""
    # torchrun starts its workers with PYTHON_EXEC.
    return Run([python(), *arguments], environment(PYTHON_EXEC=python(), **variables))


def new_python(*arguments: object, **variables: object) -> Run:
    """Start `python …` as a process of its own, not as a fork."""
    return Run([sys.executable, *arguments], environment(**variables))


def new_python_of(rank: int, folder: Path) -> Path:
    """Return a program to start a new Python for this rank, and forks for the others."""
    program = folder / "python"
    program.write_text(
        f"""#!/bin/sh
if [ "$RANK" = {rank} ]; then exec {sys.executable} "$@"; fi
exec {python()} "$@"
"""
    )
    program.chmod(0o755)
    return program


def torchrun(
    *arguments: object, processes: int = 2, start: Start = alone, **variables: object
) -> Run:
    """Start `torchrun --standalone --nproc-per-node N …`."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes)
    return start(*launcher, *arguments, **variables)


def ranks(
    *arguments: object,
    processes: int = 2,
    start: Start = alone,
    new: int | None = None,
    **variables: object,
) -> list[Run]:
    """Start the ranks without an agent. This is faster. Each rank can be killed on its own.

    The rank `new` is a new Python.
    """
    return [
        (new_python if rank == new else start)(*arguments, **own, **variables)
        for rank, own in enumerate(variables_of_ranks(processes))
    ]


def variables_of_ranks(processes: int) -> list[dict[str, str]]:
    """Return the variables of each rank of a group on this machine."""
    shared = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = map(str, range(processes))
    return [{"RANK": rank, "LOCAL_RANK": rank, **shared} for rank in ranks]


def group(*arguments: object, processes: int = 2, **variables: object) -> Run:
    """Start the ranks without an agent, as one run with the events of rank 0."""
    first, *others = ranks(*arguments, processes=processes, **variables)
    first.peers += others
    return first


def finish(runs: Sequence[Run]) -> list[int]:
    """Wait for the end of all runs and return their exit codes."""
    return [run.finish() for run in runs]


TRAINER = ("-m", "ddp_trainer")


def newest(folder: Path) -> Path:
    """Return the newest checkpoint in `folder`."""
    return max(folder.glob("step-*.pt"))
