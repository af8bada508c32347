"""The chart is upgraded, rolled back and removed while a job runs."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpjob import __version__
from ddpjob.core.api.yaml_text import load_yaml

from .builders import script_job
from .cluster import CHART, OPERATOR, SYSTEM, Cluster
from .commands import build_image, run, wait_until
from .namespace import Namespace

JOB = "kept"

# A version with another agent. The operator may change only the ConfigMap of its own agent.
EARLIER = "0.0.9"
DOCKERFILE = f"""
FROM {OPERATOR}
USER root
RUN cd /opt/venv/lib/python3.*/site-packages/ddpjob \\
 && echo '# An earlier version.' >> agent/times.py \\
 && sed -i 's/{__version__}/{EARLIER}/' __init__.py
USER 65532:65532
"""
AGENT = "from ddpjob.core.agent_files import config_map_name; print(config_map_name())"

# Rank 1 of the first attempt fails when its pod gets a file. All end when they get another one.
SCRIPT = """
import os, pathlib, time
print('{"event": "started"}', flush=True)
while not pathlib.Path("/tmp/finish").exists():
    time.sleep(0.1)
    if pathlib.Path("/tmp/fail").exists():
        raise ValueError("told to fail")
"""


@pytest.fixture
def earlier(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """Yield the packaged chart of an earlier version, with its image loaded."""
    image = f"ddpjob-operator:{EARLIER}"
    build_image(image, context="-", stdin=DOCKERFILE)
    cluster.load(image)
    chart = tmp_path / "ddpjob-operator"
    shutil.copytree(CHART, chart)
    about = chart / "Chart.yaml"
    about.write_text(about.read_text().replace(__version__, EARLIER))
    agent = run("docker", "run", "--rm", "--entrypoint", "python", image, "-c", AGENT)
    (chart / "files" / "agent-config-map").write_text(agent)
    yield package(chart, tmp_path)
    # The other tests need the operator, also if this one has failed.
    cluster.install()


def package(chart: Path, folder: Path) -> Path:
    """Return a chart as a registry has it."""
    run("helm", "package", chart, "--destination", folder)
    version = load_yaml((chart / "Chart.yaml").read_text())["version"]
    return folder / f"ddpjob-operator-{version}.tgz"


@pytest.mark.alone
def test_a_job_runs_through_upgrade_rollback_and_removal(
    cluster: Cluster, namespace: Namespace, earlier: Path, tmp_path: Path
):
    newer = package(CHART, tmp_path)
    cluster.install(chart=earlier)
    wait_until_it_leads(cluster, f"ddpjob-operator:{EARLIER}")
    namespace.apply(*script_job(JOB, SCRIPT))
    first = wait_until_started(namespace, 0)

    # An upgrade restarts nothing. The next attempt gets the new agent, so all its pods are new.
    cluster.install(chart=newer)
    wait_until_it_leads(cluster, OPERATOR)
    assert namespace.uids(JOB) == first
    namespace.python(f"{JOB}-0-1", "open('/tmp/fail', 'w').close()")
    second = wait_until_started(namespace, 1)
    assert not set(first.values()) & set(second.values())
    assert len(agents(namespace)) == 2
    assert namespace.status(JOB)["budget"]["failures"] == 1

    # Back to the version before. It finds a newer agent in the pods.
    cluster.rollback()
    wait_until_it_leads(cluster, f"ddpjob-operator:{EARLIER}")
    assert running(namespace) == second

    # Without an operator the pods go on, and end. A new installation then sees their end.
    cluster.uninstall()
    for pod in running(namespace):
        namespace.python(pod, "open('/tmp/finish', 'w').close()")
    namespace.wait_until_nothing_runs(JOB)
    assert namespace.status(JOB)["phase"] == "Running"
    cluster.install(chart=newer)
    namespace.wait_for_complete(JOB, failures=1)


def wait_until_it_leads(cluster: Cluster, image: str) -> None:
    """Wait until an operator of this image holds the Lease: it has then looked at all jobs."""

    def leads() -> bool:
        lease = ("get", "lease", "ddpjob-operator", "--namespace", SYSTEM)
        holder = cluster.kubectl(*lease, "--output", "jsonpath={.spec.holderIdentity}")
        images = [
            container["image"]
            for pod in cluster.read.pods(SYSTEM)
            for container in pod["spec"]["containers"]
            if holder.startswith(pod["metadata"]["name"])
        ]
        return images == [image]

    wait_until(f"an operator of {image} leads", leads, 60)


def wait_until_started(namespace: Namespace, attempt: int) -> dict[str, str]:
    """Wait until all scripts of an attempt have started, and return the UIDs of its pods."""
    pods = [f"{JOB}-{attempt}-{index}" for index in range(2)]
    for pod in pods:
        namespace.wait(f"{pod} has started", lambda pod=pod: namespace.progress(pod, "started"))
    namespace.wait_for_status(JOB, phase="Running", nodesReady="2/2", attempt=attempt)
    found = namespace.uids(JOB)
    return {pod: found[pod] for pod in pods}


def running(namespace: Namespace) -> dict[str, str]:
    """Return the UIDs of the unfinished pods."""
    found = namespace.uids(JOB)
    return {pod: found[pod] for pod in namespace.unfinished(JOB)}


def agents(namespace: Namespace) -> set[str]:
    """Return the names of the ConfigMaps with the agents of the job's pods."""
    found = set()
    for pod in namespace.pods(JOB).values():
        for volume in pod["spec"]["volumes"]:
            name = volume.get("configMap", {}).get("name", "")
            if name.startswith("ddpjob-agent-"):
                found.add(name)
    return found
