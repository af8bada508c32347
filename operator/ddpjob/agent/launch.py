"""Start torchrun or a worker: as a fork of the zygote if the pod has one, else in this process.

With a zygote, this process is a stand-in for torchrun or for the worker: it passes signals on, and
ends as the fork ends. If it ends first, the zygote kills the fork.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

from . import FOLDER, HEADER, NOTE, NOTICE, PIPE, PROGRAMS, PYTHON, STAND_IN
from .files import socket_path

# After SIGKILL the zygote kills the fork.
PASSED_ON = (
    "SIGTERM",
    "SIGINT",
    "SIGHUP",
    "SIGQUIT",
    "SIGUSR1",
    "SIGUSR2",
    "SIGCONT",
)


def main(args: list[str]) -> NoReturn:
    """Start `torchrun ARGS...` or `worker ARGS...`."""
    kind, *rest = args
    run_by_zygote(kind, rest)
    if kind == "worker":
        python, _ = become_rank()
        os.execvp(python, [python, *rest])
    os.execv(sys.executable, [sys.executable, PROGRAMS, "torchrun", *rest])


def become_rank() -> tuple[str, str]:
    """Restore the variables of the worker, and open the pipe of its rank.

    Return its Python, and the path of the file for the exception at its end.
    """
    python = os.environ.pop(PYTHON)
    os.environ.pop("PYTHON_EXEC", None)
    if python != sys.executable:
        os.environ["PYTHON_EXEC"] = python
    folder = os.environ.pop(FOLDER)
    process = int(os.environ.pop(STAND_IN, os.getpid()))
    index = index_on_node()
    # Without a reader, the output stays with that of torchrun.
    with suppress(OSError):
        path = os.path.join(folder, PIPE.format(index=index))
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(pipe, True)
        header = {
            "rank": int(os.environ["RANK"]),
            "pid": os.getpid(),
            "process": process,
        }
        text = json.dumps(header).encode()
        os.write(pipe, HEADER + text + b"\n")
        os.dup2(pipe, 1)
        os.dup2(pipe, 2)
        os.close(pipe)
    note = os.path.join(folder, NOTE.format(index=index))
    return python, note


def index_on_node() -> int:
    """Return the number of this rank on its node. torchrun can give all ranks the LOCAL_RANK 0."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if not size:
        return int(os.environ["LOCAL_RANK"])
    return int(os.environ["RANK"]) % size


def run_by_zygote(kind: str, args: list[str]) -> None:
    """Let the zygote start a process, and end as it ends. Return if there is no zygote.

    The fork waits for a byte of this process in a pipe. So it does not run after the end of the
    stand-in, and no signal is lost.
    """
    waits, go = os.pipe()
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    with socket.socket(socket.AF_UNIX) as zygote:
        try:
            request(zygote, kind, args, waits)
            answer = read_line(zygote, woken)
        except OSError:
            return
        if not answer:
            reason = "the zygote has ended, has other cores, or has threads"
            print(f"{NOTICE}no fast start of this {kind}: {reason}", file=sys.stderr)
            return
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        pass_signals_on(kind, int(answer))
        with suppress(BrokenPipeError):
            os.write(go, b"!")
        try:
            end_as(int(read_line(zygote, woken)))
        except (OSError, ValueError):
            # The zygote has ended. The agent ends its forks.
            end_as(-signal.SIGKILL)


def pass_signals_on(kind: str, process: int) -> None:
    # torchrun signals the group of a worker. It includes processes of the script.
    send = os.killpg if kind == "worker" else os.kill

    def pass_on(number: int, _: object) -> None:
        try:
            send(process, number)
        except ProcessLookupError:
            # The fork has no group of its own yet, or has ended.
            with suppress(ProcessLookupError):
                os.kill(process, number)

    for name in PASSED_ON:
        signal.signal(getattr(signal, name), pass_on)


def read_line(zygote: socket.socket, woken: socket.socket) -> bytes:
    """Return a line of the zygote, or nothing if it has ended.

    A signal just before a system call does not interrupt it, but makes `woken` readable.
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


def request(
    zygote: socket.socket,
    kind: str,
    args: list[str],
    waits: int,
) -> None:
    """Send a request, with the standard streams and the pipe."""
    folder = os.open(os.environ[FOLDER], os.O_RDONLY)
    zygote.connect(socket_path(folder))
    os.close(folder)
    fields = {
        "kind": kind,
        "arguments": args,
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
