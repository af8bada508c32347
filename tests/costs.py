"""Measure the wall and CPU time of each test, and print a table of the layers at the end of a run.

The CPU time includes pytest and the processes started by it. The rest of the machine's CPU time is
that of the Docker engine's programs, such as the nodes of the cluster.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

SLOWEST = 10

# The table of all tests, separated by tabs: wall s, CPU s, seconds from the start of the run to the
# end of the test, the worker and the name.
ROOT = Path(__file__).parents[1]
EACH = ROOT / "build" / "test-costs.tsv"

# pytest-xdist carries a report's attributes to the printing process.
ATTRIBUTE = "costs"


def cpu_seconds() -> float:
    """Return the CPU time of this process, its children, and what these have waited for.

    A search for all descendants would take longer than most tests.
    """
    total = sum(os.times()[:4])
    for process in children():
        with suppress(psutil.Error):
            total += sum(psutil.Process(process).cpu_times()[:4])
    return total


def children() -> list[int]:
    """Return the child processes not yet waited for, on Linux."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def busy_seconds() -> float:
    """Return the CPU time used by the machine since its start."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


@dataclass
class Cost:
    """Seconds of wall and of CPU time, and the number of tests."""

    wall: float = 0.0
    cpu: float = 0.0
    tests: int = 0

    def add(self, other: "Cost") -> None:
        self.wall += other.wall
        self.cpu += other.cpu
        self.tests += other.tests


class Meter:
    """Measure the phases of each test in its process."""

    def __init__(self) -> None:
        self._before = (time.monotonic(), cpu_seconds())

    def pytest_runtest_logstart(self) -> None:
        # The test has waited for its turn on the cluster before.
        self._before = (time.monotonic(), cpu_seconds())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        now = (time.monotonic(), cpu_seconds())
        wall, cpu = (after - before for after, before in zip(now, self._before, strict=True))
        # If nothing has waited for a process, its CPU time is lost at its end.
        setattr(report, ATTRIBUTE, [wall, max(0.0, cpu)])
        self._before = now
        return report


class Table:
    """Add the costs up, and print them after the tests."""

    def __init__(self) -> None:
        self._began = (time.monotonic(), busy_seconds())
        self._tests: dict[str, Cost] = defaultdict(Cost)
        # When each test ended, in seconds since the start of the run, and its worker.
        self._ends: dict[str, tuple[float, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        wall, cpu = getattr(report, ATTRIBUTE, (0.0, 0.0))
        self._tests[report.nodeid].add(Cost(wall, cpu, report.when == "call"))
        worker = getattr(report, "worker_id", "")
        self._ends[report.nodeid] = (time.monotonic() - self._began[0], worker)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._tests) < SLOWEST:
            return
        terminalreporter.section("costs")
        for line in self.lines():
            terminalreporter.write_line(line)
        rows = []
        for test, cost in self._tests.items():
            end, worker = self._ends[test]
            rows.append(f"{cost.wall:.2f}\t{cost.cpu:.2f}\t{end:.1f}\t{worker}\t{test}\n")
        EACH.parent.mkdir(exist_ok=True)
        EACH.write_text("".join(rows))
        terminalreporter.write_line(f"of each test: {EACH.relative_to(ROOT)}")

    def lines(self) -> Iterator[str]:
        """Yield the table: a row for each layer, then the slowest tests, then the whole."""
        layers: dict[str, Cost] = defaultdict(Cost)
        for nodeid, cost in self._tests.items():
            layers["/".join(nodeid.split("/")[:2])].add(cost)
        yield f"{'layer':<32}{'tests':>7}{'wall s':>9}{'CPU s':>9}"
        for layer, cost in sorted(layers.items()):
            yield f"{layer:<32}{cost.tests:>7}{cost.wall:>9.0f}{cost.cpu:>9.0f}"
        wall = time.monotonic() - self._began[0]
        busy = busy_seconds() - self._began[1]
        rest = busy - sum(cost.cpu for cost in layers.values())
        yield f"{'Docker, the machine':<32}{'':>7}{'':>9}{rest:>9.0f}"
        yield f"{'all, side by side':<32}{len(self._tests):>7}{wall:>9.0f}{busy:>9.0f}"
        yield ""
        yield f"the {SLOWEST} slowest tests: wall s, CPU s"
        slowest = sorted(self._tests.items(), key=lambda test: -test[1].wall)
        for nodeid, cost in slowest[:SLOWEST]:
            yield f"{cost.wall:>7.0f}{cost.cpu:>7.0f}  {nodeid}"
