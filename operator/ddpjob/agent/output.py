"""Copy the output of torchrun and of the ranks into the container's log, in whole lines."""

from __future__ import annotations

import os
import selectors
import time
from contextlib import suppress
from typing import Any

from . import HEADER
from .files import read_json

# Bytes of output that are kept for the report, of a line that is kept whole, and of a line that may
# have figures.
TAIL, LINE, FIGURES_LINE = 16384, 4 << 20, 4096

# The beginning of a traceback. That of an exception group ends so, too.
TRACEBACK = b"Traceback (most recent call last):"

# Attempts whose steps are kept.
ATTEMPTS = 10

# Figures that /metrics takes from lines of JSON, such as those of ddp_trainer.
FIGURES = ("step", "steps", "epoch", "loss", "samples_per_second", "tokens_per_second")


class Stream:
    """The output of torchrun or of a rank. It comes in pieces, and leaves in whole lines.

    `worker` is what the first line of a rank's pipe says: its rank and its process.
    `traceback_time` is when the last traceback began. Between `open_at` and `ended`, it has ended.
    """

    def __init__(self, descriptor: int, local_rank: int | None = None) -> None:
        self.descriptor = descriptor
        self.local_rank = local_rank
        self.worker: dict[str, int] = {}
        self.partial = b""
        self.tail = b""
        self.traceback_time = 0.0
        self.open_at = 0.0
        self.ended: float | None = None

    def take(self, data: bytes) -> bytes:
        """Return the lines that `data` completes. Empty `data` is the end.

        A progress bar ends its lines with a carriage return, and the next one follows.
        """
        self.partial += data
        end = max(self.partial.rfind(b"\n"), self.partial.rfind(b"\r", 0, -1)) + 1
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


class Output:
    """The streams of an attempt, and the figures in them.

    `steps` has the first and the last step of the last attempts, by their number, as far as lines
    of JSON name them.
    """

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        # The time of all output that one `select` found. Its order is not known.
        self.now = self.before = time.time()
        self.steps: dict[int, tuple[float, float]] = {}
        self.begin(-1)

    def begin(self, attempt: int) -> None:
        """Forget the streams and the figures of the last attempt."""
        self.attempt = attempt
        self.streams: list[Stream] = []
        self.figures: dict[str, float] = {}
        self.last_time = 0.0

    def add(self, descriptor: int, local_rank: int | None = None) -> None:
        os.set_blocking(descriptor, False)
        stream = Stream(descriptor, local_rank)
        self.streams.append(stream)
        self.selector.register(descriptor, selectors.EVENT_READ, stream)

    def ranks(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.local_rank is not None]

    def have_all_begun(self) -> bool:
        return all(stream.worker for stream in self.ranks())

    def have_all_ended(self) -> bool:
        return all(stream.ended for stream in self.ranks())

    def copy(self, seconds: float) -> None:
        """Copy output for at most so many seconds."""
        readable = self.selector.select(seconds)
        self.before, self.now = self.now, time.time()
        for key, _ in readable:
            # A pipe holds no more than one read takes, so the second one finds the end of a rank
            # that ended before. What another rank writes after that is not found earlier.
            if self.read(key.data):
                self.read(key.data)

    def end(self) -> None:
        """Copy what is left of processes that have ended."""
        self.before, self.now = self.now, time.time()
        for stream in self.streams:
            while stream.ended is None and self.read(stream):
                pass
            self.close(stream)

    def read(self, stream: Stream) -> bool:
        """Copy some output to the container's log. Return False if nothing was read."""
        try:
            data = os.read(stream.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if data and stream.worker:
            self.last_time = self.now
        text = stream.take(data)
        if TRACEBACK in text:
            stream.traceback_time = self.now
        lines = text.splitlines(keepends=True)
        write(b"".join(self.marked(stream, line) for line in lines))
        if not data:
            self.close(stream)
        return bool(data)

    def close(self, stream: Stream) -> None:
        if stream.ended is None:
            stream.open_at, stream.ended = self.before, self.now
            self.selector.unregister(stream.descriptor)
            os.close(stream.descriptor)

    def marked(self, stream: Stream, line: bytes) -> bytes:
        """Return a line with its rank. Lines of JSON keep their form, and so do marked ones."""
        if line.startswith(b"{") and line.rstrip().endswith(b"}"):
            self.take_figures(read_json(line) if len(line) < FIGURES_LINE else {})
            return line
        has_peers = stream.worker and len(self.ranks()) > 1
        mark = b"[rank%d]: " % stream.worker["rank"] if has_peers else b""
        return line if line.startswith(mark) else mark + line

    def take_figures(self, entries: dict[str, Any]) -> None:
        numbers = {name: value for name, value in entries.items() if type(value) in (int, float)}
        self.figures.update((name, numbers[name]) for name in FIGURES if name in numbers)
        step = numbers.get("resumed_step", numbers.get("step"))
        if step is not None:
            first, _ = self.steps.pop(self.attempt, (step, step))
            self.steps[self.attempt] = (first, step)
            self.steps = dict(list(self.steps.items())[-ATTEMPTS:])


def log(text: str) -> None:
    write(f"ddpjob agent: {text}\n".encode())


def write(data: bytes) -> None:
    """Write to the container's log. Without a log the training goes on."""
    view = memoryview(data)
    with suppress(OSError):
        while view:
            view = view[os.write(1, view) :]
