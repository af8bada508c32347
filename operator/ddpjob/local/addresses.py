"""Addresses of agents on this machine."""

from collections.abc import Callable

from ddpjob.core.api.job import Job


class LocalAddresses:
    """Spellings of 127.0.0.1 that sort by node index, and free ports.

    Each attempt has a rendezvous port of its own, and each pod a port for its agent.

    c10d assigns ranks by the string order of the agents' addresses, and as strings
    `127.0.0.1 < 127.0.00.1 < 127.0.000.1`. On Linux and macOS getaddrinfo reads all of them as
    127.0.0.1. Other loopback addresses, such as 127.0.0.2, are not set up on macOS. Node 0 has the
    plain spelling, because its address becomes MASTER_ADDR.
    """

    def __init__(self, free_port: Callable[[], int]) -> None:
        self._free_port = free_port
        # By attempt. A closed port may stay busy for a minute, so an attempt gets a new one.
        self._ports: dict[int, int] = {}
        # By the attempt of a pod's creation, and its index.
        self._agent_ports: dict[tuple[int, int], int] = {}

    def endpoint(self, job: Job) -> str:
        attempt = job.status.attempt.number or 0
        if attempt not in self._ports:
            self._ports[attempt] = self._free_port()
        return f"127.0.0.1:{self._ports[attempt]}"

    def local(self, job: Job, index: int) -> str:
        # One more zero for each index, since "." sorts before "0".
        zeros = "0" * (index + 1)
        return f"127.0.{zeros}.1"

    def port(self, job: Job, index: int) -> int:
        pod = (job.status.attempt.born(index), index)
        if pod not in self._agent_ports:
            self._agent_ports[pod] = self._free_port()
        return self._agent_ports[pod]
