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
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from . import FOLDER, PYTHON, SOCKET, place, report
from .answers import answers_of
from .assignment import must_dump, read_assignment
from .files import changed_at, empty_folder, read_file
from .options import Options, read_options
from .output import Output, log
from .port import Port
from .processes import (
    abort,
    become_reaper,
    descendants,
    exit_status,
    is_worker_of_torchrun,
    kill,
    open_standard_streams,
    program,
    start,
    start_zygote,
    write_wrapper,
)
from .setup import Setup
from .suspicion import Suspicion, is_too_old
from .times import Times

# Seconds between two looks at the assignment and at the clocks.
POLL = 0.05

# Seconds until the first assignment must be there; until processes must be gone after SIGKILL,
# because they may take time to free a device; until a zygote is killed too if it has not collected
# its forks; and for the stacks of workers after SIGABRT.
ASSIGNMENT_SECONDS, KILL_SECONDS, SPARE_SECONDS, STACK_SECONDS = 60.0, 30.0, 5.0, 2.0


def main(arguments: list[str]) -> int:
    """Run the agent with the arguments of `Options`, and return its exit code."""
    open_standard_streams()
    become_reaper()
    return Agent(read_options(arguments)).run()


class Agent:
    """The agent of one pod."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.folder = Path(options.folder)
        # With PYTHONFAULTHANDLER, a worker writes its stack after SIGABRT.
        own = {
            "DDP_HEARTBEAT_FILE": str(self.folder / "heartbeat"),
            "DDP_RESULT_FILE": str(self.folder / "result"),
            "PYTHONFAULTHANDLER": "1",
        }
        self.environment = place.variables(options, {**own, **os.environ})
        patience = float(self.environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
        self.judge = report.Judge(read_file(options.words), patience)
        self.output = Output(options.hang_seconds or 0.0)
        self.setup = Setup(options)
        self.port = Port(self.is_ready, lambda: self.setup.is_over, answers_of(self))
        self.attempt = -1
        # The attempt that must not start yet.
        self.held = -1
        self.torchrun: subprocess.Popen[bytes] | None = None
        self.zygote: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        problem = f"no assignment in {options.assignment}"
        self.report: report.Report = {"cause": "Failure", "exception": problem}
        self.exit_code = 1
        self.wait_ends = time.monotonic() + ASSIGNMENT_SECONDS
        self.follower_wait = 0.0
        self.stop_signal = 0
        self.times = Times()
        self.suspicion = Suspicion()

    # The life of a pod

    def run(self) -> int:
        """Follow the assignments. Return the exit code when the pod is to end."""
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        try:
            if self.options.port is not None:
                self.port.serve(int(self.options.port))
            if not self.setup.is_over:
                self.set_up()
            while self.torchrun or (time.monotonic() < self.wait_ends and not self.stop_signal):
                self.look()
        except Exception as error:
            # For example a full disk, a missing program, or a port in use.
            problem = f"ddpjob agent: {type(error).__name__}: {error}"
            self.report, self.exit_code = {"cause": "Failure", "exception": problem}, 1
        with suppress(Exception):
            self.kill_processes()
        if self.stop_signal and self.attempt < 0:
            self.report = {"cause": "Stopped"}
        if self.exit_code:
            log(f"ends: {self.report['cause']}: {self.report.get('exception', '')}")
        known = {"steps": self.output.steps, "trained": self.output.trained}
        known["total"] = self.output.figures.get("steps")
        report.write(self.options.message, {"attempt": self.attempt, **known, **self.report})
        return self.exit_code

    def look(self) -> None:
        """Wait a moment, and do what is to be done next."""
        self.watch(POLL)
        newer = self.newer_assignment()
        if self.torchrun and self.torchrun.returncode is not None:
            self.conclude(self.torchrun.returncode)
        elif self.stop_signal and self.torchrun and self.output.rests():
            self.kill_processes()
            self.exit_code = 128 + signal.SIGTERM
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
        elif self.torchrun:
            # With `heartbeat: Log` the operator decides, because other pods may still write.
            is_silent = self.options.heartbeat == "File" and self.is_silent()
            if self.suspicion.is_due(must_dump(self.options.assignment, self.attempt), is_silent):
                self.end_hang()

    def set_up(self) -> None:
        """Run the setup of the job. If it fails, this is the report, and the pod ends."""
        place.prepare(self.options, self.environment, is_first=True)
        self.setup.start(self.environment, self.output)
        while self.setup.runs() and not self.stop_signal:
            self.watch(POLL)
        code = self.setup.code
        # End its remaining processes.
        self.kill_processes()
        failure = self.setup.conclude(code, self.output.streams[0])
        self.wait_ends = 0.0 if failure else time.monotonic() + ASSIGNMENT_SECONDS
        if failure:
            self.report, self.exit_code = failure, exit_status(failure["exitCode"])

    def newer_assignment(self) -> dict[str, Any] | None:
        """Return the assignment if it is newer than the last one of this pod, or None."""
        if self.stop_signal:
            return None
        return read_assignment(self.options.assignment, self.attempt)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Pass a request to stop on to torchrun. Its workers get time for a checkpoint."""
        self.stop_signal = number
        if self.torchrun:
            self.torchrun.send_signal(signal.SIGTERM)

    def conclude(self, code: int) -> None:
        """Judge the ended attempt, and decide whether the pod waits for another one."""
        self.kill_processes(spares_zygote=True)
        self.exit_code = exit_status(code)
        record = report.read_record(self.folder)
        if code == 0:
            self.report = report.on_success(read_file(self.environment["DDP_RESULT_FILE"]))
        else:
            self.report = self.judge.judge(code, self.output.streams, record)
        if code and self.stop_signal:
            self.report.update(cause="Stopped", exception="")
        wait = self.follower_wait if self.report["cause"] == "Follower" else 0.0
        self.wait_ends = time.monotonic() + wait
        if wait:
            log(f"attempt {self.attempt} has lost a peer; waiting for the next attempt")

    # The start of an attempt

    def start(self, assignment: dict[str, Any]) -> None:
        """Start the attempt of an assignment."""
        is_first = self.attempt < 0
        # The setup has had the same place, and has changed it.
        if not (is_first and self.setup.process):
            added = self.setup.added
            place.prepare(self.options, self.environment, is_first=is_first, added=added)
        empty_folder(self.folder, self.folder / SOCKET if self.zygote else None)
        self.attempt = assignment["attempt"]
        self.follower_wait = assignment["wait"]
        self.report = {"cause": "Stopped"}
        self.port.has_refused = False
        self.started = time.time()
        # torchrun starts PYTHON_EXEC in place of its own interpreter.
        python = self.environment.get("PYTHON_EXEC", sys.executable)
        wrapper = str(write_wrapper(self.folder))
        own = {FOLDER: str(self.folder), PYTHON: python, "PYTHON_EXEC": wrapper}
        environment = {**self.environment, **assignment["env"]}
        if self.options.fast_start and self.zygote is None:
            self.zygote = start_zygote(self.folder, environment)
        log(f"attempt {self.attempt} begins: torchrun {' '.join(assignment['flags'])}")
        self.output.begin(self.attempt)
        self.output.open_pipes(self.folder, assignment["ranks"])
        command = self.options.command or program("launch", "torchrun")
        words = [*command, *self.options.flags, *assignment["flags"], *self.options.arguments]
        self.torchrun = start(words, {**environment, **own}, self.output)
        # A request to stop may have come before there was a torchrun.
        if self.stop_signal:
            self.torchrun.send_signal(signal.SIGTERM)

    # The end of an attempt

    def end_attempt(self, grace: float) -> None:
        """End the processes of the last attempt: SIGTERM to torchrun, then SIGKILL to all."""
        if self.torchrun:
            self.torchrun.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + grace
            while self.torchrun.returncode is None and time.monotonic() < deadline:
                if self.output.rests():
                    break
                self.watch(POLL)
            self.kill_processes(spares_zygote=True)

    def kill_processes(self, spares_zygote: bool = False) -> None:
        """Send SIGKILL until no process is left, and read the rest of their output.

        A zygote may be spared, since none of its forks runs without a stand-in. Raises
        TimeoutError if a process does not end: two attempts must never train at once.
        """
        began = time.monotonic()
        while True:
            seconds = time.monotonic() - began
            spared = self.zygote if spares_zygote and seconds < SPARE_SECONDS else None
            remaining = [
                process for process in descendants() if not spared or process != spared.pid
            ]
            if not remaining:
                break
            if seconds > KILL_SECONDS:
                raise TimeoutError(f"processes {remaining} do not end after SIGKILL")
            kill(remaining)
            self.watch(0.01)
        self.output.end()
        self.torchrun = None

    def watch(self, seconds: float) -> None:
        """Copy output for at most so many seconds, then collect the ended processes."""
        self.output.copy(seconds)
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(found[1])
                for process in (self.torchrun, self.setup.process):
                    if process and found[0] == process.pid:
                        process.returncode = code
                if self.zygote and found[0] == self.zygote.pid:
                    self.zygote.returncode = code
                    self.zygote = None
                    if self.torchrun and self.torchrun.returncode is None:
                        log(f"the zygote has ended with exit code {code}, and the attempt with it")
        if self.attempt not in self.output.trained:
            self.heartbeat_age()
        self.times.spend(self.activity())

    # Hangs

    def is_silent(self) -> bool:
        """Return True if the last heartbeat is too old.

        No heartbeat is needed from ended workers, from workers saving a checkpoint after a request
        to stop, or from ranks with output only at their start.
        """
        age = self.heartbeat_age()
        needs_none = self.stop_signal or self.output.have_all_ended()
        if needs_none or (age is not None and not self.is_watched()):
            return False
        limits = self.options.hang_seconds, self.output.since_meeting(), self.options.first_seconds
        return is_too_old(age, *limits)

    def is_watched(self) -> bool:
        """Return True if a stop of the heartbeats would be noticed."""
        if self.options.heartbeat == "Log":
            return self.output.writes_steadily
        return self.heartbeat_age() is not None

    def heartbeat_age(self) -> float | None:
        """Return the seconds since this attempt's last heartbeat, or None before the first one."""
        by_file, path = self.options.heartbeat == "File", self.environment["DDP_HEARTBEAT_FILE"]
        beat = changed_at(path) if by_file else self.output.last_time
        has_beat = beat >= self.started > 0.0
        if by_file and has_beat:
            self.output.trained.setdefault(self.attempt, beat)
        age = time.time() - max(beat, self.times.thawed)
        return max(0.0, age) if has_beat else None

    def end_hang(self) -> None:
        """Collect the stack of each worker, and end the attempt."""
        age = self.heartbeat_age()
        processes, streams = set(descendants()), self.output.ranks()
        running = (stream.worker.get("pid") for stream in streams if not stream.ended)
        workers = processes.intersection(running)
        abort(workers, processes - workers)
        deadline = time.monotonic() + STACK_SECONDS
        while not self.output.have_all_ended() and time.monotonic() < deadline:
            self.watch(POLL)
        self.kill_processes()
        self.report = self.judge.hang(age, streams)
        self.exit_code, self.wait_ends = 1, 0.0
        log(f"attempt {self.attempt} hangs: {self.report['exception']}")

    # The port

    def is_ready(self) -> bool:
        """Return True if this attempt's workers have met, and none hangs.

        torchrun starts the workers when the agents of all nodes have met.
        """
        if self.torchrun is None or self.is_silent():
            return False
        # Workers without Python have no pipe.
        return self.output.have_all_begun() or any(map(is_worker_of_torchrun, descendants()))

    def activity(self) -> str:
        """Return what the pod's time is spent on, one of ACTIVITIES."""
        if not self.setup.is_over:
            return "setup"
        if self.torchrun is None:
            return "waiting"
        if self.stop_signal or any(stream.ended for stream in self.output.ranks()):
            return "ending"
        return "training" if self.output.have_all_begun() else "starting"
