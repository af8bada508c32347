"""Write a report as the termination message of the container."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

Report = dict[str, Any]

# Bytes of a termination message (the kubelet's limit), and of the job's result in it.
MESSAGE = 4096
RESULT = MESSAGE - 200

# Entries left out of a report if they are empty, or if it is too long.
FIGURES = ("steps", "total", "trained")

# A control sequence of a terminal, such as a colour.
COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def write(path: str, report: Report) -> None:
    """Write the termination message. A pod without it still has its exit code."""
    with suppress(OSError):
        Path(path).write_text(as_message(report))


def as_message(report: Report) -> str:
    """Return a report as a termination message. If it is too long, lines are left out first."""
    report = {"agent": 1, **report}
    if report.get("exception"):
        report["exception"] = printable(report["exception"])
    if report.get("lines"):
        report["lines"] = list(map(printable, report["lines"]))
    for name in FIGURES:
        if not report.get(name):
            report.pop(name, None)
    text = json.dumps(report)
    while len(text) > MESSAGE and report.get("lines"):
        report["lines"] = report["lines"][1:]
        text = json.dumps(report)
    if len(text) > MESSAGE:
        short = {name: value for name, value in report.items() if name not in FIGURES}
        if "exception" in short:
            short["exception"] = short["exception"][:200]
        text = json.dumps(short)
    return text


def printable(text: str) -> str:
    """Return a text without colours and other control characters."""
    shown = ""
    for one in COLOUR.sub("", text):
        if one.isprintable() or one == "\n":
            shown += one
        else:
            shown += " " if one.isspace() else "\N{REPLACEMENT CHARACTER}"
    return shown
