"""The agent of a DDPJob's pod: start torchrun, end it, and report what happened.

It is process 1 of the container `trainer`. It has no token, and opens no connections:

    operator ── annotation ──▶ file `assignment` in a downward API volume
                                  │ read every 50 ms
    agent ──── starts, ends ──▶ torchrun ───────▶ workers
      ▲  ▲                         │                 │
      │  └──── failures.json ──────┘                 │ one pipe for each rank
      └──────────────────────────────────────────────┘
    agent ──▶ the container's log, its termination message, and numbers on a port

An assignment is one attempt of the job: torchrun's flags and some variables. A newer one ends the
processes of the last one. If processes of this pod failed, the container ends with a report. If
they only lost a peer, the agent waits for the next assignment, for a limited time.

The file has three commands. `run` is the agent. It starts `launch`, which runs torchrun and writes
down which workers failed. torchrun starts `worker` in place of Python: it connects its output to
the agent, and then becomes the worker. The file needs Python 3.9, and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

# Seconds between two looks at the assignment and at the clocks.
POLL = 0.05

# Seconds until the first assignment must be there; until processes must be gone after SIGKILL,
# which takes time if they free a device; and for the stacks of workers after SIGABRT.
ASSIGNMENT_SECONDS, KILL_SECONDS, STACK_SECONDS = 60.0, 30.0, 2.0

# After a pause of so many seconds, such as a frozen machine, heartbeats get their time again.
FROZEN = 1.0

# Bytes of a termination message (the kubelet's limit), of output that is kept for the report, and
# of a line that is kept whole.
MESSAGE, TAIL, LINE = 4096, 16384, 4 << 20

# Limits of a report: characters of an exception, lines of output, characters of each line.
EXCEPTION, LINES, LINE_LENGTH = 500, 12, 160

# The fields of an assignment. `grace` and `wait` are in seconds: for the processes of the last
# attempt to end, and for the next assignment if there is nothing to do. Without `start`, the last
# attempt is ended, and the next one has to wait for pods that are not part of it.
NUMBER = (int, float)
ASSIGNMENT: dict[str, type | tuple[type, ...]] = {
    "attempt": int,
    "start": bool,
    "flags": list,
    "env": dict,
    "ranks": int,
    "grace": NUMBER,
    "wait": NUMBER,
}

# Figures that /metrics takes from lines of JSON, such as those of ddp_trainer.
FIGURES = ("step", "steps", "epoch", "loss", "samples_per_second", "tokens_per_second")

# Variables for `launch` and `worker`, and what begins the first line of a rank's pipe.
FOLDER, PYTHON, HEADER = "DDP_AGENT_FOLDER", "DDP_AGENT_PYTHON", b"DDP_AGENT_WORKER "

# Exit codes of a process that was told to stop, and those that say nothing about the cause without
# an exception.
INTERRUPTED, AMBIGUOUS = (-15, 143), (1, -6)

# Causes, the likeliest first. A follower lost a peer. Unclear: perhaps it is a follower.
CAUSES = ("Failure", "Unclear", "Follower")

# How many requests are answered at a time.
CLIENTS = threading.BoundedSemaphore(32)

# A stack of faulthandler. No thread is the current one if all wait, as in a stopped process; then
# the last one is the main thread.
STACK = re.compile(r"(Current thread|Thread) [^\n]*\n((?:  File [^\n]*\n?)+)")


def read_json(text: bytes) -> dict[str, Any]:
    """Return the JSON object in a text, or an empty one if the text is something else."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}


