"""A Prometheus on this machine. It scrapes the targets of the chart's monitors in the cluster.

Debian's Prometheus is built without the discovery of Kubernetes, so `Discovery` looks for the
targets. It writes them with the same labels as Prometheus' own discovery. `scrape` converts a
monitor as the Prometheus Operator does, as far as the chart's monitors need it. The API server
passes the scrapes on.
"""

import base64
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import yaml

from ddpjob.core.api.yaml_text import load_all_yaml, load_yaml
from ddpjob.local.ports import free_port

from .cluster import SYSTEM, Cluster
from .commands import ROOT, CommandFailed, Object, Unavailable, run, wait_until

CHART = "charts/ddpjob-operator"
RULES = ROOT / CHART / "files" / "rules.yaml"

# Seconds between two scrapes, and between two evaluations of the rules.
INTERVAL = 1


class Prometheus:
    """A Prometheus with its files in `folder`. Raises Unavailable if it is not installed."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        program = shutil.which("prometheus")
        if not program:
            raise Unavailable("Prometheus is not installed: on Debian, apt install prometheus")
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}/api/v1"
        self._discovery = Discovery(cluster, folder)
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(self._discovery.configuration()))
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                *(program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"),
                f"--web.listen-address={address}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def start(self) -> None:
        self._discovery.start()
        wait_until("Prometheus scrapes the operator", self._has_scraped, 60, self.log)

    def stop(self) -> None:
        self._discovery.stop()
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def query(self, expression: str) -> list[Object]:
        """Return the series of a query, with their values of now."""
        found: list[Object] = self._get("query", query=expression)["result"]
        return found

    def query_range(self, expression: str, start: float, end: float) -> list[Object]:
        """Return the series of a query between two times, with a value for each second."""
        values = {"query": expression, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": "1"}
        found: list[Object] = self._get("query_range", **values)["result"]
        return found

    def rules(self) -> Iterator[Object]:
        """Yield the rules, with the health of their last evaluation."""
        for group in self._get("rules")["groups"]:
            yield from group["rules"]

    def _has_scraped(self) -> bool:
        try:
            return bool(self.query("ddpjob_leader"))
        except URLError:
            return False

    def _get(self, what: str, **values: str) -> Any:
        with urlopen(f"{self.url}/{what}?{urlencode(values)}", timeout=20) as answer:
            return json.load(answer)["data"]


class Discovery:
    """Writes the targets of the chart's monitors into files. Prometheus watches them."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.monitors = monitors()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def configuration(self) -> Object:
        """Return the configuration of Prometheus. It uses the kubeconfig's certificate."""
        jobs = [self._job(kind, monitor) for kind, monitor in self.monitors.items()]
        every = f"{INTERVAL}s"
        return {
            "global": {"scrape_interval": every, "evaluation_interval": every},
            "rule_files": [str(RULES)],
            "scrape_configs": jobs,
        }

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL):
            for kind in self.monitors:
                try:
                    found = list(self._targets(kind))
                except CommandFailed:
                    continue
                new = self.folder / f"{kind}.new"
                new.write_text(json.dumps(found))
                new.rename(self._file(kind))

    def _file(self, kind: str) -> Path:
        return self.folder / f"{kind}.json"

    def _job(self, kind: str, monitor: Object) -> Object:
        settings = load_yaml(self.cluster.kubeconfig.read_text())
        credentials = {
            "ca_file": settings["clusters"][0]["cluster"]["certificate-authority-data"],
            "cert_file": settings["users"][0]["user"]["client-certificate-data"],
            "key_file": settings["users"][0]["user"]["client-key-data"],
        }
        for name, data in credentials.items():
            (self.folder / name).write_bytes(base64.b64decode(data))
        return {
            **scrape(monitor),
            "scheme": "https",
            "tls_config": {name: str(self.folder / name) for name in credentials},
            "file_sd_configs": [{"files": [str(self._file(kind))]}],
        }

    def _targets(self, kind: str) -> Iterator[Object]:
        """Yield the targets that Prometheus would find: the ports of pods, or of a Service's."""
        settings = load_yaml(self.cluster.kubeconfig.read_text())
        address = urlsplit(settings["clusters"][0]["cluster"]["server"]).netloc
        namespace = SYSTEM if kind == "ServiceMonitor" else ""
        for pod in self.cluster.read.pods(namespace):
            for port in ports(pod):
                metadata = pod["metadata"]
                place = f"{metadata['namespace']}/pods/{metadata['name']}:{port['containerPort']}"
                labels = {
                    "__metrics_path__": f"/api/v1/namespaces/{place}/proxy/metrics",
                    "__meta_kubernetes_namespace": metadata["namespace"],
                    "__meta_kubernetes_pod_name": metadata["name"],
                    "__meta_kubernetes_pod_phase": pod["status"]["phase"],
                    "__meta_kubernetes_pod_container_port_name": port.get("name", ""),
                    # The operator's Service has the labels and the ports of its pod.
                    "__meta_kubernetes_endpoint_port_name": port.get("name", ""),
                }
                for name, value in metadata.get("labels", {}).items():
                    for what in ("pod", "service"):
                        labels[f"__meta_kubernetes_{what}_label_{sanitized(name)}"] = value
                        labels[f"__meta_kubernetes_{what}_labelpresent_{sanitized(name)}"] = "true"
                yield {"targets": [address], "labels": labels}


