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
import sys
import time
from contextlib import suppress
from pathlib import Path

from . import FOLDER, NOTICE, PYTHON, SOCKET, message, place, report
from .answers import answers_of
from .assignment import Assignment, must_dump, read_assignment
from .files import empty_folder, read_file
from .options import Options, read_options
from .output import Output, log
from .port import Port
from .processes import (
    Process,
    abort,
    become_reaper,
    descendants,
    exit_status,
    is_worker_of_torchrun,
    open_standard_streams,
    send,
    start,
    start_zygote,
    torchrun_command,
    write_wrapper,
)
from .setup import Setup
from .suspicion import Heartbeat, Suspicion
from .times import Times, shutdown_seconds

# Seconds between two looks at the assignment and at the clocks.
POLL = 0.05

# Seconds until the first assignment must be there; until processes must be gone after SIGKILL, for
# they may free a device; until a zygote with uncollected forks is killed too; and for stacks of
# workers after SIGABRT.
ASSIGNMENT_SECONDS = 60.0
KILL_SECONDS = 30.0
SPARE_SECONDS = 5.0
STACK_SECONDS = 2.0


def main(args: list[str]) -> int:
    """Run the agent, and return its exit code."""
    open_standard_streams()
    become_reaper()
    return Agent(read_options(args)).run()


