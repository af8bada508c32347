"""The output of a pod: copied to its log, and passed on line by line."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from ddpjob.jobs.terminal import as_displayed

CHUNK_BYTES = 65536

# A kubelet keeps this much of a failed container's log as its termination message.
TAIL_BYTES = 2048


class Output:
    """Copies the output of a pod to `log`, and calls `on_line` for each line."""

    def __init__(self, log: Path, on_line: Callable[[str], None]) -> None:
        self._log = log
        self._on_line = on_line
        self._tail = b""

    @property
    def tail(self) -> str:
        """End of the output so far."""
        return self._tail.decode(errors="replace")

    async def copy(self, read_end: int) -> None:
        """Copy from a pipe until all of its writing ends are closed. Lines may have any length."""
        reader = asyncio.StreamReader()
        pipe = os.fdopen(read_end, "rb")
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        rest = b""
        with contextlib.closing(transport), self._log.open("wb") as log:
            while chunk := await reader.read(CHUNK_BYTES):
                log.write(chunk)
                log.flush()
                self._tail = (self._tail + chunk)[-TAIL_BYTES:]
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._report(line)
                # A progress bar may never end its line. Keep only its last state.
                rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]
        if rest:
            self._report(rest)

    def _report(self, line: bytes) -> None:
        self._on_line(as_displayed(line.decode(errors="replace")))
