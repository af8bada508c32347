"""What the agent of a pod costs on this machine: steps per second, memory and start.

    python -m bench.agent_cost --trials 5

Two ranks add small tensors with gloo and print a line for every hundred steps, once under torchrun
alone and once under the agent, in turns. The printed ratio compares the medians. The script
needs Linux.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ddpjob.core.agent_files import agent_files
from tests.agent.kubelet import agent_options

STEPS = 5_000

SCRIPT = f"""
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(1000)
for step in range(1000):
    dist.all_reduce(tensor)
began = time.monotonic()
for step in range({STEPS}):
    dist.all_reduce(tensor)
    if step % 100 == 0:
        print("step %d" % step, flush=True)
if dist.get_rank() == 0:
    print("steps per second: %.1f" % ({STEPS} / (time.monotonic() - began)), flush=True)
dist.barrier()
dist.destroy_process_group()
"""

FLAGS = [
    "--nnodes=1",
    "--nproc-per-node=2",
    "--max-restarts=0",
    "--rdzv-backend=c10d",
    "--rdzv-id=cost",
    "--rdzv-endpoint=127.0.0.1:29555",
    "--local-addr=127.0.0.1",
]


def speed_in(log: str) -> float:
    found = re.search(r"steps per second: ([\d.]+)", log)
    assert found, log
    return float(found[1])


def run_torchrun(folder: Path) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", *FLAGS, str(folder / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return speed_in(done.stdout)


def run_agent(folder: Path) -> tuple[float, float, float]:
    """Return (steps per second, MB of memory, seconds until torchrun begins)."""
    assignment = {"attempt": 0, "start": True, "flags": FLAGS, "env": {}, "ranks": 2}
    (folder / "assignment").write_text(json.dumps({**assignment, "grace": 0, "wait": 0}))
    (folder / "run").mkdir(exist_ok=True)
    options = agent_options(folder, port="0", hang_seconds=600, heartbeat="Log")
    words = [sys.executable, "-IS", str(folder / "agent"), "agent", json.dumps(options)]
    began = time.monotonic()
    agent = subprocess.Popen(
        [*words, str(folder / "train.py")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert agent.stdout
    # The agent prints its first line at the start of the attempt.
    log = agent.stdout.readline().decode()
    start = time.monotonic() - began
    memory = 0.0
    for line in agent.stdout:
        log += line.decode()
        if b"step 4900" in line:
            memory = memory_of(agent.pid)
    assert agent.wait() == 0, log
    return speed_in(log), memory, start


def memory_of(process: int) -> float:
    """Return the resident memory of a process, in MB."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found
    return int(found[1]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=5)
    trials = parser.parse_args().trials
    plain: list[float] = []
    with_agent: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "agent").mkdir()
        for file, text in agent_files().items():
            (folder / "agent" / file).write_text(text)
        (folder / "train.py").write_text(SCRIPT)
        for trial in range(trials):
            plain.append(run_torchrun(folder))
            with_agent.append(run_agent(folder))
            print(
                f"{trial + 1}/{trials}: {plain[-1]:.0f}, {with_agent[-1][0]:.0f} steps/s",
                flush=True,
            )
    speed, memory, start = (statistics.median(values) for values in zip(*with_agent, strict=True))
    print(f"\nsteps per second, agent over torchrun alone: {speed / statistics.median(plain):.3f}")
    print(f"resident memory of the agent: {memory:.1f} MB; start: {start:.2f} s")


if __name__ == "__main__":
    main()
