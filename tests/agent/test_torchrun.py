"""The agent with the real torchrun."""

import signal
from types import SimpleNamespace

import pytest

from ddpjob.agent.times import shutdown_seconds
from ddpjob.agent.torchrun import with_time_limits
from ddpjob.core.api.torchrun_flags import FLAGS

pytest.importorskip("torch")

# Without a command, the agent starts torchrun itself.
TORCHRUN: list[str] = []

SUMS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
try:
    total = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(total)
    print("total", total.item())
    if dist.get_rank() == 1:
        raise ValueError("bad batch")
    dist.barrier()
finally:
    # Otherwise gloo's threads may abort the process at its end.
    dist.destroy_process_group()
"""


def flags(port, ranks=2):
    return [
        "--nnodes=1",
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        "--rdzv-id=test",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-conf=is_host=true",
        "--local-addr=127.0.0.1",
    ]


def test_a_job_of_two_ranks_succeeds(pod, port):
    found = pod(SUMS.replace("== 1", "== 9"), command=TORCHRUN)
    found.assign(0, ranks=2, flags=flags(port))
    found.start()
    assert found.end() == 0
    assert "[rank0]: total 3.0\n" in found.log
    assert "[rank1]: total 3.0\n" in found.log
    assert found.report["cause"] == "Succeeded"


def test_the_rank_that_failed_first_is_reported_and_its_peer_is_not(pod, port):
    found = pod(SUMS, command=TORCHRUN)
    found.assign(0, ranks=2, flags=flags(port))
    found.start()
    assert found.end() == 1
    report = found.report
    assert (report["cause"], report["rank"], report["localRank"]) == ("Failure", 1, 1)
    assert (report["exitCode"], report["exception"]) == (1, "ValueError: bad batch")
    # torchrun's own summary stays in the log.
    assert "Root Cause (first observed failure):" in found.log


def test_a_rank_that_its_peer_overtakes_at_the_end_is_reported(pod, port):
    # torchrun sees rank 0 first, which has lost its peer. Then it stops rank 1 during its exit.
    pause = "import atexit, signal; atexit.register(signal.pause)"
    found = pod(SUMS.replace("raise", f"{pause}; raise"), command=TORCHRUN)
    found.assign(0, ranks=2, flags=flags(port))
    found.start()
    assert found.end() == 1
    report = found.report
    assert (report["cause"], report["rank"], report["exitCode"]) == ("Failure", 1, 1)
    assert report["exception"] == "ValueError: bad batch"


def test_a_signal_has_its_name(pod, port):
    found = pod("import os; os.kill(os.getpid(), 9)", command=TORCHRUN)
    found.assign(0, flags=flags(port, ranks=1))
    found.start()
    assert found.end() == 1
    assert (found.report["exitCode"], found.report["exception"]) == (-9, "SIGKILL")


def test_a_flag_that_torchrun_does_not_know_ends_the_pod(pod):
    found = pod(command=TORCHRUN)
    found.assign(0, flags=["--no-such-flag"])
    found.start()
    assert found.end() == 2
    assert (found.report["cause"], found.report["exitCode"]) == ("Failure", 2)
    assert "no-such-flag" in "\n".join(found.report["lines"])


def shorten(found, **limits):
    """Shorten torch's default time limits: they are in the arguments of its agent."""
    program = found.programs / "torchrun.py"
    text = program.read_text()
    before = "    launcher.LocalElasticAgent = with_time_limits"
    assert text.count(before) == 1
    lines = ["    import inspect"]
    for name, (method, seconds) in limits.items():
        function = f"api.LocalElasticAgent.{method}"
        names = f"[p.name for p in inspect.signature({function}).parameters.values()"
        names += " if p.default is not p.empty]"
        lines += [
            f"    values = dict(zip({names}, {function}.__defaults__))",
            f"    assert {name!r} in values",
            f"    {function}.__defaults__ = tuple({{**values, {name!r}: {seconds}}}.values())",
        ]
    program.write_text(text.replace(before, "\n".join([*lines, before])))


def two_nodes(pod, port, script, host):
    """Start two pods of one attempt, with the rendezvous in one, and wait for "begins"."""
    found = []
    for node in range(2):
        each = pod(script, command=TORCHRUN)
        shorten(each, exit_barrier_timeout=("__init__", 0.5))
        is_host = str(node == host).lower()
        changes = {
            "--nnodes=1": "--nnodes=2",
            "--rdzv-conf=is_host=true": f"--rdzv-conf=is_host={is_host}",
        }
        words = [changes.get(flag, flag) for flag in flags(port, ranks=1)]
        each.assign(0, flags=words, env={"NODE": str(node)}, wait=0.0)
        found.append(each.start())
    for each in found:
        each.wait_for("begins\n")
    return found


LAG = """
import os, time
print("begins")
time.sleep(5 * (os.environ["NODE"] == "1"))
print("ends")
"""


