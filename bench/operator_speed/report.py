"""The report in markdown: the tables, and the versions and the machine of the measurement."""

import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.cluster.commands import ROOT, run

from .cases import CASES, OURS, Shape
from .client import Client, Object
from .measure import Sample
from .targets import Target, select, spread


def report(samples: Sequence[Sample], goals: Sequence[Target], shapes: Sequence[Shape]) -> str:
    """Return tables of times, of CPU time and of targets, as medians with minimum and maximum."""
    lines = [*_times(samples, shapes), "", *_cpu(samples, shapes), ""]
    lines += ["| target | limit | median (min–max) | |", "|---|---|---|---|"]
    lines += [goal.row() for goal in goals]
    lines += ["", "Calls for our jobs, medians of all jobs together:"]
    for shape in shapes:
        lines.append(f"- {shape}: {_calls(select(samples, OURS, shape))}")
    return "\n".join(lines)


def _times(samples: Sequence[Sample], shapes: Sequence[Shape]) -> list[str]:
    header = ["jobs x nodes", "made by", "all pods exist, s", "all Running, s"]
    header += ["Running pods/s", "writes per job"]
    lines = [_row(header), "|---|---|---|---|---|---|"]
    for shape in shapes:
        for case in CASES:
            found = select(samples, case, shape)
            exist = spread(sample.exist for sample in found)
            running = spread(sample.running for sample in found)
            rate = spread((shape.pods / sample.running for sample in found), 0)
            writes = spread((sample.writes() / shape.jobs for sample in found), 1)
            lines.append(_row([str(shape), case, exist, running, rate, writes]))
    return lines


def _cpu(samples: Sequence[Sample], shapes: Sequence[Shape]) -> list[str]:
    programs = list(samples[0].cpu)
    header = ["CPU seconds (medians)", "made by", *programs]
    lines = [_row(header), "|---" * len(header) + "|"]
    for shape in shapes:
        for case in CASES:
            found = select(samples, case, shape)
            cells = []
            for program in programs:
                median = statistics.median(sample.cpu[program] for sample in found)
                cells.append(f"{median:.2f}")
            lines.append(_row([str(shape), case, *cells]))
    return lines


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _calls(samples: Sequence[Sample]) -> str:
    calls: set[str] = set()
    for sample in samples:
        calls.update(sample.calls)
    medians = []
    for call in sorted(calls):
        median = statistics.median(sample.calls.get(call, 0) for sample in samples)
        medians.append(f"{call} {median:.1f}")
    return ", ".join(medians)


def surroundings(client: Client) -> Object:
    """Return the date, the commit, the machine and the versions of a measurement."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "kubernetes": client.json("GET", "/version")["gitVersion"],
        "kwok": run("kwok", "--version").strip(),
        "kopf": importlib.metadata.version("kopf"),
    }


def _commit() -> str:
    """Return the commit, or an empty string outside a git repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor()
