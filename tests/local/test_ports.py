"""The ports of a run on this machine."""

import socket
from pathlib import Path

import pytest

from ddpjob.local import addresses

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_port_in_use_is_not_chosen(monkeypatch):
    port = addresses.free_port()
    monkeypatch.setattr(addresses, "PORTS", range(port, port + 1))
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()
        with pytest.raises(OSError, match=f"all ports from {port} to {port} are in use"):
            addresses.free_port()
    assert addresses.free_port() == port


@pytest.mark.skipif(not RANGE.exists(), reason="only Linux tells its ports for connections")
def test_no_connection_of_another_program_gets_a_port_of_a_run():
    first, _ = map(int, RANGE.read_text().split())
    assert addresses.PORTS.stop <= first
