"""The command line on a cluster, as someone uses it who has a script and no image of it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from ddpjob.core.api.yaml_text import load_yaml

from .builders import digits, script_job
from .cluster import PLAIN
from .commands import ROOT, wait_until
from .namespace import DEADLINE, Namespace

PAGE = ROOT / "docs" / "users" / "storage.md"

# A script that knows nothing of this project. Rank 3 fails in the first attempt, when the user has
# made a file in its working directory.
SCRIPT = """
import os, pathlib, signal, time
import helper
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
print(helper.greeting(rank), flush=True)
if os.environ["DDP_ATTEMPT"] == "0":
    pathlib.Path("out").mkdir(exist_ok=True)
    pathlib.Path(f"out/{rank}.pt").write_bytes(bytes(3 << 20) + str(rank).encode())
    dist.barrier()
    if rank == 0:
        pathlib.Path("written").touch()
    if rank == 3:
        while not pathlib.Path("fail").exists():
            time.sleep(0.1)
        raise ValueError("bad data")
    signal.pause()
# A rank that ended before a peer has connected to it would be a failure.
dist.barrier()
dist.destroy_process_group()
"""
HELPER = 'import built\n\n\ndef greeting(rank):\n    return f"hello from {built.WHAT} {rank}"\n'
# It builds a module beside the script. The attempt after a recovery in place needs it too.
SETUP = """echo "the setup of node $DDP_NODE_INDEX"
sleep 3
echo 'WHAT = "rank"' > built.py
"""


MEETING = """
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