def read_file(path: str | Path) -> bytes:
    """Return the first MiB of a file, or nothing if it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(1 << 20)
    return b""


def signal_name(exit_code: int) -> str:
    """Return the name of the signal that ended a process, or an empty string."""
    with suppress(ValueError):
        return signal.Signals(-exit_code).name
    return ""


def stack_in(text: str) -> list[str]:
    """Return the frames of the thread that was interrupted, the innermost first."""
    stacks = STACK.findall(text)
    current = [frames for kind, frames in stacks if kind != "Thread"]
    chosen = current or [frames for _, frames in stacks]
    return chosen[-1].splitlines() if chosen else []


def parents() -> dict[int, int]:
    """Return the parent of each process."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        # The parent follows the program's name, which may contain anything, and the state.
        fields = read_file(f"/proc/{name}/stat").rpartition(b")")[2].split()
        if fields:
            found[int(name)] = int(fields[1])
    return found


def parents_by_ps() -> dict[int, int]:
    """Return the same on a machine without /proc, such as a laptop with macOS."""
    with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE) as ps:
        pairs = [line.split() for line in ps.communicate()[0].splitlines()]
    return {int(process): int(parent) for process, parent in pairs if int(process) != ps.pid}


def descendants() -> list[int]:
    """Return the numbers of all processes below this one.

    Those that have ended and are not collected count too: their threads may still run, and hold a
    device.
    """
    children: dict[int, list[int]] = {}
    for process, parent in (parents() if os.path.isdir("/proc/self") else parents_by_ps()).items():
        children.setdefault(parent, []).append(process)
    found = [os.getpid()]
    for process in found:
        found += children.get(process, [])
    return found[1:]


class Stream:
    """The output of torchrun or of a rank. It comes in pieces, and leaves in whole lines.

    `worker` is what the first line of a rank's pipe says: its rank and its process.
    """

    def __init__(self, descriptor: int, local_rank: int | None = None) -> None:
        self.descriptor = descriptor
        self.local_rank = local_rank
        self.worker: dict[str, int] = {}
        self.partial = b""
        self.tail = b""
        self.ended: float | None = None

    def take(self, data: bytes) -> bytes:
        """Return the lines that `data` completes. Empty `data` is the end."""
        self.partial += data
        end = self.partial.rfind(b"\n") + 1
        if not data or len(self.partial) > LINE:
            end = len(self.partial)
        lines, self.partial = self.partial[:end], self.partial[end:]
        if self.local_rank is not None and not self.worker and lines.startswith(HEADER):
            header, _, lines = lines.partition(b"\n")
            found = read_json(header[len(HEADER) :])
            if all(type(found.get(name)) is int for name in ("rank", "pid")):
                self.worker = found
        if not data and lines and not lines.endswith(b"\n"):
            lines += b"\n"
        self.tail = (self.tail + lines)[-TAIL:]
        return lines

    def text(self) -> str:
        return self.tail.decode(errors="replace")


