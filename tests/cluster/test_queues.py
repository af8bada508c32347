"""Jobs in a queue of a real Kueue: one test in `make test`, all in `make test-queues`.

INSTALL_KUEUE names a program to install Kueue into the cluster of the tests. The program gets the
name of the cluster. Kueue's configuration must name DDPJobs, see docs/users/queues.md.
"""

import json
import os
import random
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .builders import digits, unhurried_digits
from .cluster import NAME, PLAIN, WORKERS, Cluster
from .commands import ROOT, CommandFailed, Object, run, wait_until
from .namespace import Namespace
from .training import LONG, SHORT, assert_same_weights, weights

pytestmark = pytest.mark.alone

PAGE = ROOT / "docs" / "users" / "queues.md"

INSTALL = os.environ.get("INSTALL_KUEUE", ROOT.parent / "shared" / "lab" / "kueue")

API = "kueue.x-k8s.io/v1beta2"
SYSTEM = "kueue-system"
MANAGER = ("--namespace", SYSTEM, "deployment/kueue-controller-manager")
TEAM = "team"
BORROWERS = ("one", "two", "three")
REQUESTS = {"requests": {"cpu": "250m", "memory": "256Mi"}}

# Room for one job of two nodes, and for two.
QUOTA = [{"name": "cpu", "nominalQuota": "600m"}, {"name": "memory", "nominalQuota": "1Gi"}]
TWO_PLACES = [{"name": "cpu", "nominalQuota": "1"}, {"name": "memory", "nominalQuota": "1Gi"}]


