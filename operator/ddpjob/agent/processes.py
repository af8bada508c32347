"""Start the programs of this folder, and find the processes below this one."""

from __future__ import annotations

import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .files import read_file, socket_path, stat_fields
from .output import Output, log


def open_standard_streams() -> None:
    """Open closed standard streams. Otherwise a pipe could take the place of one."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(descriptor)


def become_reaper() -> None:
    """Collect orphaned processes, also outside a container."""
    if os.getpid() != 1 and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def program(name: str, *arguments: str, flags: str = "-IS") -> list[str]:
    """Return the command for another program of this folder."""
    folder = os.path.dirname(os.path.abspath(__file__))
    return [sys.executable, flags, folder, name, *arguments]


def start(
    command: Sequence[str], environment: Mapping[str, str], output: Output
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, with its output as a stream of `output`."""
    read_end, write_end = os.pipe()
    output.add(read_end)
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    finally:
        os.close(write_end)


def exit_status(code: int) -> int:
    """Return an exit code as a shell does: 128 plus the number for a signal."""
    return code if code >= 0 else 128 - code


def write_wrapper(folder: Path) -> Path:
    """Write the program for torchrun to start in place of Python, and return its path."""
    wrapper = folder / "worker"
    words = shlex.join(program("launch", "worker"))
    wrapper.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


def start_zygote(folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
    """Start a zygote with its socket in `folder`. Return None if this is not possible."""
    if sys.platform != "linux":
        return None
    try:
        return listening_zygote(folder, environment)
    except OSError as error:
        # For example, a file system without sockets.
        log(f"no fast start: {error}")
        return None


def listening_zygote(folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with socket.socket(socket.AF_UNIX) as server:
        descriptor = os.open(folder, os.O_RDONLY)
        server.bind(socket_path(descriptor))
        os.close(descriptor)
        # Listen before torchrun starts: it looks for the socket.
        server.listen()
        return subprocess.Popen(
            # Like torchrun, it starts Python without a buffer for the output.
            program("zygote", str(server.fileno()), flags="-u"),
            env=environment,
            pass_fds=[server.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def descendants() -> list[int]:
    """Return the numbers of all processes below this one.

    Ended processes count until they are collected: their threads may still run, and hold a device.
    """
    children: dict[int, list[int]] = {}
    for process, parent in (parents() if os.path.isdir("/proc/self") else parents_by_ps()).items():
        children.setdefault(parent, []).append(process)
    found = [os.getpid()]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def parents() -> dict[int, int]:
    """Return the parent of each process."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        fields = stat_fields(name)
        if fields:
            found[int(name)] = int(fields[1])
    return found


def parents_by_ps() -> dict[int, int]:
    """Return the same on a machine without /proc, such as a laptop with macOS."""
    with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE) as ps:
        pairs = [line.split() for line in ps.communicate()[0].splitlines()]
    return {int(process): int(parent) for process, parent in pairs if int(process) != ps.pid}


def is_worker_of_torchrun(process: int) -> bool:
    """Return True if a process has torchrun's variables, also one of another language."""
    return b"TORCHELASTIC_RUN_ID=" in read_file(f"/proc/{process}/environ")


def kill(processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


def stop(processes: Iterable[int]) -> None:
    """Let processes do nothing more. Their connections stay open."""
    for process in processes:
        with suppress(OSError):
            os.kill(process, signal.SIGSTOP)


def abort(workers: Iterable[int], others: Iterable[int]) -> None:
    """Let workers write their stacks, and abort.

    The other processes are stopped first: torchrun would end all workers when the first one aborts.
    A stopped worker aborts only once it continues.
    """
    stop(others)
    for process in workers:
        # With a limit of 1, the kernel writes no core, not even into a pipe.
        with suppress(OSError, ValueError, AttributeError):
            resource.prlimit(process, resource.RLIMIT_CORE, (1, 1))
        for number in (signal.SIGABRT, signal.SIGCONT):
            with suppress(OSError):
                os.kill(process, number)
