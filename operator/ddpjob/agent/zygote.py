"""Import torch once, and fork torchrun and the workers of each attempt.

A stand-in (`launch`) connects for each process, sends what to start, and gets two numbers: that of
the process, and its exit code.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import warnings
from contextlib import suppress
from typing import Any, NamedTuple

from . import torchrun, worker
from .files import read_file

# A request that is not whole after so many seconds is dropped.
REQUEST_SECONDS = 10.0

# Seconds between two looks at the stand-ins, whether one was stopped.
LOOK_SECONDS = 1.0


def main(arguments: list[str]) -> None:
    """Serve the socket with this descriptor. Only a fork returns from `serve`."""
    surroundings = worker.Surroundings.of_this_process()
    request = Zygote(socket.socket(fileno=int(arguments[0]))).serve()
    set_process_title([sys.executable, *request["arguments"]])
    if request["kind"] == "torchrun":
        torchrun.main(request["arguments"])
    else:
        worker.main(request["arguments"], surroundings)


class Child(NamedTuple):
    """A forked process: its number, its descriptor, and its stand-in with its connection."""

    process: int
    descriptor: int
    stand_in: int
    connection: socket.socket


class Zygote:
    """The process that has imported torch. It starts no thread, and never touches a device."""

    def __init__(self, server: socket.socket) -> None:
        self.server = server
        self.children: list[Child] = []
        self.selector = selectors.DefaultSelector()
        self.selector.register(server, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any]:
        """Fork a process for each request, and return the request in it."""
        # Without this call, as on an old kernel, there is no zygote: stand-ins are refused.
        os.close(os.pidfd_open(os.getpid()))
        # A third of the time of these imports would be spent on a search for garbage.
        gc.disable()
        importlib.import_module("torch.distributed.run")
        is_complete = False
        while True:
            for key, _ in self.selector.select(LOOK_SECONDS):
                if key.data:
                    self.end(key.data, is_killed=key.fileobj is key.data.connection)
                else:
                    request = self.accept()
                    if request:
                        return request
            self.stop_as_stand_ins()
            if not is_complete and self.children:
                # DDP and optimizers import this. While torchrun meets its peers, there is time.
                importlib.import_module("torch._dynamo")
                gc.enable()
                is_complete = True

    def accept(self) -> dict[str, Any] | None:
        """Fork a process. Return its request in it, and None in the zygote."""
        connection = self.server.accept()[0]
        request, descriptors = receive(connection)
        process = fork() if request else None
        if process == 0:
            self.close(connection)
            prepare(request, descriptors)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        if process:
            stand_in = request["process"]
            child = Child(process, os.pidfd_open(process), stand_in, connection)
            self.children.append(child)
            self.selector.register(child.descriptor, selectors.EVENT_READ, child)
            self.selector.register(connection, selectors.EVENT_READ, child)
            answer(connection, process)
        else:
            connection.close()
        return None

    def end(self, child: Child, is_killed: bool) -> None:
        """Collect a process that has ended, or end the one whose stand-in has ended."""
        if child not in self.children:
            return
        if is_killed:
            for kill in (os.kill, os.killpg):
                # Its group exists once it has called setsid.
                with suppress(ProcessLookupError):
                    kill(child.process, signal.SIGKILL)
        status = os.waitpid(child.process, 0)[1]
        answer(child.connection, os.waitstatus_to_exitcode(status))
        self.children.remove(child)
        self.selector.unregister(child.descriptor)
        self.selector.unregister(child.connection)
        os.close(child.descriptor)
        child.connection.close()

    def stop_as_stand_ins(self) -> None:
        """Stop each process whose stand-in was stopped. The stand-in itself lets it continue."""
        for child in self.children:
            state = read_file(f"/proc/{child.stand_in}/stat").rpartition(b")")[2].split()[:1]
            if state == [b"T"]:
                os.kill(child.process, signal.SIGSTOP)

    def close(self, connection: socket.socket) -> None:
        """Close what a forked process must not keep."""
        self.selector.close()
        self.server.close()
        connection.close()
        for child in self.children:
            os.close(child.descriptor)
            child.connection.close()


def fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of threads. Those of OpenBLAS end before a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request, and its standard streams. The request is empty if it is not whole."""
    descriptors: list[int] = []
    with suppress(OSError, ValueError):
        connection.settimeout(REQUEST_SECONDS)
        descriptors = socket.recv_fds(connection, 1, 3)[1]
        with connection.makefile("rb") as file:
            request: dict[str, Any] = json.loads(file.readline())
        return request, descriptors
    return {}, descriptors


def answer(connection: socket.socket, number: int) -> None:
    with suppress(OSError):
        connection.sendall(b"%d\n" % number)


def prepare(request: dict[str, Any], descriptors: list[int]) -> None:
    """Give a forked process its session, its streams, its folder and its variables."""
    gc.enable()
    os.setsid()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])


def set_process_title(arguments: list[str]) -> None:
    """Make these arguments the ones that `ps` shows, as far as the zygote's own have room."""
    with suppress(OSError, ValueError, ImportError):
        import ctypes

        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        # arg_start and arg_end: fields 48 and 49 of proc(5). The third one follows the name.
        start, end = int(fields[45]), int(fields[46])
        title = b"\0".join(os.fsencode(argument) for argument in arguments) + b"\0"
        text = title[: end - start - 1].ljust(end - start - 1) + b"\0"
        ctypes.memmove(start, text, len(text))