class Agent:
    """The agent of one pod. `options` are described at `run` below."""

    def __init__(self, options: SimpleNamespace) -> None:
        self.options = options
        words = read_json(read_file(options.words)).items()
        self.words = {name: [re.compile(each) for each in patterns] for name, patterns in words}
        self.folder = Path(options.folder)
        # With PYTHONFAULTHANDLER, a worker that gets SIGABRT writes its stack.
        self.environment = {
            "DDP_HEARTBEAT_FILE": str(self.folder / "heartbeat"),
            "DDP_RESULT_FILE": str(self.folder / "result"),
            "PYTHONFAULTHANDLER": "1",
            **os.environ,
        }
        self.selector = selectors.DefaultSelector()
        self.attempt = -1
        # The attempt that must not start yet.
        self.held = -1
        self.torchrun: subprocess.Popen[bytes] | None = None
        self.streams: list[Stream] = []
        self.started = 0.0
        self.last_output = 0.0
        self.thawed = 0.0
        self.report: dict[str, Any] = {
            "cause": "Failure",
            "exception": f"no assignment in {options.assignment}",
        }
        self.exit_code = 1
        self.wait_ends = time.monotonic() + ASSIGNMENT_SECONDS
        self.stop_signal = 0
        # True once a probe has failed in this attempt.
        self.has_refused = False
        self.figures: dict[str, float] = {}
        self.follower_wait = 0.0
        self.seconds = dict.fromkeys(("waiting", "starting", "training", "ending"), 0.0)
        self.clock = time.monotonic()

    # The life of a pod

    def run(self) -> int:
        """Follow the assignments. Return the exit code when the pod is to end."""
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        try:
            self.serve()
            while self.torchrun or (time.monotonic() < self.wait_ends and not self.stop_signal):
                self.look()
        except Exception as error:
            # For example a full disk, a program that does not exist, or a port that is in use.
            problem = f"ddpjob agent: {type(error).__name__}: {error}"
            self.report, self.exit_code = {"cause": "Failure", "exception": problem}, 1
            with suppress(Exception):
                self.kill_processes()
        if self.stop_signal and self.attempt < 0:
            self.report = {"cause": "Stopped"}
        if self.exit_code:
            self.log(f"ends: {self.report['cause']}: {self.report.get('exception', '')}")
        self.write_report()
        return self.exit_code

    def look(self) -> None:
        """Wait a moment, and do what is to be done next."""
        self.watch(POLL)
        newer = self.newer_assignment()
        if self.torchrun and self.torchrun.returncode is not None:
            self.conclude()
        elif newer and newer["start"]:
            self.end_attempt(newer["grace"])
            # Another one, or a signal, may have come meanwhile.
            newer = self.newer_assignment()
            if newer and newer["start"]:
                self.start(newer)
        elif newer and newer["attempt"] != self.held:
            self.held = newer["attempt"]
            self.end_attempt(newer["grace"])
            self.wait_ends = time.monotonic() + newer["wait"]
        elif self.torchrun and self.hangs():
            self.end_hang()

    def newer_assignment(self) -> dict[str, Any] | None:
        """Return the assignment if it is complete, and newer than the last one."""
        found = read_json(read_file(self.options.assignment))
        is_complete = all(isinstance(found.get(name), kind) for name, kind in ASSIGNMENT.items())
        is_newer = is_complete and found["attempt"] > self.attempt
        return found if is_newer and not self.stop_signal else None

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Pass a request to stop on to torchrun, which gives its workers time for a checkpoint."""
        self.stop_signal = number
        if self.torchrun:
            self.torchrun.send_signal(signal.SIGTERM)

    def start(self, assignment: dict[str, Any]) -> None:
        """Start the attempt of an assignment."""
        self.attempt = assignment["attempt"]
        self.follower_wait = assignment["wait"]
        self.report = {"cause": "Stopped"}
        self.has_refused = False
        self.figures = {}
        self.started = time.time()
        self.clear_leftovers()
        self.streams = []
        for local_rank in range(assignment["ranks"]):
            path = self.folder / f"rank-{local_rank}"
            os.mkfifo(path)
            self.add_stream(os.open(path, os.O_RDONLY | os.O_NONBLOCK), local_rank)
        read_end, write_end = os.pipe()
        self.add_stream(read_end)
        launcher = self.options.command or [sys.executable, os.path.abspath(__file__), "launch"]
        flags = [*self.options.flags, *assignment["flags"]]
        command = [*launcher, *flags, *self.options.arguments]
        self.log(f"attempt {self.attempt} begins: torchrun {' '.join(assignment['flags'])}")
        # torchrun starts PYTHON_EXEC in place of its own interpreter.
        environment = {
            **self.environment,
            **assignment["env"],
            FOLDER: str(self.folder),
            PYTHON: self.environment.get("PYTHON_EXEC", sys.executable),
            "PYTHON_EXEC": str(self.folder / "worker"),
        }
        try:
            self.torchrun = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        # A request to stop may have come before there was a torchrun.
        if self.stop_signal:
            self.torchrun.send_signal(signal.SIGTERM)

    def clear_leftovers(self) -> None:
        """Remove the files of the last attempt, also those in shared memory."""
        for root in filter(None, (self.folder, self.options.clear)):
            for folder, _, files in os.walk(root):
                for name in files:
                    with suppress(OSError):
                        os.unlink(os.path.join(folder, name))
        wrapper = self.folder / "worker"
        program = f'"{sys.executable}" -IS "{os.path.abspath(__file__)}"'
        wrapper.write_text(f'#!/bin/sh\nexec {program} worker "$@"\n')
        wrapper.chmod(0o755)

    def conclude(self) -> None:
        """Judge the attempt that has ended, and decide whether the pod waits for another one."""
        assert self.torchrun
        code = self.torchrun.returncode
        self.kill_processes()
        self.exit_code = code if code >= 0 else 128 - code
        self.report = self.judge(code)
        wait = self.follower_wait if self.report["cause"] in CAUSES[1:] else 0.0
        self.wait_ends = time.monotonic() + wait
        if wait:
            self.log(f"attempt {self.attempt} has lost a peer; waiting for the next attempt")

    # Processes

    def end_attempt(self, grace: float) -> None:
        """End the processes of the last attempt: SIGTERM to torchrun, then SIGKILL to all."""
        if self.torchrun:
            self.torchrun.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + grace
            while self.torchrun.returncode is None and time.monotonic() < deadline:
                self.watch(POLL)
            self.kill_processes()

    def kill_processes(self) -> None:
        """Send SIGKILL until no process is left, and read the rest of their output.

        Raises TimeoutError if one does not end: two attempts must never train at once.
        """
        deadline = time.monotonic() + KILL_SECONDS
        while remaining := descendants():
            for process in remaining:
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            self.watch(0.01)
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {remaining} do not end after SIGKILL")
        for stream in self.streams:
            while stream.ended is None and self.read_output(stream):
                pass
            self.end_stream(stream)
        self.torchrun = None

    def watch(self, seconds: float) -> None:
        """Copy output for at most so many seconds, then collect the processes that have ended."""
        for key, _ in self.selector.select(seconds):
            self.read_output(key.data)
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if self.torchrun and found[0] == self.torchrun.pid:
                    self.torchrun.returncode = os.waitstatus_to_exitcode(found[1])
        now = time.monotonic()
        if now - self.clock > FROZEN:
            self.thawed = time.time()
        self.seconds[self.activity()] += now - self.clock
        self.clock = now

    def activity(self) -> str:
        if self.torchrun is None:
            return "waiting"
        if self.stop_signal or any(stream.ended for stream in self.ranks()):
            return "ending"
        return "training" if all(stream.worker for stream in self.ranks()) else "starting"

    # Output

    def ranks(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.local_rank is not None]

    def add_stream(self, descriptor: int, local_rank: int | None = None) -> None:
        os.set_blocking(descriptor, False)
        stream = Stream(descriptor, local_rank)
        self.streams.append(stream)
        self.selector.register(descriptor, selectors.EVENT_READ, stream)

    def end_stream(self, stream: Stream) -> None:
        if stream.ended is None:
            stream.ended = time.time()
            self.selector.unregister(stream.descriptor)
            os.close(stream.descriptor)

    def read_output(self, stream: Stream) -> bool:
        """Copy some output to the container's log. Return False if nothing was read."""
        try:
            data = os.read(stream.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if data and stream.worker:
            self.last_output = time.time()
        lines = stream.take(data).splitlines(keepends=True)
        self.write(b"".join(self.marked(stream, line) for line in lines))
        if not data:
            self.end_stream(stream)
        return bool(data)

    def marked(self, stream: Stream, line: bytes) -> bytes:
        """Return a line with its rank. Lines of JSON keep their form, and so do marked ones."""
        if line.startswith(b"{") and line.rstrip().endswith(b"}"):
            entries = read_json(line) if len(line) < MESSAGE else {}
            for name in FIGURES:
                if type(entries.get(name)) in (int, float):
                    self.figures[name] = entries[name]
            return line
        has_peers = stream.worker and len(self.ranks()) > 1
        mark = b"[rank%d]: " % stream.worker["rank"] if has_peers else b""
        return line if line.startswith(mark) else mark + line

    def log(self, text: str) -> None:
        self.write(f"ddpjob agent: {text}\n".encode())

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        # Without a log the training goes on.
        with suppress(OSError):
            while view:
                view = view[os.write(1, view) :]

    # Hangs

    def hangs(self) -> bool:
        """Return True if the last heartbeat is too old.

        Before the first one there is no limit. Workers that have ended, or save a checkpoint after
        a request to stop, need not give one.
        """
        limit: float | None = self.options.hang_seconds
        if not limit or self.stop_signal or all(stream.ended for stream in self.ranks()):
            return False
        return (self.heartbeat_age() or 0.0) > limit

    def heartbeat_age(self) -> float | None:
        """Return the seconds since this attempt's last heartbeat, or None before the first one."""
        beat = self.last_output
        if self.options.heartbeat == "File":
            try:
                beat = os.stat(self.environment["DDP_HEARTBEAT_FILE"]).st_mtime
            except OSError:
                return None
        return max(0.0, time.time() - max(beat, self.thawed)) if beat >= self.started else None

    def end_hang(self) -> None:
        """Collect the stack of each worker, and end the attempt.

        torchrun is stopped first: it would end the workers when the first one aborts. A stopped
        worker aborts only once it continues.
        """
        assert self.torchrun
        age = self.heartbeat_age() or 0.0
        self.torchrun.send_signal(signal.SIGSTOP)
        workers = [stream.worker.get("pid") for stream in self.ranks() if not stream.ended]
        for process in set(descendants()).intersection(workers):
            # With a limit of 1, the kernel writes no core, not even into a pipe.
            with suppress(OSError, ValueError, AttributeError):
                resource.prlimit(process, resource.RLIMIT_CORE, (1, 1))
            for number in (signal.SIGABRT, signal.SIGCONT):
                with suppress(OSError):
                    os.kill(process, number)
        deadline = time.monotonic() + STACK_SECONDS
        while not all(stream.ended for stream in self.ranks()) and time.monotonic() < deadline:
            self.watch(POLL)
        self.kill_processes()
        lines = []
        each = max(1, LINES // max(1, len(self.ranks())))
        for stream in self.ranks():
            frames = stack_in(stream.text()) or ["no stack"]
            rank = stream.worker.get("rank")
            lines += [f"rank {rank}: {frame.strip()}"[:LINE_LENGTH] for frame in frames[:each]]
        self.report = {"cause": "Hang", "exception": f"no heartbeat for {age:.0f} s"}
        self.report["lines"] = lines[:LINES]
        self.exit_code, self.wait_ends = 1, 0.0
        self.log(f"attempt {self.attempt} hangs: no heartbeat for {age:.0f} s")

    # The report

    def judge(self, code: int) -> dict[str, Any]:
        """Return the report on an attempt. Of several failures, the likeliest cause counts."""
        if code == 0:
            return {"cause": "Succeeded", "result": self.result()}
        record = read_json(read_file(self.folder / "failures.json"))
        ends = [stream.ended or 0.0 for stream in self.ranks() if stream.worker]
        # torchrun sends SIGKILL to workers that are still there so long after the first failure.
        patience = float(self.environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)) - 1.0
        found = []
        for failure in record.get("failures", []):
            stream = self.streams[failure["localRank"]]
            cause, exception = self.cause(stream.text(), failure["exitCode"])
            if failure["exitCode"] == -9 and (stream.ended or 0.0) - min(ends) > patience:
                cause = "Follower"
            exception = exception or failure["exception"] or signal_name(failure["exitCode"])
            report = {"cause": cause, **failure, "exception": exception}
            found.append((CAUSES.index(cause), stream.ended, failure["rank"], report, stream))
        if not found:
            # torchrun itself failed, or the program is another one and writes no record.
            begun = [stream for stream in self.ranks() if stream.worker]
            stream = min(begun, key=lambda rank: rank.ended or 0.0, default=self.streams[-1])
            cause, exception = self.cause(record.get("error") or stream.text(), code)
            report = {"cause": cause, "exitCode": code, "exception": exception or signal_name(code)}
            found.append((0, stream.ended, 0, report, stream))
        _, ended, _, report, stream = min(found, key=lambda entry: entry[:3])
        if self.stop_signal:
            report["cause"] = "Stopped"
        lines = [line[:LINE_LENGTH] for line in stream.text().splitlines() if line.strip()]
        return {**report, "time": ended, "lines": lines[-LINES:]}

    def cause(self, text: str, exit_code: int) -> tuple[str, str]:
        """Return (cause, exception) of a process, from the end of its output."""
        found = [pattern.findall(text) for pattern in self.words.get("exception", [])]
        exception = next((matches[-1].strip()[:EXCEPTION] for matches in found if matches), "")
        if exit_code in INTERRUPTED or self.says("follower", text):
            return "Follower", exception
        if self.says("unclear", text) or (exit_code in AMBIGUOUS and not exception):
            return "Unclear", exception
        return "Failure", exception

    def says(self, kind: str, text: str) -> bool:
        return any(pattern.search(text) for pattern in self.words.get(kind, []))

    def result(self) -> dict[str, Any]:
        """Return the job's result, if this pod has written one."""
        result = read_json(read_file(self.environment["DDP_RESULT_FILE"]))
        size = len(json.dumps(result))
        if size > MESSAGE - 200:
            self.log(f"DDP_RESULT_FILE has {size} bytes as JSON; {MESSAGE - 200} are the limit")
            return {}
        return result

    def write_report(self) -> None:
        """Write the termination message. If it is too long, lines are left out, then the rest."""
        report = {"agent": 1, "attempt": self.attempt, **self.report}
        while len(text := json.dumps(report)) > MESSAGE and report.get("lines"):
            report["lines"] = report["lines"][1:]
        if len(text) > MESSAGE:
            known = ("agent", "attempt", "cause", "rank", "exitCode", "time")
            short = {name: report[name] for name in known if name in report}
            text = json.dumps({**short, "exception": report.get("exception", "")[:200]})
        with suppress(OSError):
            Path(self.options.message).write_text(text)

    # The port

    def serve(self) -> None:
        """Answer GET /ready and /metrics from a thread. The answers are numbers only."""
        if self.options.port is None:
            return
        has_ipv6 = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_ipv6 else socket.AF_INET
        address = ("", int(self.options.port))
        server = socket.create_server(address, family=family, dualstack_ipv6=has_ipv6)
        threading.Thread(target=self.answer_all, args=(server,), daemon=True).start()

    def answer_all(self, server: socket.socket) -> None:
        while True:
            CLIENTS.acquire()
            try:
                connection = server.accept()[0]
                threading.Thread(target=self.answer, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):
                # For example, no descriptor is left.
                CLIENTS.release()
                time.sleep(POLL)

    def answer(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            # A client that sends nothing must not keep the kubelet waiting.
            connection.settimeout(0.2)
            path = connection.recv(4096).split(b" ")[1:2]
            status, body = "404 Not Found", ""
            if path == [b"/ready"]:
                ready = self.is_ready()
                # The operator must see each attempt become ready.
                status = "200 OK" if ready and self.has_refused else "503 Service Unavailable"
                self.has_refused |= status != "200 OK"
            if path == [b"/metrics"]:
                status, body = "200 OK", self.metrics()
            head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\n"
            head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            connection.sendall((head + body).encode())
        CLIENTS.release()

    def is_ready(self) -> bool:
        """Return True if this attempt's workers have met, and none hangs.

        torchrun starts the workers when the agents of all nodes have met.
        """
        if self.torchrun is None or self.hangs():
            return False
        if all(stream.worker for stream in self.ranks()):
            return True
        # Workers of another program than Python have no pipe, but torchrun's variables.
        variables = (read_file(f"/proc/{process}/environ") for process in descendants())
        return any(b"TORCHELASTIC_RUN_ID=" in variable for variable in variables)

    def metrics(self) -> str:
        """Return the numbers of this pod in the text format of Prometheus."""
        numbers = {"attempt": self.attempt, "ready": int(self.is_ready()), **self.figures}
        age = self.heartbeat_age()
        if age is not None:
            numbers["heartbeat_age_seconds"] = round(age, 3)
        for name, spent in self.seconds.items():
            numbers[f'seconds_total{{activity="{name}"}}'] = round(spent, 3)
        return "".join(f"ddpjob_agent_{name} {value}\n" for name, value in numbers.items())


def run(arguments: list[str]) -> int:
    """Run the agent, and return its exit code.

    The first argument has the options, as a JSON object:

    - `assignment`, `words`, `message`: files with the assignment, with the patterns of error
      messages, and for the termination message. `folder`: for pipes and small files.
    - `clear`: a folder whose files are removed before each attempt, or null.
    - `port`: of /ready and /metrics, or null. `command`: what to start in place of torchrun.
      `flags`: what follows it.
    - `hang_seconds`: the longest time between two heartbeats, or null; `heartbeat`: File or Log.

    The other arguments are what follows torchrun's own flags.
    """
    # The first pipes must not become the standard streams, if those are closed.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(descriptor)
    if os.getpid() != 1 and sys.platform == "linux":
        # Outside a container, processes that lose their parent come to this one only if it asks.
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    options = SimpleNamespace(**json.loads(arguments[0]), arguments=arguments[1:])
    return Agent(options).run()


def launch(arguments: list[str]) -> None:
    """Run torchrun in this process. If it fails, write down which workers failed."""
    sys.argv = ["torchrun", *arguments]
    from torch.distributed import run as torchrun

    try:
        torchrun.main()
    except BaseException as error:
        if hasattr(error, "sigval"):
            # torchrun was told to end: a traceback would look like a failure.
            sys.exit(128 + error.sigval)
        failures = []
        for rank, failure in getattr(error, "failures", {}).items():
            entry = {"rank": rank, "localRank": failure.local_rank, "exitCode": failure.exitcode}
            # Without @record in the script, there is only advice to use it.
            has_message = os.path.isfile(failure.error_file)
            exception = str(failure.message)[:EXCEPTION] if has_message else ""
            failures.append({**entry, "exception": exception})
        record = {"error": f"{type(error).__name__}: {error}", "failures": failures}
        Path(os.environ[FOLDER], "failures.json").write_text(json.dumps(record))
        raise


def worker(arguments: list[str]) -> None:
    """Become the worker, with its output in the pipe of its rank."""
    folder, python = os.environ.pop(FOLDER), os.environ.pop(PYTHON)
    os.environ["PYTHON_EXEC"] = python
    if python == sys.executable:
        del os.environ["PYTHON_EXEC"]
    header = {"rank": int(os.environ["RANK"]), "pid": os.getpid()}
    # Without an agent that reads, the output stays where torchrun's is.
    with suppress(OSError):
        path = os.path.join(folder, "rank-" + os.environ["LOCAL_RANK"])
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(pipe, True)
        os.write(pipe, HEADER + json.dumps(header).encode() + b"\n")
        os.dup2(pipe, 1)
        os.dup2(pipe, 2)
        os.close(pipe)
    os.execvp(python, [python, *arguments])


if __name__ == "__main__":
    sys.exit({"run": run, "launch": launch, "worker": worker}[sys.argv[1]](sys.argv[2:]))