class Agent:
    """The agent of one pod."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.folder = Path(options.folder)
        given = {
            "DDP_HEARTBEAT_FILE": str(self.folder / "heartbeat"),
            "DDP_RESULT_FILE": str(self.folder / "result"),
            # With this, a worker writes its stack after SIGABRT.
            "PYTHONFAULTHANDLER": "1",
            **os.environ,
        }
        self.env = place.variables(options, given)
        patience = shutdown_seconds(self.env)
        self.judge = report.Judge(read_file(options.words), patience)
        self.output = Output(options.hang_seconds or 0.0)
        self.setup = Setup(options)
        self.port = Port(self.is_ready, lambda: self.setup.is_over, answers_of(self))
        self.attempt = -1
        # The attempt that must not start yet.
        self.held = -1
        self.torchrun: Process | None = None
        self.zygote: Process | None = None
        self.report: message.Report = {}
        self.fail(f"no assignment in {options.assignment}")
        self.wait_ends = time.monotonic() + ASSIGNMENT_SECONDS
        self.follower_wait = 0.0
        self.stop_signal = 0
        self.times = Times()
        path = self.env["DDP_HEARTBEAT_FILE"]
        self.heartbeat = Heartbeat(options, path, self.output, self.times)
        self.suspicion = Suspicion()

    def run(self) -> int:
        """Follow the assignments. Return the exit code when the pod is to end."""
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        try:
            if self.options.port is not None:
                self.port.serve(int(self.options.port))
            if not self.setup.is_over:
                self.set_up()
            while self.torchrun or self.is_waiting():
                self.look()
        except Exception as error:
            # For example a full disk, a missing program, or a port in use.
            self.fail(f"{NOTICE}{type(error).__name__}: {error}")
        with suppress(Exception):
            self.kill_processes()
        if self.stop_signal and self.attempt < 0:
            self.report = {"cause": "Stopped"}
        if self.exit_code:
            log(f"ends: {self.report['cause']}: {self.report.get('exception', '')}")
        end = {
            "attempt": self.attempt,
            "steps": self.output.steps,
            "trained": self.output.trained,
            "total": self.output.figures.get("steps"),
            **self.report,
        }
        message.write(self.options.message, end)
        return self.exit_code

    def fail(self, problem: str) -> None:
        self.report = {"cause": "Failure", "exception": problem}
        self.exit_code = 1

    def is_waiting(self) -> bool:
        return time.monotonic() < self.wait_ends and not self.stop_signal

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
            is_ordered = must_dump(self.options.assignment, self.attempt)
            # With `heartbeat: Log` the operator decides, because other pods may still write.
            is_silent = self.heartbeat.in_file and self.is_silent()
            if self.suspicion.is_due(is_ordered, is_silent):
                self.end_hang()

    def set_up(self) -> None:
        """Run the setup of the job. If it fails, the pod ends."""
        place.prepare(self.options, self.env, is_first=True)
        self.setup.start(self.env, self.output)
        while self.setup.runs() and not self.stop_signal:
            self.watch(POLL)
        code = self.setup.code
        # It may have left processes.
        self.kill_processes()
        failure = self.setup.conclude(code, self.output.streams[0])
        self.wait_ends = time.monotonic() + ASSIGNMENT_SECONDS
        if failure:
            self.report = failure
            self.exit_code = exit_status(failure["exitCode"])
            self.wait_ends = 0.0

    def newer_assignment(self) -> Assignment | None:
        """Return the assignment if it is newer than the last one."""
        if self.stop_signal:
            return None
        return read_assignment(self.options.assignment, self.attempt)

    def stop(self, number: int, _: object) -> None:
        """Pass a request to stop on to torchrun: workers may save a checkpoint."""
        self.stop_signal = number
        if self.torchrun:
            self.torchrun.send_signal(signal.SIGTERM)

    def conclude(self, code: int) -> None:
        """Judge the ended attempt. Its pod may wait for another one."""
        self.kill_processes(spares_zygote=True)
        self.exit_code = exit_status(code)
        if code == 0:
            result = read_file(self.env["DDP_RESULT_FILE"])
            self.report = report.on_success(result)
        else:
            record = report.read_record(self.folder)
            stopped = self.stop_signal > 0
            self.report = self.judge.judge(code, self.output.streams, record, stopped=stopped)
            if stopped:
                self.report.update(cause="Stopped", exception="")
        wait = self.follower_wait if self.report["cause"] == "Follower" else 0.0
        self.wait_ends = time.monotonic() + wait
        if wait:
            log(f"attempt {self.attempt} has lost a peer; waiting for the next attempt")

    def start(self, assignment: Assignment) -> None:
        is_first = self.attempt < 0
        # The setup has had the same place, and has changed it.
        if not (is_first and self.setup.process):
            place.prepare(self.options, self.env, is_first=is_first, added=self.setup.added)
        empty_folder(self.folder, self.folder / SOCKET if self.zygote else None)
        self.attempt = assignment["attempt"]
        self.follower_wait = assignment["wait"]
        self.report = {"cause": "Stopped"}
        self.port.has_refused = False
        self.suspicion = Suspicion()
        # torchrun starts PYTHON_EXEC in place of its own interpreter.
        own = {
            FOLDER: str(self.folder),
            PYTHON: self.env.get("PYTHON_EXEC", sys.executable),
            "PYTHON_EXEC": str(write_wrapper(self.folder)),
        }
        env = {**self.env, **assignment["env"]}
        if self.options.fast_start and self.zygote is None:
            self.zygote = start_zygote(self.folder, env)
        log(f"attempt {self.attempt} begins: torchrun {' '.join(assignment['flags'])}")
        self.output.begin(self.attempt)
        self.output.open_pipes(self.folder, assignment["ranks"])
        command = torchrun_command(self.options, assignment["flags"])
        self.torchrun = start(command, {**env, **own}, self.output)
        # A request to stop may have come before there was a torchrun.
        if self.stop_signal:
            self.torchrun.send_signal(signal.SIGTERM)

    def end_attempt(self, grace: float) -> None:
        """End the last attempt: SIGTERM to torchrun, then SIGKILL to all."""
        if not self.torchrun:
            return
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
            spared = 0
            if self.zygote and spares_zygote and seconds < SPARE_SECONDS:
                spared = self.zygote.pid
            remaining = [process for process in descendants() if process != spared]
            if not remaining:
                break
            if seconds > KILL_SECONDS:
                raise TimeoutError(f"processes {remaining} do not end after SIGKILL")
            send(signal.SIGKILL, remaining)
            self.watch(0.01)
        self.output.end()
        self.torchrun = None

    def watch(self, seconds: float) -> None:
        """Copy output for at most so many seconds, then collect the ended processes."""
        self.output.copy(seconds)
        with suppress(ChildProcessError):
            while True:
                number, status = os.waitpid(-1, os.WNOHANG)
                if not number:
                    break
                self.note_end(number, os.waitstatus_to_exitcode(status))
        self.heartbeat.note_first()
        self.times.spend(self.activity())

    def note_end(self, number: int, code: int) -> None:
        for process in (self.torchrun, self.setup.process, self.zygote):
            if process and process.pid == number:
                process.returncode = code
        if self.zygote and self.zygote.returncode is not None:
            self.zygote = None
            if self.torchrun and self.torchrun.returncode is None:
                log(f"the zygote has ended with exit code {code}, and the attempt with it")

    def is_silent(self) -> bool:
        """Return True if the last heartbeat is too old.

        No heartbeat is needed from ended workers, or from workers saving a checkpoint after a
        request to stop.
        """
        if self.stop_signal or self.output.have_all_ended():
            return False
        return self.heartbeat.is_late()

    def end_hang(self) -> None:
        """Collect the stack of each worker, and end the attempt."""
        age = self.heartbeat.age()
        ranks = self.output.ranks()
        abort([rank.worker.get("pid") for rank in ranks if not rank.ended])
        deadline = time.monotonic() + STACK_SECONDS
        while not self.output.have_all_ended() and time.monotonic() < deadline:
            self.watch(POLL)
        self.kill_processes()
        self.report = self.judge.hang(age, ranks)
        self.exit_code = 1
        self.wait_ends = 0.0
        log(f"attempt {self.attempt} hangs: {self.report['exception']}")

    def is_ready(self) -> bool:
        """Return True if this attempt's workers have met, and none hangs.

        torchrun starts the workers when the agents of all nodes have met.
        """
        if self.torchrun is None or self.is_silent():
            return False
        if self.output.have_all_begun():
            return True
        # Workers without Python have no pipe.
        return any(map(is_worker_of_torchrun, descendants()))

    def activity(self) -> str:
        """Return the pod's activity, one of ACTIVITIES."""
        if not self.setup.is_over:
            return "setup"
        if self.torchrun is None:
            return "waiting"
        if self.stop_signal or self.output.ended_ranks():
            return "ending"
        return "training" if self.output.have_all_begun() else "starting"
