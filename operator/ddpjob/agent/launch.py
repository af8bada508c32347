"""Start torchrun or a worker: as a fork of the zygote if the pod has one, else in this process.

With a zygote, this process is a stand-in, where torchrun or a worker is expected: it passes signals
on, and ends as the fork ends. If it ends first, the zygote kills the fork.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

from . import FOLDER, HEADER, PIPE, PYTHON, SOCKET

# The zygote looks after SIGKILL and SIGSTOP, which have no handlers.
PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")


def main(arguments: list[str]) -> NoReturn:
    """Start `torchrun ARGS...` or `worker ARGS...`."""
    kind, *rest = arguments
    stand_in(kind, rest)
    if kind == "torchrun":
        become_torchrun(rest)
    become_worker(rest)


def become_torchrun(arguments: list[str]) -> NoReturn:
    folder = os.path.dirname(os.path.abspath(__file__))
    os.execv(sys.executable, [sys.executable, folder, "torchrun", *arguments])


def become_worker(arguments: list[str]) -> NoReturn:
    python = take_variables()
    os.execvp(python, [python, *arguments])


def take_variables() -> str:
    """Make this process the worker of its rank, and return the Python that is to run it."""
    python = os.environ.pop(PYTHON)
    os.environ["PYTHON_EXEC"] = python
    if python == sys.executable:
        del os.environ["PYTHON_EXEC"]
    folder = os.environ.pop(FOLDER)
    # Without an agent that reads, the output stays where torchrun's is.
    with suppress(OSError):
        path = os.path.join(folder, PIPE.format(local_rank=os.environ["LOCAL_RANK"]))
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(pipe, True)
        header = {"rank": int(os.environ["RANK"]), "pid": os.getpid()}
        os.write(pipe, HEADER + json.dumps(header).encode() + b"\n")
        os.dup2(pipe, 1)
        os.dup2(pipe, 2)
        os.close(pipe)
    return python


def stand_in(kind: str, arguments: list[str]) -> None:
    """Let the zygote start a process, and end as it ends. Return if there is no zygote."""
    with socket.socket(socket.AF_UNIX) as zygote, suppress(OSError, ValueError):
        folder = os.open(os.environ[FOLDER], os.O_RDONLY)
        # The path of the folder may be too long for an address.
        zygote.connect(f"/proc/self/fd/{folder}/{SOCKET}")
        os.close(folder)
        request = {"kind": kind, "arguments": arguments, "process": os.getpid()}
        socket.send_fds(zygote, [b"\0"], [0, 1, 2])
        zygote.sendall(
            json.dumps({**request, "env": dict(os.environ), "cwd": os.getcwd()}).encode() + b"\n"
        )
        answers = zygote.makefile("rb")
        process = int(answers.readline())
        for name in PASSED_ON:
            signal.signal(getattr(signal, name), lambda number, _: os.kill(process, number))
        # Without an answer, the zygote has ended, and with it what it has started.
        end_as(int(answers.readline() or -signal.SIGKILL))


def end_as(exit_code: int) -> NoReturn:
    """End as another process has ended: by a signal if the number is negative."""
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)