class User:
    """Someone at a terminal, in a folder, with a kubeconfig and a namespace."""

    def __init__(self, namespace: Namespace, folder: Path) -> None:
        self.namespace = namespace
        self.folder = folder

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in the namespace of the test."""
        process = self.start(*words)
        stdout, stderr = process.communicate(timeout=DEADLINE)
        return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """Start a command in the namespace of the test."""
        programs = Path(sys.executable).parent
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.namespace.cluster.kubeconfig),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "COLUMNS": "200",
        }
        # kubectl's own commands and its plugins take this option before their other words too.
        count = 2 if words[:2] == ("kubectl", "ddpjob") else 1
        return subprocess.Popen(
            [*words[:count], "--namespace", self.namespace.name, *words[count:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=environment,
        )

    def page(self, job: str, node: int) -> str:
        """Return what `ddpjob ui` shows of a job, with the log of a node."""
        kubeconfig = str(self.namespace.cluster.kubeconfig)
        options = ("--namespace", self.namespace.name, "--kubeconfig", kubeconfig, "--port", "0")
        command = [sys.executable, "-m", "ddpjob.cli.main", "ui", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            address, token = process.stdout.readline().split()[-1].split("/?")
            path = f"{address}/jobs/{self.namespace.name}/{job}?node={node}"
            with build_opener(HTTPCookieProcessor()).open(f"{path}&{token}", timeout=60) as answer:
                found: str = answer.read().decode()
            process.terminate()
        return found


@pytest.fixture
def user(namespace: Namespace, tmp_path: Path) -> User:
    return User(namespace, tmp_path)


def test_a_script_of_ones_own_from_its_folder_to_its_end(user: User):
    project = user.folder / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    (project / "helper.py").write_text(HELPER)
    own = ("--script", "project/train.py", "--code", "project", "--image", PLAIN, "--setup", SETUP)
    # With it, a pod stays and has the logs of both attempts.
    stay = ("--set", "spec.recovery=InPlace")

    following = user.start("ddpjob", "submit", *own, *stay, "--nproc", "2", "--follow")
    look_into_its_pods(user)
    shown, errors = following.communicate(timeout=DEADLINE)

    # The whole run is shown, with the failure and the restart, and the exit code is the job's.
    assert following.returncode == 0, shown + errors
    assert "ddpjob/train created" in shown
    assert "runs spec.setup" in shown
    assert "Restarting" in shown
    assert "Complete" in shown

    # All nodes and attempts, then less of it.
    everything = user.run("kubectl", "ddpjob", "logs", "train").stdout
    for rank in range(4):
        line = f"[n{rank // 2}] [rank{rank}]: hello from rank {rank}"
        assert everything.splitlines().count(line) == 2
    # Each pod has run the setup once. The pod of the failed rank was made anew.
    setups = [everything.count(f"[n{node}] the setup of node {node}\n") for node in range(2)]
    assert setups == [1, 2]
    assert "ValueError: bad data" in everything
    of_one = user.run("ddpjob", "logs", "train", "--rank", "3", "--attempt", "1").stdout
    assert of_one.splitlines() == ["[n1] [rank3]: hello from rank 3"]
    of_a_node = user.run("ddpjob", "logs", "train", "--node", "0", "--no-prefix").stdout
    assert "rank 1" in of_a_node
    assert "rank 2" not in of_a_node

    # Why it restarted, and its end for CI.
    status = user.run("ddpjob", "status", "train").stdout
    assert "rank 3" in status
    assert "ValueError: bad data" in status
    waited = user.run("ddpjob", "wait", "train", "--timeout", "10s")
    assert (waited.returncode, waited.stdout.startswith("train Complete")) == (0, True)

    # The code goes with the job.
    assert user.run("ddpjob", "delete", "train").returncode == 0
    wait_until(
        "the ConfigMap of the code is gone",
        lambda: "train-" not in user.namespace.kubectl("get", "configmaps", "--output", "name"),
        60,
    )


def look_into_its_pods(user: User) -> None:
    """Copy what the ranks of the first attempt have written, then let rank 3 fail."""
    execute = ("ddpjob", "exec", "train")
    # Pods stay once they have trained.
    user.namespace.wait_for_status("train", phase="Running", nodesReady="2/2")
    wait_until(
        "rank 0 has written",
        lambda: user.run(*execute, "--", "test", "-e", "written").returncode == 0,
        180,
        lambda: user.run("ddpjob", "status", "train").stdout,
    )
    assert user.run(*execute, "--", "pwd").stdout == "/ddpjob/work\n"

    one = user.run("ddpjob", "cp", "train:3:out/3.pt", "three.pt")
    assert (one.returncode, one.stdout) == (0, "three.pt: 3.1 MB\n"), one.stderr
    assert (user.folder / "three.pt").read_bytes() == bytes(3 << 20) + b"3"
    whole = user.run("ddpjob", "cp", "train:2:out", ".")
    assert (whole.returncode, whole.stdout) == (0, "out: 2 files, 6.3 MB\n"), whole.stderr
    assert {path.name for path in (user.folder / "out").iterdir()} == {"2.pt", "3.pt"}
    missing = user.run("ddpjob", "cp", "train:0:out/9.pt", ".")
    assert (missing.returncode, "has no 'out/9.pt'" in missing.stderr) == (2, True)

    assert "2/2" in user.run("ddpjob", "list").stdout
    assert user.run(*execute, "--node", "1", "--", "sh", "-c", "touch fail; exit 7").returncode == 7


def test_the_checkpoints_of_a_job_that_has_ended_are_copied_as_the_page_tells(user: User):
    """Run the commands of the page. The pods of the job are gone, and its folder is there."""
    user.namespace.claim("checkpoints")
    folder = user.namespace.folder("checkpoints") / "train"
    folder.mkdir()
    (folder / "last.pt").write_text("weights")
    section = PAGE.read_text().partition("### Copy checkpoints")[2].partition("\n## ")[0]
    manifest, *_ = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (user.folder / "reader.yaml").write_text(manifest.replace("my-image:1", PLAIN))

    commands = [line.split() for line in section.splitlines() if line.startswith("    kubectl ")]
    assert [words[1] for words in commands] == ["apply", "wait", "exec", "cp", "delete"]
    for words in commands:
        done = user.run(*words)
        assert done.returncode == 0, f"{words}: {done.stderr}"
    assert (user.folder / "train-checkpoints/last.pt").read_text() == "weights"


def test_the_logs_go_on_over_a_restart_of_the_command_and_of_the_job(user: User):
    user.namespace.apply(digits("digits", 6))
    followed = user.run("ddpjob", "logs", "digits", "--follow")
    assert followed.returncode == 0
    ends = [line for line in followed.stdout.splitlines() if '{"event": "end"' in line]
    assert len(ends) == 1
    assert "digits Complete" in followed.stderr

    restarted = user.run("ddpjob", "restart", "digits")
    assert (restarted.returncode, restarted.stdout) == (0, "digits restarted\n")
    assert user.run("ddpjob", "wait", "digits", "--timeout", "2m").returncode == 0

    # How far it is, in a list, for a person and as curves.
    assert "   138/138   " in user.run("ddpjob", "list").stdout
    assert "step 138/138, epoch 6/6" in user.run("ddpjob", "status", "digits").stdout
    assert user.run("ddpjob", "plot", "digits").stdout == "curves.png\n"
    assert (user.folder / "curves.png").read_bytes().startswith(b"\x89PNG")

    page = user.page("digits", node=1)
    assert "step 138/138, epoch 6/6" in page
    assert "curves.svg" in page
    assert "ddpjob agent: attempt 0 begins" in page


def test_doctor_finds_all_well(user: User):
    user.namespace.claim("checkpoints")
    wait_until(
        "the claim is bound",
        lambda: "Bound" in user.namespace.kubectl("get", "pvc", "checkpoints"),
        30,
    )

    def all_is_well() -> bool:
        found = user.run("ddpjob", "doctor")
        return (found.returncode, {line[:4] for line in found.stdout.splitlines()}) == (0, {"ok  "})

    # Another test may have stopped the operator for a moment.
    wait_until("all is well", all_is_well, 60, lambda: user.run("ddpjob", "doctor").stdout)


@pytest.mark.faults
def test_a_policy_that_keeps_the_pods_apart_is_named_until_another_admits_them(user: User):
    closed = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "closed"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
    }
    user.namespace.apply(closed, *script_job("apart", MEETING))
    status = user.namespace.wait_for_status("apart", reason="WaitingForPeers")
    assert "apart-0-1" in status["message"]
    found = " ".join(user.run("ddpjob", "doctor").stdout.split())
    assert "NetworkPolicy closed admits no such Ingress" in found

    page = (ROOT / "docs" / "users" / "teams.md").read_text()
    (admitting,) = [part for part in page.split("```") if "kind: NetworkPolicy" in part]
    user.namespace.apply(load_yaml(admitting.removeprefix("yaml")))
    assert user.namespace.wait_for_complete("apart")["attempt"]["number"] == 0
    found = " ".join(user.run("ddpjob", "doctor").stdout.split())
    assert "no NetworkPolicy keeps the pods of a job apart" in found
