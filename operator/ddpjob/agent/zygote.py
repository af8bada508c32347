"""Import torch once, and fork torchrun and the workers of each attempt.

For each process, a stand-in (`launch`) connects and sends a request. It gets two numbers: that of
the process, and later its exit code.
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
import time
import warnings
from contextlib import suppress
from typing import Any

from . import NOTICE, STAND_IN, torchrun, worker

# A request is dropped if it is incomplete after so many seconds.
REQUEST_SECONDS = 10.0

# Seconds until a joined thread disappears from /proc, at most.
THREAD_SECONDS = 0.1

# Seconds between two looks at the agent: it may have been killed.
LOOK_SECONDS = 1.0

Request = dict[str, Any]


def main(args: list[str]) -> None:
    """Serve the socket with this descriptor. Only a fork returns from `serve`."""
    surroundings = worker.Surroundings.of_this_process()
    server = socket.socket(fileno=int(args[0]))
    request = Zygote(server).serve()
    if request["kind"] == "torchrun":
        torchrun.main(request["arguments"])
    else:
        worker.main(request["arguments"], surroundings)


class Zygote:
    """The process that has imported torch. It starts no thread, and never touches a device."""

    def __init__(self, server: socket.socket) -> None:
        self.server = server
        self.parent = os.getppid()
        # The connection of the stand-in, by the number of the forked process.
        self.children: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(server, selectors.EVENT_READ)
        # The end of a child wakes the selector.
        self.woken, self.wake = socket.socketpair()
        for end in (self.woken, self.wake):
            end.setblocking(False)
        self.selector.register(self.woken, selectors.EVENT_READ)

    def serve(self) -> Request:
        """Fork a process for each request, and return the request in it."""
        # A search for garbage would take a third of the time of these imports.
        gc.disable()
        try:
            importlib.import_module("torch.distributed.run")
        except Exception as error:
            # The stand-ins are refused. A new Python shows the traceback.
            sys.exit(f"{NOTICE}no fast start: {type(error).__name__}: {error}")
        # A search for garbage at the end of each fork would copy the memory of all these objects:
        # 0.6 s of CPU time.
        gc.freeze()
        signal.set_wakeup_fd(self.wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        is_complete = False
        while self.children or os.getppid() == self.parent:
            for key, _ in self.selector.select(LOOK_SECONDS):
                if key.data:
                    self.kill(key.data)
                elif key.fileobj is self.server:
                    request = self.accept()
                    if request:
                        return request
            self.collect()
            if not is_complete and self.children:
                # DDP and optimizers import this. While torchrun meets its peers, there is time.
                with suppress(Exception):
                    importlib.import_module("torch._dynamo")
                gc.freeze()
                gc.enable()
                is_complete = True
        # The agent was killed.
        os._exit(0)

    def accept(self) -> Request | None:
        """Fork a process. Return its request in it, and None in the zygote."""
        try:
            connection, _ = self.server.accept()
        except OSError:
            return None
        request, descriptors = receive(connection)
        process = fork() if request and can_serve(request) else None
        if process == 0:
            self.close_in_fork(connection)
            prepare(request, descriptors)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        if process is None:
            # The stand-in starts a new Python.
            connection.close()
            return None
        self.children[process] = connection
        self.selector.register(connection, selectors.EVENT_READ, process)
        answer(connection, process)
        return None

    def kill(self, process: int) -> None:
        """Kill a process whose stand-in has ended: a stand-in sends nothing after its request."""
        if process in self.children:
            self.selector.unregister(self.children[process])
            for kill in (os.kill, os.killpg):
                # Its group exists once it has called setsid.
                with suppress(OSError):
                    kill(process, signal.SIGKILL)

    def collect(self) -> None:
        """Collect the ended processes, and tell their stand-ins."""
        with suppress(BlockingIOError):
            self.woken.recv(4096)
        for process, connection in list(self.children.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                answer(connection, os.waitstatus_to_exitcode(status))
                del self.children[process]
                with suppress(KeyError):
                    self.selector.unregister(connection)
                connection.close()

    def close_in_fork(self, connection: socket.socket) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        others = self.children.values()
        for each in (self.server, self.woken, self.wake, connection, *others):
            each.close()


def can_serve(request: Request) -> bool:
    """Return True if a fork can replace a new process of the stand-in.

    It needs the cores of the stand-in. If the zygote has several threads, a fork lacks the threads
    of a plug-in, and waits for ever for those of OpenMP.
    """
    return request["affinity"] == sorted(os.sched_getaffinity(0)) and has_one_thread()


def has_one_thread() -> bool:
    """Return True if a fork would lack none of the threads of Python and of libraries.

    OpenBLAS ends its own before a fork, and starts them again when it needs them.
    """
    if count_threads() > 1:
        process = fork()
        if process == 0:
            os._exit(0)
        if process:
            os.waitpid(process, 0)
        deadline = time.monotonic() + THREAD_SECONDS
        while count_threads() > 1 and time.monotonic() < deadline:
            time.sleep(0.001)
    return count_threads() == 1


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def fork() -> int | None:
    """Fork this process. Return None if the kernel allows no more processes."""
    with warnings.catch_warnings(), suppress(OSError):
        # Python 3.12 warns of threads. Those of OpenBLAS end before a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
    return None


def receive(connection: socket.socket) -> tuple[Request, list[int]]:
    """Return a request, and its descriptors. The request is empty if it is incomplete."""
    descriptors: list[int] = []
    with suppress(OSError, ValueError):
        connection.settimeout(REQUEST_SECONDS)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 4)
        with connection.makefile("rb") as file:
            request: Request = json.loads(file.readline())
        return request, descriptors
    return {}, descriptors


def answer(connection: socket.socket, number: int) -> None:
    with suppress(OSError):
        connection.sendall(b"%d\n" % number)


def prepare(request: Request, descriptors: list[int]) -> None:
    """Give a forked process its session, its streams, its folder and its variables."""
    os.setsid()
    *streams, waits = descriptors
    if not os.read(waits, 1):
        # The stand-in has ended.
        os._exit(1)
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
    for descriptor in descriptors:
        os.close(descriptor)
    gc.enable()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if request["kind"] == "worker":
        os.environ[STAND_IN] = str(request["process"])
