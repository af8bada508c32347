"""The ports of a run on this machine."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddpjob.local import ports

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.fixture
def only_port(monkeypatch):
    """Return the one port to choose from."""
    port = ports.free_port()
    ports._reserved.pop().close()
    monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
    return port


def test_a_port_in_use_is_not_chosen(only_port):
    with socket.socket() as server:
        server.bind(("127.0.0.1", only_port))
        server.listen()
        words = f"all ports from {only_port} to {only_port} are in use"
        with pytest.raises(OSError, match=words):
            ports.free_port()
    assert ports.free_port() == only_port


def test_a_port_is_chosen_once_before_its_server_listens(only_port):
    assert ports.free_port() == only_port
    with pytest.raises(OSError, match="are in use"):
        ports.free_port()


def test_another_process_does_not_choose_the_port(only_port):
    assert ports.free_port() == only_port
    script = f"""
from ddpjob.local import ports
ports.PORTS = range({only_port}, {only_port} + 1)
ports.free_port()
"""
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "are in use" in other.stderr


def test_a_server_may_listen_on_the_chosen_port(only_port):
    with socket.create_server(("", ports.free_port())) as server:
        assert server.getsockname()[1] == only_port


@pytest.mark.skipif(not RANGE.exists(), reason="only Linux tells its ports for connections")
def test_no_connection_of_another_program_gets_a_port_of_a_run():
    first, _ = map(int, RANGE.read_text().split())
    assert ports.PORTS.stop <= first