@pytest.mark.parametrize("host", [0, 1])
def test_a_node_may_lag_behind_the_others_as_long_as_it_needs(pod, port, host):
    # By default, the first node would wait for 0.5 s, and the rendezvous on it would end.
    for each in two_nodes(pod, port, LAG, host):
        assert each.end() == 0, each.log
        assert each.report["cause"] == "Succeeded"


def test_a_node_that_waits_for_another_one_can_be_stopped(pod, port):
    first, second = two_nodes(pod, port, LAG.replace("5 *", "600 *"), host=1)
    first.wait_for("ends\n")
    first.terminate()
    assert first.end() == 143
    assert first.report["cause"] == "Stopped"
    second.kill()


def test_all_ranks_have_the_time_of_the_pod_to_end_after_a_failure(pod, port):
    script = """
import os, signal, time
def save(number, frame):
    time.sleep(4)
    print("saved")
    raise SystemExit(1)
signal.signal(signal.SIGTERM, save)
open(f"{__file__}{os.environ['RANK']}", "w").close()
while not all(os.path.exists(f"{__file__}{rank}") for rank in range(2)):
    time.sleep(0.02)
if os.environ["RANK"] == "0":
    raise ValueError("bad batch")
time.sleep(600)
"""
    found = pod(script, command=TORCHRUN, env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"})
    shorten(found, timeout=("_shutdown", 1))
    found.assign(0, ranks=2, flags=flags(port), wait=0.0)
    found.start()
    assert found.end() == 1
    assert "saved" in found.log
    assert (found.report["rank"], found.report["exception"]) == (0, "ValueError: bad batch")


def test_the_table_of_flags_is_that_of_the_installed_torchrun():
    from torch.distributed.run import get_args_parser

    theirs = {}
    for action in get_args_parser()._actions:
        names = tuple(name for name in action.option_strings if name.startswith("--"))
        if names:
            letters = [name for name in action.option_strings if name not in names]
            theirs[names] = ("".join(letters), action.nargs != 0)
    ours = {flag.spellings: (flag.letter, flag.takes_value) for flag in FLAGS}
    # A new flag needs a row in FLAGS, to say whether it works in a DDPJob.
    assert ours == theirs


# A value for each working flag. --no-python has tests of its own, and --numa-binding needs GPUs.
VALUES = {
    "--start-method": "fork",
    "--monitor-interval": "0.2",
    "--event-log-handler": "console",
    "--role": "ranker",
}


def test_the_flags_that_work_have_their_effect_before_those_of_the_operator(pod, port):
    working = {flag.name for flag in FLAGS if not flag.instead}
    assert {*VALUES, "--virtual-local-rank"} == working - {"--no-python", "--numa-binding"}
    own = [*(word for flag in VALUES.items() for word in flag), "--virtual-local-rank"]
    script = "import os; print('role', os.environ['ROLE_NAME'], os.environ['LOCAL_RANK'])"
    found = pod(script, command=TORCHRUN, flags=own)
    found.assign(0, ranks=2, flags=flags(port))
    found.start()
    assert found.end() == 0
    assert "[rank1]: role ranker 0\n" in found.log
    # The handler of events writes them into torchrun's log.
    assert "torchelastic.worker.status" in found.log


def test_another_program_than_python_is_started_by_no_python(pod, port):
    found = pod(
        "#!/bin/sh\necho rank $RANK of $WORLD_SIZE", command=TORCHRUN, flags=["--no-python"]
    )
    (found.folder / "script.py").chmod(0o755)
    found.assign(0, ranks=2, flags=flags(port))
    found.start()
    assert found.end() == 0
    assert "rank 1 of 2\n" in found.log
    assert found.report["cause"] == "Succeeded"


def test_a_wrong_time_for_workers_to_end_is_left_to_torchrun():
    assert shutdown_seconds({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}) == 7.0
    assert shutdown_seconds({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}) == 30.0
    assert shutdown_seconds({}) == 30.0


class OlderAgent:
    """The agent of a node in torch 2.9: its workers have 30 s to end, whatever is set."""

    def __init__(self, **options):
        self.closed = []
        self._pcontext = SimpleNamespace(close=lambda *given: self.closed.append(given))

    def _shutdown(self, death_sig=signal.SIGTERM):
        self._pcontext.close(death_sig, 30)


def test_workers_of_an_older_torch_have_the_time_of_their_pod_to_end(monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "110")
    agent = with_time_limits(OlderAgent)()
    agent._shutdown()
    agent._shutdown(signal.SIGINT)
    agent._shutdown(death_sig=signal.SIGINT)
    first = [agent.closed[index] for index in (0, 2, 4)]
    assert first == [(signal.SIGTERM, 110), (signal.SIGINT, 110), (signal.SIGINT, 110)]
