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

from . import PROGRAMS
from .files import read_file, socket_path, stat_fields
from .options import Options
from .output import Output, log

Process = subprocess.Popen[bytes]


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


def program(name: str, *args: str, flags: str = "-IS") -> list[str]:
    """Return the command for another program of this folder."""
    return [sys.executable, flags, PROGRAMS, name, *args]


def torchrun_command(options: Options, flags: list[str]) -> list[str]:
    return [
        *(options.command or program("launch", "torchrun")),
        *options.flags,
        *flags,
        *options.args,
    ]


def start(
    command: Sequence[str],
    env: Mapping[str, str],
    output: Output,
) -> Process:
    """Start a program in a session of its own, with its output as a stream of `output`."""
    read_end, write_end = os.pipe()
    output.add(read_end)
    try:
        return subprocess.Popen(
            command,
            env=env,
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
    """Write the program started by torchrun in place of Python. Return its path."""
    wrapper = folder / "worker"
    words = shlex.join(program("launch", "worker"))
    wrapper.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


def start_zygote(folder: Path, env: dict[str, str]) -> Process | None:
    """Start a zygote with its socket in `folder`. Return None if this is not possible."""
    if sys.platform != "linux":
        return None
    try:
        with socket.socket(socket.AF_UNIX) as server:
            descriptor = os.open(folder, os.O_RDONLY)
            server.bind(socket_path(descriptor))
            os.close(descriptor)
            # Listen before torchrun starts: it looks for the socket.
            server.listen()
            return subprocess.Popen(
                # Like torchrun, it starts Python without a buffer for the output.
                program("zygote", str(server.fileno()), flags="-u"),
                env=env,
                pass_fds=[server.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        # For example, a file system without sockets.
        log(f"no fast start: {error}")
        return None


def descendants() -> list[int]:
    """Return the numbers of all processes below this one.

    Ended processes count until they are collected: their threads may still run, and hold a device.
    """
    children: dict[int, list[int]] = {}
    has_proc = os.path.isdir("/proc/self")
    parent_of = parents() if has_proc else parents_by_ps()
    for process, parent in parent_of.items():
        children.setdefault(parent, []).append(process)
    found = [os.getpid()]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def parents() -> dict[int, int]:
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        fields = stat_fields(name)
        if fields:
            found[int(name)] = int(fields[1])
    return found


def parents_by_ps() -> dict[int, int]:
    """Return the same without /proc, as on macOS."""
    command = ["ps", "-A", "-o", "pid=,ppid="]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as ps:
        table, _ = ps.communicate()
    found = {}
    for line in table.splitlines():
        process, parent = map(int, line.split())
        found[process] = parent
    found.pop(ps.pid, None)
    return found


def is_worker_of_torchrun(process: int) -> bool:
    """Return True if a process has torchrun's variables, also one of another language."""
    return b"TORCHELASTIC_RUN_ID=" in read_file(f"/proc/{process}/environ")


def send(number: int, processes: Iterable[int]) -> None:
    """Send a signal to processes. Some may have ended."""
    for process in processes:
        with suppress(OSError):
            os.kill(process, number)


def stop(processes: Iterable[int]) -> None:
    """Let processes do nothing more. Their connections stay open."""
    send(signal.SIGSTOP, processes)


def abort(workers: list[int | None]) -> None:
    """Let workers write their stacks, and abort.

    The other processes are stopped first: torchrun would end all workers when the first one aborts.
    A stopped worker aborts only once it continues.
    """
    processes = set(descendants())
    stop(processes.difference(workers))
    for process in processes.intersection(workers):
        # With a limit of 1, the kernel writes no core, not even into a pipe.
        with suppress(OSError, ValueError, AttributeError):
            resource.prlimit(process, resource.RLIMIT_CORE, (1, 1))
        for number in (signal.SIGABRT, signal.SIGCONT):
            send(number, [process])
