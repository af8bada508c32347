"""Copy the output of torchrun and of the ranks into the container's log, in whole lines."""

from __future__ import annotations

import os
import selectors
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import HEADER, NOTICE, PIPE
from .exceptions import LastException
from .files import exit_code_of, read_json
from .lines import as_displayed, displayed_lines, is_overwritten, object_at_end

# Bytes: of output kept for the report, and of a line kept whole, at most.
TAIL = 16384
LINE = 4 << 20

# Seconds between two states of a progress bar in the log.
BAR_SECONDS = 10.0

# Seconds for torchrun to end after its ranks. It handles no signal while it waits for nodes.
REST_SECONDS = 2.0

# The output of ranks is a heartbeat if they have written in so many windows of the limit's length.
WINDOWS = 3

# The steps of so many last attempts are kept.
ATTEMPTS = 10

# Figures for /metrics from lines of JSON, such as those of ddp_trainer.
FIGURES = (
    "step",
    "steps",
    "epoch",
    "loss",
    "samples_per_second",
    "tokens_per_second",
)


class Stream:
    """The output of torchrun or of a rank. It comes in pieces, and leaves in whole lines.

    - `worker`: the fields in the first line of a rank's pipe: its rank, its `pid`, and the
      `process` started for it by torchrun.
    - `exception`: the last one in the output.
    - `ended`: when the process was found to have ended, or 0. `open_at`: when it was last found
      not to have ended. `exit_code`: its exit code, or None if it is not known.
    """

    def __init__(self, descriptor: int, local_rank: int | None = None) -> None:
        self.descriptor = descriptor
        self.local_rank = local_rank
        self.worker: dict[str, int] = {}
        self.process: int | None = None
        self.is_open = True
        self.partial = b""
        self.tail = b""
        self.exception = LastException()
        self.open_at = 0.0
        self.ended = 0.0
        self.exit_code: int | None = None
        self.bar = b""
        self.bar_time = time.time()

    def take(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines completed by `data`, at a Unix time. Empty `data` is the end."""
        self.partial += data
        is_end = not data
        if is_end or len(self.partial) > LINE:
            length = len(self.partial)
        else:
            length = self.partial.rfind(b"\n") + 1
        text = self.partial[:length]
        self.partial = self.partial[length:]
        if is_overwritten(self.partial):
            # The overwritten text is no longer needed.
            earlier, _, last = self.partial.rpartition(b"\r")
            self.partial = as_displayed(earlier) + b"\r" + last
        if self.local_rank is not None and not self.worker and text.startswith(HEADER):
            header, _, text = text.partition(b"\n")
            found = read_json(header.removeprefix(HEADER))
            if all(type(found.get(name)) is int for name in ("rank", "pid", "process")):
                self.worker = found
        if is_end and text and not text.endswith(b"\n"):
            text += b"\n"
        lines = displayed_lines(text)
        shown = b"".join(lines)
        self.tail = (self.tail + shown)[-TAIL:]
        self.exception.take(shown, now)
        return lines

    def take_bar(self, now: float) -> list[bytes]:
        """Return a line with the state of a progress bar, if it is time for one."""
        if not is_overwritten(self.partial):
            self.bar_time = now
        if now - self.bar_time < BAR_SECONDS:
            return []
        last = self.bar
        self.bar = as_displayed(self.partial)
        self.bar_time = now
        is_new = self.bar.strip() and self.bar != last
        return [self.bar + b"\n"] if is_new else []

    def text(self) -> str:
        return self.tail.decode(errors="replace")


class Output:
    """The streams of an attempt, and the figures in them.

    `steps` has the first and the last step of the last attempts, by their number, if lines of JSON
    name them. `trained` has the Unix time of the first step made in each.
    """

    def __init__(self, window: float = 0.0) -> None:
        self.selector = selectors.DefaultSelector()
        # The limit in seconds. `windows` counts the windows of this length with output of ranks.
        self.window = window
        # The time of all output found by one `select`. Its order is not known.
        self.now = time.time()
        self.before = self.now
        self.steps: dict[int, tuple[float, float]] = {}
        self.trained: dict[int, float] = {}
        self.begin(-1)

    def begin(self, attempt: int) -> None:
        """Forget the streams and the figures of the last attempt."""
        self.attempt = attempt
        self.began = time.time()
        self.streams: list[Stream] = []
        self.figures: dict[str, float] = {}
        self.checkpoint: int | None = None
        self.last_time = 0.0
        self.met_time = 0.0
        self.windows = 0
        self.last_window = -1

    def open_pipes(self, folder: Path, ranks: int) -> None:
        for index in range(ranks):
            path = folder / PIPE.format(index=index)
            os.mkfifo(path)
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self.add(descriptor, index)

    def add(self, descriptor: int, local_rank: int | None = None) -> None:
        os.set_blocking(descriptor, False)
        stream = Stream(descriptor, local_rank)
        self.streams.append(stream)
        self.selector.register(descriptor, selectors.EVENT_READ, stream)

    def ranks(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.local_rank is not None]

    def have_all_begun(self) -> bool:
        return all(stream.worker for stream in self.ranks())

    def since_meeting(self) -> float:
        """Return the seconds since all ranks have begun, or 0 before."""
        return time.time() - self.met_time if self.met_time else 0.0

    def have_all_ended(self) -> bool:
        return all(stream.ended for stream in self.ranks())

    def ended_ranks(self) -> list[tuple[int, int | None]]:
        """Return (rank, exit code) of the ended ranks, the first one first.

        If all have ended, and neither torchrun nor the output tells of a failure, they have
        succeeded.
        """
        has_error = any(stream.exception.counts for stream in self.ranks())
        unknown = 0 if self.rests() and not has_error else None
        ended = [stream for stream in self.ranks() if stream.ended]
        ended.sort(key=lambda stream: stream.ended)
        found = []
        for stream in ended:
            code = unknown if stream.exit_code is None else stream.exit_code
            found.append((stream.worker.get("rank", -1), code))
        return found

    def rests(self) -> bool:
        """Return True if all ranks have ended a while ago, and only torchrun may be left."""
        latest = self.now - REST_SECONDS
        return all(0.0 < stream.ended < latest for stream in self.ranks())

    def copy(self, seconds: float) -> None:
        """Copy output for at most so many seconds."""
        readable = self.selector.select(seconds)
        self.before, self.now = self.now, time.time()
        for key, _ in readable:
            if key.fd == key.data.process:
                self.note_end(key.data)
            # The second read may find the end of the pipe at the same time as its last output.
            elif self.read(key.data):
                self.read(key.data)
        for stream in self.streams:
            self.write(stream, stream.take_bar(self.now))

    def end(self) -> None:
        """Copy the rest of the output of ended processes."""
        self.before, self.now = self.now, time.time()
        for stream in self.streams:
            while stream.is_open and self.read(stream):
                pass
            self.close(stream)
            self.note_end(stream)

    def read(self, stream: Stream) -> bool:
        """Copy some output to the container's log. Return False if nothing was read."""
        try:
            data = os.read(stream.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if data and stream.worker:
            self.note_heartbeat()
        had_begun = bool(stream.worker)
        self.write(stream, stream.take(data, self.now))
        if stream.worker and not had_begun:
            self.watch_process(stream)
            self.met_time = self.now if self.have_all_begun() else 0.0
        if not data:
            self.close(stream)
        return bool(data)

    @property
    def writes_steadily(self) -> bool:
        return self.windows >= WINDOWS

    def note_heartbeat(self) -> None:
        self.last_time = self.now
        window = int(self.now / self.window) if self.window else 0
        self.windows += window != self.last_window
        self.last_window = window

    def watch_process(self, stream: Stream) -> None:
        """Watch for the end of a rank's process: its children may keep the pipe open.

        If Python or the kernel does not support this, the end of the pipe counts.
        """
        try:
            stream.process = os.pidfd_open(stream.worker["process"])
            self.selector.register(stream.process, selectors.EVENT_READ, stream)
        except ProcessLookupError:
            self.note_end(stream)
        except (OSError, AttributeError):
            return

    def note_end(self, stream: Stream) -> None:
        if not stream.ended:
            stream.open_at = self.before
            stream.ended = self.now
            stream.exit_code = exit_code_of(stream.worker.get("process", 0))
        if stream.process is not None:
            self.selector.unregister(stream.process)
            os.close(stream.process)
            stream.process = None

    def close(self, stream: Stream) -> None:
        if stream.is_open:
            stream.is_open = False
            self.selector.unregister(stream.descriptor)
            os.close(stream.descriptor)
            if stream.process is None:
                self.note_end(stream)

    def write(self, stream: Stream, lines: list[bytes]) -> None:
        if lines:
            write(b"".join(self.marked(stream, line) for line in lines))

    def marked(self, stream: Stream, line: bytes) -> bytes:
        """Return a line with its rank. Lines of JSON and marked lines keep their form."""
        _, entries = object_at_end(line)
        self.take_figures(entries)
        is_json = line.startswith(b"{") and line.rstrip().endswith(b"}")
        has_peers = stream.worker and len(self.ranks()) > 1
        if is_json or not has_peers:
            return line
        mark = b"[rank%d]: " % stream.worker["rank"]
        return line if line.startswith(mark) else mark + line

    def take_figures(self, entries: dict[str, Any]) -> None:
        if self.attempt < 0:
            # The figures of a setup are not those of a training.
            return
        numbers = {}
        for name, value in entries.items():
            if type(value) in (int, float):
                numbers[name] = value
        for name in FIGURES:
            if name in numbers:
                self.figures[name] = numbers[name]
        step = numbers.get("resumed_step", numbers.get("step"))
        if entries.get("event") == "checkpoint":
            self.checkpoint = step
        if "step" in numbers:
            self.trained.setdefault(self.attempt, self.now)
            drop_oldest(self.trained)
        if step is not None:
            first, _ = self.steps.pop(self.attempt, (step, step))
            self.steps[self.attempt] = (first, step)
            drop_oldest(self.steps)


def drop_oldest(by_attempt: dict[int, Any]) -> None:
    while len(by_attempt) > ATTEMPTS:
        del by_attempt[min(by_attempt)]


def log(text: str) -> None:
    write(f"{NOTICE}{text}\n".encode())


def write(data: bytes) -> None:
    """Write to the container's log. Without a log the training goes on."""
    view = memoryview(data)
    with suppress(OSError):
        while view:
            written = os.write(1, view)
            view = view[written:]
