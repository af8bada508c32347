"""Start torchrun or a worker: as a fork of the zygote if the pod has one, else in this process.

With a zygote, this process is a stand-in for torchrun or for the worker: it passes signals on, and
ends as the fork ends. If it ends first, the zygote kills the fork.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

from . import FOLDER, HEADER, NOTE, PIPE, PYTHON, STAND_IN
from .files import socket_path

# SIGKILL has no handler: the zygote kills the fork of an ended stand-in.
PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")


def main(arguments: list[str]) -> NoReturn:
    """Start `torchrun ARGS...` or `worker ARGS...`."""
    kind, *rest = arguments
    run_by_zygote(kind, rest)
    if kind == "torchrun":
        become_torchrun(rest)
    become_worker(rest)


def become_torchrun(arguments: list[str]) -> NoReturn:
    folder = os.path.dirname(os.path.abspath(__file__))
    os.execv(sys.executable, [sys.executable, folder, "torchrun", *arguments])


def become_worker(arguments: list[str]) -> NoReturn:
    python, _ = become_rank()
    os.execvp(python, [python, *arguments])


def become_rank() -> tuple[str, str]:
    """Restore the variables of the worker, and open the pipe of its rank.

    Return its Python, and the path of the file for the exception at its end.
    """
    python = os.environ.pop(PYTHON)
    os.environ["PYTHON_EXEC"] = python
    if python == sys.executable:
        del os.environ["PYTHON_EXEC"]
    folder = os.environ.pop(FOLDER)
    process = int(os.environ.pop(STAND_IN, os.getpid()))
    index = index_on_node()
    # Without a reader, the output stays with that of torchrun.
    with suppress(OSError):
        pipe = os.open(os.path.join(folder, PIPE.format(index=index)), os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(pipe, True)
        header = {"rank": int(os.environ["RANK"]), "pid": os.getpid(), "process": process}
        os.write(pipe, HEADER + json.dumps(header).encode() + b"\n")
        os.dup2(pipe, 1)
        os.dup2(pipe, 2)
        os.close(pipe)
    return python, os.path.join(folder, NOTE.format(index=index))


def index_on_node() -> int:
    """Return the number of this rank on its node. torchrun can give all ranks the LOCAL_RANK 0."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    return int(os.environ["RANK"]) % size if size else int(os.environ["LOCAL_RANK"])


def run_by_zygote(kind: str, arguments: list[str]) -> None:
    """Let the zygote start a process, and end as it ends. Return if there is no zygote.

    The fork runs nothing until this process sends it a byte through a pipe. So nothing runs after
    the end of the stand-in, and no signal is lost.
    """
    waits, go = os.pipe()
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    with socket.socket(socket.AF_UNIX) as zygote:
        try:
            request(zygote, kind, arguments, waits)
            answer = read_line(zygote, woken)
        except OSError:
            return
        if not answer:
            reason = "the zygote has ended, has other cores, or has threads"
            print(f"ddpjob agent: no fast start of this {kind}: {reason}", file=sys.stderr)
            return
        process = int(answer)
        # torchrun signals the group of a worker. It includes processes of the script.
        send = os.killpg if kind == "worker" else os.kill

        def pass_on(number: int, _: object) -> None:
            try:
                send(process, number)
            except ProcessLookupError:
                # The fork has no group of its own yet, or has ended.
                with suppress(ProcessLookupError):
                    os.kill(process, number)

        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        for name in PASSED_ON:
            signal.signal(getattr(signal, name), pass_on)
        with suppress(BrokenPipeError):
            os.write(go, b"!")
        try:
            end_as(int(read_line(zygote, woken)))
        except (OSError, ValueError):
            # The zygote has ended. The agent ends its forks.
            end_as(-signal.SIGKILL)


def read_line(zygote: socket.socket, woken: socket.socket) -> bytes:
    """Return a line of the zygote, or nothing if it has ended.

    A signal just before a system call would not interrupt it, and the handler would wait for the
    end of the call. A signal also makes `woken` readable.
    """
    line = b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([zygote, woken], [], [])
        if woken in readable:
            woken.recv(4096)
        if zygote in readable:
            byte = zygote.recv(1)
            if not byte:
                return b""
            line += byte
    return line


def request(zygote: socket.socket, kind: str, arguments: list[str], waits: int) -> None:
    """Send a request, with the standard streams and the pipe."""
    folder = os.open(os.environ[FOLDER], os.O_RDONLY)
    zygote.connect(socket_path(folder))
    os.close(folder)
    fields = {
        "kind": kind,
        "arguments": arguments,
        "process": os.getpid(),
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "affinity": sorted(os.sched_getaffinity(0)),
    }
    socket.send_fds(zygote, [b"\0"], [0, 1, 2, waits])
    os.close(waits)
    zygote.sendall(json.dumps(fields).encode() + b"\n")


def end_as(exit_code: int) -> NoReturn:
    """End as another process has ended: by a signal if the number is negative."""
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)
