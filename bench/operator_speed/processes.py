"""CPU time and memory of the programs on the machine, as counted by the kernel."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.commands import CommandFailed, run

from .client import Client
from .cluster import NODE, SYSTEM

# The programs of the control plane with work to do while pods start.
PROGRAMS = ("kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler")

JOBS_RUNNING = re.compile(r'^ddpjob_jobs\{phase="Running"\} (\S+)$', re.MULTILINE)


@dataclass
class CpuClock:
    """The CPU time of programs, by process id in the kind node and on the machine itself."""

    in_node: Mapping[str, int]
    on_machine: Mapping[str, int]

    def seconds(self) -> dict[str, float]:
        """Return user and system time so far of all threads, in steps of 10 ms."""
        stats = _read_in_node(*(f"/proc/{pid}/stat" for pid in self.in_node.values())).splitlines()
        stats += [Path(f"/proc/{pid}/stat").read_text() for pid in self.on_machine.values()]
        programs = [*self.in_node, *self.on_machine]
        return {name: _cpu_seconds(stat) for name, stat in zip(programs, stats, strict=True)}


@dataclass
class OperatorProcess:
    """The operator's memory, and the number of Running jobs in its metrics."""

    client: Client
    pod: str
    pid: int

    def memory(self, field: str) -> float:
        """Return resident memory in units of 10^6 bytes: VmRSS now, VmHWM the maximum so far."""
        status = {}
        for line in _read_in_node(f"/proc/{self.pid}/status").splitlines():
            key, _, value = line.partition(":")
            status[key] = value
        kibibytes = int(status[field].split()[0])
        return kibibytes * 1024 / 1e6

    def jobs_running(self) -> int:
        """Return the operator's count of jobs with the phase Running in their written status."""
        path = f"/api/v1/namespaces/{SYSTEM}/pods/{self.pod}:8080/proxy/metrics"
        found = JOBS_RUNNING.search(self.client.text("GET", path))
        return round(float(found[1])) if found else 0


def _cpu_seconds(stat: str) -> float:
    """Return the fields utime and stime of a line of /proc/PID/stat together, in seconds."""
    # The name of the program, in brackets, may contain spaces. The fields come after it.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_seconds_of(pid: int) -> float:
    """Return the CPU time so far of a process of this machine."""
    return _cpu_seconds(Path(f"/proc/{pid}/stat").read_text())


def _read_in_node(*files: str) -> str:
    try:
        return run("docker", "exec", NODE, "cat", *files)
    except CommandFailed as error:
        raise RuntimeError("a process was restarted during the benchmark") from error
