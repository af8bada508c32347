"""The port of the agent: /ready, /metrics and /state."""

import json
import os
import select
import socket
import time

import pytest

from .kubelet import wait_until

# The workers meet when the test lets them, and train until it ends them.
TRAINS = """
import json, os, time
folder = os.path.dirname(os.path.abspath(__file__))
while not os.path.exists(os.path.join(folder, "train")):
    time.sleep(0.02)
open(os.environ["DDP_HEARTBEAT_FILE"], "w").close()
print(json.dumps({"event": "train", "step": 12, "loss": 0.5, "samples_per_second": 99.5,
                  "message": "secret", "epoch": True}))
while not os.path.exists(os.path.join(folder, "end")):
    time.sleep(0.02)
os.kill(os.getpid(), 15)
"""


def test_a_pod_is_ready_while_its_workers_train(pod, port):
    found = pod(TRAINS, port=port)
    found.start()
    wait_until(lambda: answers(found))
    assert found.get("/ready")[0] == 503
    found.assign(0, ranks=2)
    wait_until(found.is_ready)

    # Between two attempts the pod is not ready.
    (found.folder / "train").touch()
    (found.folder / "end").touch()
    found.wait_for("waiting for the next attempt")
    assert found.get("/ready")[0] == 503
    (found.folder / "end").unlink()
    found.assign(1, ranks=2)
    wait_until(found.is_ready)


def test_at_least_one_probe_fails_in_each_attempt(pod, port):
    found = pod(TRAINS, port=port)
    found.assign(0)
    found.start()
    found.wait_for("begins")
    # /metrics is no probe.
    wait_until(lambda: b"ddpjob_agent_ready 1" in found.get("/metrics")[1].encode())
    assert [found.get("/ready")[0] for _ in range(3)] == [503, 200, 200]


def test_a_pod_whose_heartbeat_is_old_is_not_ready(pod, port):
    found = pod("import time; time.sleep(600)", port=port, hang_seconds=600.0)
    found.assign(0)
    found.start()
    wait_until(found.is_ready)
    beat = found.run_folder / "heartbeat"
    beat.touch()
    assert found.is_ready()
    # A beat before this attempt does not count for it.
    os.utime(beat, (time.time() - 5000, time.time() - 5000))
    assert found.is_ready()


def test_metrics_are_numbers_only(pod, port):
    found = pod(TRAINS, port=port)
    found.assign(3)
    found.start()
    (found.folder / "train").touch()
    found.wait_for("secret")
    status, body = found.get("/metrics")
    assert status == 200
    numbers = dict(line.rsplit(" ", 1) for line in body.splitlines())
    assert all(float(value) >= 0 for value in numbers.values())
    assert numbers["ddpjob_agent_attempt"] == "3"
    assert numbers["ddpjob_agent_step"] == "12"
    assert numbers["ddpjob_agent_loss"] == "0.5"
    assert numbers["ddpjob_agent_samples_per_second"] == "99.5"
    assert "ddpjob_agent_epoch" not in numbers
    assert float(numbers["ddpjob_agent_heartbeat_age_seconds"]) < 10
    activities = [name for name in numbers if "activity=" in name]
    assert len(activities) == 5
    assert "secret" not in body


def test_other_requests_get_no_answer(pod, port):
    found = pod(TRAINS, port=port)
    found.start()
    wait_until(lambda: answers(found))
    assert found.get("/")[0] == 404
    assert found.get("/../../etc/passwd")[0] == 404
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"\xff\x00\r\n\r\n")
        assert b"404" in connection.recv(100)
    # Silent clients do not keep others waiting.
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    assert found.get("/ready")[0] == 503
    for connection in silent:
        connection.close()


def test_a_kubelet_on_a_busy_node_may_send_its_request_late(pod, port):
    found = pod(TRAINS, port=port)
    found.start()
    wait_until(lambda: answers(found))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        closed, _, _ = select.select([connection], [], [], 0.5)
        assert not closed
        connection.sendall(b"GET /ready HTTP/1.1\r\n\r\n")
        assert b"503" in connection.recv(100)


def test_a_port_that_is_in_use_is_reported(pod):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        found = pod(port=other.getsockname()[1])
        found.assign(0)
        found.start()
        assert found.end() == 1
    assert "Address already in use" in found.report["exception"]


def answers(found):
    try:
        found.get("/ready")
        return True
    except OSError:
        return False


def test_the_state_tells_what_the_operator_cannot_see(pod, port):
    script = """
import json, os, time
print(json.dumps({"event": "start", "resumed_step": 10}))
print(json.dumps({"event": "checkpoint", "step": 11}))
print(json.dumps({"event": "train", "step": 12}))
while os.environ["RANK"] == "5":
    open(os.environ["DDP_HEARTBEAT_FILE"], "w").close()
    time.sleep(0.05)
"""
    found = pod(script, port=port)
    found.assign(3, ranks=2, flags=["--ranks=2", "--first-rank=4"])
    found.start()
    wait_until(lambda: found.is_up() and state_of(found)["ended"], lambda: found.log)
    wait_until(lambda: state_of(found)["heartbeat"] is not None)
    state = state_of(found)
    assert state.pop("heartbeat") < 60
    assert state == {
        "attempt": 3,
        "activity": "ending",
        "stopped": False,
        "ended": [[4, 0]],
        "steps": [10, 12],
        "checkpoint": 11,
        "watched": True,
        "error": "",
    }


# As JSON, the last one has twelve bytes for each character.
@pytest.mark.parametrize("trouble", ["error: no such host é", "error: " + "😀" * 400])
def test_the_state_has_the_last_trouble_of_torchrun_and_is_small(pod, port, trouble):
    command = ["sh", "-c", f"yes '{trouble}' | head -n 2000; exec sleep 600"]
    found = pod(command=command, port=port)
    found.assign(0)
    found.start()
    wait_until(lambda: found.is_up() and state_of(found)["error"], lambda: found.log)
    status, body = found.get("/state")
    assert status == 200
    assert len(body) <= 4096
    assert json.loads(body)["error"] == trouble[:250]
    assert json.loads(body)["ended"] == []


def test_the_state_has_a_path_of_this_pod_alone(pod, port):
    # Without an assignment the state stays as it is between two requests.
    found = pod(TRAINS, port=port, state_path="/state/uid/1")
    found.start()
    wait_until(found.is_up)
    assert found.get("/state/uid/1") == found.get("/state")
    assert found.get("/state/uid/0")[0] == 404


def state_of(found):
    return json.loads(found.get("/state")[1])