def monitors() -> Mapping[str, Object]:
    """Return the chart's PodMonitor and ServiceMonitor."""
    enabled = ("--set", "metrics.podMonitor.enabled=true,metrics.serviceMonitor.enabled=true")
    text = run("helm", "template", "ddpjob-operator", CHART, "--namespace", SYSTEM, *enabled)
    found = {one["kind"]: one for one in load_all_yaml(text) if one}
    return {kind: found[kind] for kind in ("PodMonitor", "ServiceMonitor")}


def ports(pod: Object) -> Iterator[Object]:
    for container in pod["spec"]["containers"]:
        yield from container.get("ports", [])


def scrape(monitor: Object) -> Object:
    """Return the scrape job of a PodMonitor or a ServiceMonitor, without its targets."""
    spec = monitor["spec"]
    is_pod = monitor["kind"] == "PodMonitor"
    source = "__meta_kubernetes_" + ("pod" if is_pod else "service")
    port = "pod_container_port_name" if is_pod else "endpoint_port_name"
    (endpoint,) = spec["podMetricsEndpoints" if is_pod else "endpoints"]
    assert endpoint["path"] == "/metrics"
    kept = {
        **dict(selected(spec["selector"], source)),
        f"__meta_kubernetes_{port}": endpoint["port"],
        "__meta_kubernetes_pod_phase": "Running",
    }
    named = {"namespace": "__meta_kubernetes_namespace", "pod": "__meta_kubernetes_pod_name"}
    return {
        "job_name": monitor["metadata"]["name"],
        "honor_labels": endpoint.get("honorLabels", False),
        "relabel_configs": [
            *({"source_labels": [k], "regex": v, "action": "keep"} for k, v in kept.items()),
            *({"source_labels": [v], "target_label": k} for k, v in named.items()),
            *map(snake_case, endpoint.get("relabelings", [])),
        ],
    }


def selected(selector: Object, source: str) -> Iterator[tuple[str, str]]:
    """Yield the target labels required by a selector, and their values."""
    for label, value in selector.get("matchLabels", {}).items():
        yield f"{source}_label_{sanitized(label)}", value
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "Exists"
        yield f"{source}_labelpresent_{sanitized(expression['key'])}", "true"


def sanitized(label: str) -> str:
    return re.sub(r"\W", "_", label)


def snake_case(relabeling: Mapping[str, Any]) -> Object:
    """Return a relabeling with Prometheus' own names of the fields."""
    return {re.sub(r"([A-Z])", r"_\1", key).lower(): value for key, value in relabeling.items()}
