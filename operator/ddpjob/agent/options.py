"""The operator's choices for a pod."""

from __future__ import annotations

import json
from typing import NamedTuple


class Options(NamedTuple):
    """The arguments of the agent. The first one is a JSON object with all but the last field."""

    # Files: with the assignment, with the patterns of error messages, and for the termination
    # message. A folder for pipes and small files.
    assignment: str
    words: str
    message: str
    folder: str

    # A folder to empty between two attempts; one with `work`, `work.last` and others; and one with
    # the job's code. Each attempt gets the code in `work`, its working directory.
    clear: str | None
    work: str
    code: str | None

    # Shell text to run once, before the first attempt, and the longest time for it.
    setup: str | None
    setup_seconds: float

    # No other pod uses the files outside of these folders, nor System V IPC.
    own_files: bool
    own_ipc: bool

    # The port of the probes, /metrics and /state. `state_path` is a second path of the state. A pod
    # of another job does not have it: the address of a lost pod may belong to another one by now.
    port: str | None
    state_path: str

    # The command in place of torchrun, if any, and the first flags after it.
    command: list[str] | None
    flags: list[str]

    # File or Log, the longest time between two heartbeats, and the same before the first one.
    heartbeat: str
    hang_seconds: float | None
    first_seconds: float | None

    # torchrun and its workers are forks of a zygote.
    fast_start: bool

    # The words after torchrun's own flags.
    args: list[str]


def read_options(args: list[str]) -> Options:
    return Options(**json.loads(args[0]), args=args[1:])