def objects_of(namespace: str) -> list[Object]:
    """Return a queue with room for one job, and two priorities."""
    group = {
        "coveredResources": ["cpu", "memory"],
        "flavors": [{"name": "workers", "resources": QUOTA}],
    }
    labels = {"nodeLabels": {"kubernetes.io/os": "linux"}}
    queue = {
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [group],
    }
    return [
        {
            "apiVersion": API,
            "kind": "ResourceFlavor",
            "metadata": {"name": "workers"},
            "spec": labels,
        },
        {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": namespace}, "spec": queue},
        {
            "apiVersion": API,
            "kind": "LocalQueue",
            "metadata": {"name": TEAM},
            "spec": {"clusterQueue": namespace},
        },
        *(
            {
                "apiVersion": API,
                "kind": "WorkloadPriorityClass",
                "metadata": {"name": name},
                "value": value,
            }
            for name, value in (("low", 1), ("high", 100))
        ),
    ]


def admits(cluster: Cluster) -> bool:
    """Return True if Kueue's webhooks answer: they begin a moment after its pod is ready."""
    _, queue, *_ = objects_of("probe")
    command = ("create", "--dry-run=server", "--filename=-")
    try:
        cluster.kubectl(*command, stdin=json.dumps(queue))
    except CommandFailed:
        return False
    return True


def wait_for_kueue(cluster: Cluster) -> None:
    """Wait until only the newest pod of Kueue is left, and its webhooks answer."""
    cluster.kubectl("rollout", "status", *MANAGER, "--timeout=120s")
    pods = ("--namespace", SYSTEM, "get", "pods", "--output=name")
    wait_until("Kueue has one pod", lambda: len(cluster.kubectl(*pods).split()) == 1, 60)
    wait_until("the webhooks of Kueue answer", lambda: admits(cluster), 60)


@pytest.fixture(scope="module")
def with_kueue(cluster: Cluster) -> Iterator[None]:
    """Install Kueue for the tests of this module. Its webhooks concern all pods of the cluster."""
    if not Path(INSTALL).exists():
        pytest.skip("Kueue cannot be installed: INSTALL_KUEUE=PROGRAM names one that does it")
    run(str(INSTALL), NAME, KUBECONFIG=str(cluster.kubeconfig))
    wait_for_kueue(cluster)
    yield
    for kind in ("validating", "mutating"):
        found = cluster.kubectl("get", f"{kind}webhookconfigurations", "--output=name").split()
        cluster.kubectl("delete", *(name for name in found if "kueue" in name))
    # An API without a server would keep every namespace from its end.
    apis = cluster.kubectl("get", "apiservices", "--output=name").split()
    cluster.kubectl("delete", *(name for name in apis if "visibility.kueue" in name))
    cluster.kubectl("delete", "namespace", SYSTEM, "--wait=false")


@pytest.fixture
def team(namespace: Namespace, with_kueue: None) -> Iterator[Namespace]:
    """Return a namespace with the queue `team`, and with a claim for the checkpoints."""
    namespace.apply(*objects_of(namespace.name))
    namespace.claim("checkpoints")
    yield namespace
    namespace.kubectl("delete", "ddpjobs", "--all")
    namespace.cluster.kubectl("delete", "clusterqueue", namespace.name)


def in_queue(name: str, epochs: int, priority: str = "", **spec: object) -> tuple[Object, Object]:
    """Return the ConfigMap of a script, and a job for the queue `team`, training with pauses."""
    scripts, body = unhurried_digits(name, epochs, resources=REQUESTS, **spec)
    labels = {"kueue.x-k8s.io/queue-name": TEAM}
    if priority:
        labels["kueue.x-k8s.io/priority-class"] = priority
    body["metadata"]["labels"] = labels
    return scripts, body


def used_cpu(namespace: Namespace) -> str:
    """Return the CPU used by the jobs of the queue, as Kueue counts it."""
    path = "{.status.flavorsUsage[0].resources[?(@.name=='cpu')].total}"
    return namespace.kubectl("get", "clusterqueue", namespace.name, f"-o=jsonpath={path}")


def test_a_preempted_job_resumes_from_its_checkpoint(team: Namespace) -> None:
    team.apply(*in_queue("low", SHORT, "low"))
    team.wait_for_status("low", phase="Running")
    team.wait("low trains", lambda: team.progress("low-0-0", "train"))
    team.apply(*in_queue("high", 2, "high"))
    team.wait_for_status("low", reason="Preempted")
    team.wait_for_status("high", phase="Complete")
    status = team.wait_for_status("low", phase="Complete")
    assert status["restarts"] == 0
    first, second = sorted(status["attempts"], key=lambda one: one.get("attempt", 0))[:2]
    assert first["reason"] == "Preempted"
    assert 0 < second["firstStep"] <= first["lastStep"]
    wait_until("the room is given back", lambda: used_cpu(team) == "0", 30)


RACK = "example.com/rack"
HOST = "kubernetes.io/hostname"


@pytest.fixture
def with_topology(team: Namespace, cluster: Cluster) -> Iterator[None]:
    """Let the queue `team` know which nodes are near each other: each worker is a rack."""
    for number, node in enumerate(WORKERS):
        cluster.kubectl("label", "node", node, f"{RACK}=rack-{number}", "--overwrite")
    topology = {
        "apiVersion": API,
        "kind": "Topology",
        "metadata": {"name": "racks"},
        "spec": {"levels": [{"nodeLabel": RACK}, {"nodeLabel": HOST}]},
    }
    flavor = {
        "apiVersion": API,
        "kind": "ResourceFlavor",
        "metadata": {"name": "racks"},
        "spec": {"nodeLabels": {"kubernetes.io/os": "linux"}, "topologyName": "racks"},
    }
    team.apply(topology, flavor)
    group = {
        "coveredResources": ["cpu", "memory"],
        "flavors": [{"name": "racks", "resources": QUOTA}],
    }
    change = json.dumps({"spec": {"resourceGroups": [group]}})
    team.kubectl("patch", "clusterqueue", team.name, "--type=merge", "--patch", change)
    yield
    for node in WORKERS:
        cluster.kubectl("label", "node", node, f"{RACK}-")


@pytest.mark.queues
@pytest.mark.usefixtures("with_topology")
def test_pods_run_where_the_topology_of_the_queue_has_put_their_ranks(team: Namespace) -> None:
    topology = {"scheduling": {"topology": {"required": RACK}}}
    team.apply(*in_queue("near", 4, topologySpreadConstraints=[], **topology))
    team.wait_for_status("near", phase="Running")
    assert len(set(team.nodes_of("near").values())) == 1
    pods = team.pods("near").values()
    assert {pod["spec"]["nodeSelector"][HOST] for pod in pods} <= set(WORKERS)
    assert not any(pod["spec"].get("schedulingGates") for pod in pods)
    team.wait_for_status("near", phase="Complete")


def move_kueue_to(cluster: Cluster, node: str) -> None:
    """Let Kueue itself run on a node that stays."""
    change = json.dumps({"spec": {"template": {"spec": {"nodeSelector": {HOST: node}}}}})
    cluster.kubectl("patch", *MANAGER, "--patch", change)
    wait_for_kueue(cluster)


@pytest.mark.queues
@pytest.mark.usefixtures("with_topology")
def test_the_pods_of_a_dead_node_get_other_nodes_from_the_queue(
    team: Namespace, cluster: Cluster
) -> None:
    near = {"scheduling": {"topology": {"preferred": RACK}}}
    team.apply(*in_queue("train", LONG, topologySpreadConstraints=[], **near))
    team.wait_for_status("train", phase="Running")
    victim, *_ = team.nodes_of("train").values()
    (survivor,) = set(WORKERS) - {victim}
    move_kueue_to(cluster, survivor)
    # The operator gives a silent node up after 5 s.
    values = {"deadNodeSeconds": "5", r"nodeSelector.kubernetes\.io/hostname": survivor}
    cluster.install(**values)
    try:
        with cluster.paused(victim):
            team.wait_for_status("train", attempt=1, phase="Running")
            assert set(team.nodes_of("train").values()) == {survivor}
        team.wait_for_status("train", phase="Complete")
    finally:
        cluster.install()
    wait_until("the room is given back", lambda: used_cpu(team) == "0", 60)


@pytest.mark.queues
def test_a_queue_that_is_stopped_and_opened_stops_and_continues_its_job(team: Namespace) -> None:
    team.apply(*in_queue("train", LONG))
    team.wait_for_status("train", phase="Running")
    change = ("patch", "clusterqueue", team.name, "--type=merge", "--patch")
    team.kubectl(*change, '{"spec": {"stopPolicy": "HoldAndDrain"}}')
    team.wait_for_status("train", reason="ClusterQueueStopped")
    wait_until("the room is given back", lambda: used_cpu(team) == "0", 60)
    assert team.unfinished("train") == []
    team.kubectl(*change, '{"spec": {"stopPolicy": "None"}}')
    team.wait_for_status("train", phase="Running")


@pytest.mark.queues
def test_kueue_and_the_operator_are_killed_while_ten_jobs_go_through_two_places(
    team: Namespace, cluster: Cluster
) -> None:
    team.apply(*in_queue("undisturbed", 4))
    team.wait_for_complete("undisturbed")
    expected = weights(team, "undisturbed")

    _, queue, *_ = objects_of(team.name)
    (flavor,) = queue["spec"]["resourceGroups"][0]["flavors"]
    flavor["resources"] = TWO_PLACES
    team.apply(queue)
    jobs = [f"job-{number}" for number in range(10)]
    for job in jobs:
        team.apply(*in_queue(job, 4))
    dice = random.Random(7)
    kills = 0

    def all_are_complete() -> bool:
        nonlocal kills
        if kills < 6 and dice.random() < 0.1:
            kills += 1
            if kills % 2:
                cluster.kill_operator()
            else:
                how = ("--all", "--force", "--grace-period=0", "--wait=false")
                cluster.kubectl("delete", "pods", "--namespace", SYSTEM, *how)
        return all(team.status(job).get("phase") == "Complete" for job in jobs)

    team.wait("all jobs are complete", all_are_complete, 500)
    assert kills > 2
    for job in jobs:
        assert team.status(job)["budget"]["failures"] == 0
        assert_same_weights(weights(team, job), expected)
    wait_until("the room is given back", lambda: used_cpu(team) == "0", 60)


@pytest.fixture
def training(team: Namespace) -> Namespace:
    """Return the namespace of a team with the running job `train`."""
    team.apply(*in_queue("train", 400))
    team.wait_for_status("train", phase="Running")
    return team


def assert_room_outlives_pods(team: Namespace) -> None:
    team.wait("its pods are gone", lambda: not team.pods("train"))
    assert used_cpu(team) == "500m"


@pytest.mark.queues
def test_a_job_deleted_without_a_release_gives_its_room_back_to_the_next_one(
    training: Namespace, cluster: Cluster
) -> None:
    cluster.uninstall()
    try:
        training.kubectl("delete", "ddpjob", "train")
        assert_room_outlives_pods(training)
    finally:
        cluster.install()
    wait_until("the room is given back", lambda: used_cpu(training) == "0", 60)


@pytest.mark.queues
def test_a_namespace_deleted_while_no_operator_runs_gives_its_room_back_later(
    training: Namespace, cluster: Cluster
) -> None:
    with cluster.operator_down():
        cluster.kubectl("delete", "namespace", training.name, "--wait=false")
        assert_room_outlives_pods(training)
    wait_until("the room is given back", lambda: used_cpu(training) == "0", 60)
    wait_until("the namespace is gone", lambda: not cluster.read.namespace(training.name), 60)


def commands_of_the_page() -> list[list[str]]:
    """Return the commands of the page of queues: one of a user, then those of administrators."""
    lines = [line[4:] for line in PAGE.read_text().splitlines() if line.startswith("    ")]
    commands = [shlex.split(line) for line in lines]
    return [words for words in commands if words[0] in ("ddpjob", "helm", "kubectl")]


def blocks_of_the_page(language: str) -> list[str]:
    """Return the fenced blocks of the page of queues in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def follow(cluster: Cluster, words: list[str], **given: str) -> str:
    """Run a command of the page, with some of its words replaced by those of this test."""
    words = [given.get(word, word) for word in words]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return run(*words, KUBECONFIG=str(cluster.kubeconfig), PATH=path)


def follow_block(cluster: Cluster, block: str, **env: str) -> str:
    """Run the commands of a block of the page one after the other, up to a failure."""
    return run("bash", "-ec", block, KUBECONFIG=str(cluster.kubeconfig), **env)


# Edits the ConfigMap of Kueue as an editor does, given the file and the file of the block to add:
# a block of `integrations` is added to what is there, and another block before it.
EDITOR = r"""
import re, sys, textwrap
from pathlib import Path
block, file = map(Path, sys.argv[1:])
before, found, added = block.read_text().partition("integrations:\n")
indent, = re.findall(r"^( +)integrations:$", file.read_text(), re.MULTILINE)
place = f"{indent}integrations:\n"
lines = textwrap.indent(added or before, indent)
file.write_text(file.read_text().replace(place, place + lines if found else lines + place))
"""


def add_to_configuration(cluster: Cluster, block: str, folder: Path) -> None:
    """Add a block to Kueue's configuration by the commands of the page, and wait for Kueue."""
    (folder / "block.yaml").write_text(block)
    (folder / "edit.py").write_text(EDITOR)
    editor = f"{sys.executable} {folder / 'edit.py'} {folder / 'block.yaml'}"
    _, install, change, *_ = blocks_of_the_page("sh")
    follow_block(cluster, change, KUBE_EDITOR=editor)
    _, wait = install.splitlines()
    follow_block(cluster, wait)
    wait_for_kueue(cluster)


@pytest.fixture(scope="module")
def configured_by_the_page(
    cluster: Cluster, with_kueue: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Remove DDPJobs from the configuration of Kueue, then follow the page to add them."""
    path = (f"--namespace={SYSTEM}", "get", "configmap", "kueue-manager-config", "--output=json")
    config = json.loads(cluster.kubectl(*path))
    text = config["data"]["controller_manager_config.yaml"]
    without, count = re.subn(
        r"^ +externalFrameworks:\n +- DDPJob\S+\n", "", text, flags=re.MULTILINE
    )
    assert count == 1
    config["data"]["controller_manager_config.yaml"] = without
    cluster.kubectl("replace", "--filename=-", stdin=json.dumps(config))

    _, block, *_ = blocks_of_the_page("yaml")
    add_to_configuration(cluster, block, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def teams(cluster: Cluster, configured_by_the_page: None) -> Iterator[tuple[Namespace, Namespace]]:
    """Return the namespaces of two teams in one cluster, made by the commands of the page."""
    _, *of_administrators, _ = commands_of_the_page()
    for words in of_administrators:
        follow(cluster, words)
    teams = (Namespace(cluster, "team-a"), Namespace(cluster, "team-b"))
    yield teams
    for team in teams:
        team.kubectl("delete", "ddpjobs,jobs", "--all")
        team.delete()
    cluster.kubectl("delete", "clusterqueue", "team-a", "team-b")


@pytest.mark.queues
def test_the_other_commands_of_the_page_work(
    teams: tuple[Namespace, Namespace], cluster: Cluster, tmp_path: Path
) -> None:
    team, _ = teams
    *_, queue, _, high = objects_of("team-a")
    queue["metadata"]["name"] = "team-a"
    team.apply(queue, high)
    manifest = digits("train", 20, resources=REQUESTS)
    manifest["metadata"]["namespace"] = "team-a"
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(manifest))
    submit, *_, let_go = commands_of_the_page()
    follow(cluster, submit, **{"job.yaml": str(file)})
    team.wait_for_status("train", phase="Running")
    (workload,) = json.loads(team.kubectl("get", "workloads", "--output=json"))["items"]
    assert workload["spec"]["priorityClassRef"]["name"] == "high"
    *_, show = blocks_of_the_page("sh")
    name = workload["metadata"]["name"]
    assert re.search(rf"team-a +{name} +\[kueue", follow_block(cluster, show))
    follow(cluster, let_go, NAMESPACE="team-a", NAME=name)
    assert re.search(rf"team-a +{name} +<none>", follow_block(cluster, show))
    team.wait_for_complete("train")


def an_indexed_job(name: str, seconds: int = 5) -> Object:
    """Return an Indexed Job of two pods, also for the queue `default`."""
    command = ["sleep", str(seconds)]
    container = {"name": "main", "image": PLAIN, "command": command, "resources": REQUESTS}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    sizes = {"completions": 2, "parallelism": 2, "completionMode": "Indexed"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "default"}},
        "spec": {**sizes, "template": template},
    }


@pytest.mark.queues
def test_a_team_borrows_room_and_gives_it_back_to_the_jobs_of_another(
    teams: tuple[Namespace, Namespace],
) -> None:
    first, second = teams
    # They have no label: the LocalQueue `default` takes them.
    for job in ("one", "two"):
        first.apply(digits(job, 60, resources=REQUESTS))
        first.wait_for_status(job, phase="Running")
    second.apply(an_indexed_job("claim"))

    def preempted() -> bool:
        return any(first.status(job).get("reason") == "Preempted" for job in ("one", "two"))

    first.wait("a borrower is preempted", preempted)
    second.kubectl("wait", "job/claim", "--for=condition=Complete", "--timeout=180s")
    for job in ("one", "two"):
        assert first.wait_for_status(job, phase="Complete")["restarts"] == 0
    wait_until("the room is given back", lambda: used_cpu(first) == "0", 60)


@pytest.mark.queues
def test_teams_that_share_a_quota_have_it_by_their_weights(
    teams: tuple[Namespace, Namespace], cluster: Cluster, tmp_path: Path
) -> None:
    first, second = teams
    _, _, block, *_ = blocks_of_the_page("yaml")
    add_to_configuration(cluster, block, tmp_path)
    _, _, _, share, _ = blocks_of_the_page("sh")
    follow_block(cluster, share)
    # The cohort has room for three jobs, and the team with less weight has all of it.
    second.claim("checkpoints")
    for job in BORROWERS:
        second.apply(*unhurried_digits(job, 2 * LONG, resources=REQUESTS))
        second.wait_for_status(job, phase="Running")
    first.apply(digits("own", 300, resources=REQUESTS))
    first.apply(an_indexed_job("indexed", seconds=300))

    def places() -> tuple[str, str]:
        return used_cpu(first), used_cpu(second)

    wait_until("the shares are those of the weights", lambda: places() == ("1", "500m"), 120)
    first.wait_for_status("own", phase="Running")
    reasons = [second.status(job).get("reason") for job in BORROWERS]
    assert reasons.count("Preempted") == 2
    assert all(second.status(job)["restarts"] == 0 for job in BORROWERS)
    for team in teams:
        team.kubectl("delete", "ddpjobs,jobs", "--all")
    wait_until("the room is given back", lambda: places() == ("0", "0"), 60)
    cluster.kubectl("delete", "cohort", "shared")
