"""A real Prometheus scrapes a run, and each panel of the dashboard has data."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import Cluster
from .commands import ROOT, Object, Unavailable
from .namespace import Namespace
from .prometheus import Prometheus
from .training import JOB, SHORT, STEPS_PER_EPOCH, start_training

DASHBOARD = ROOT / "charts" / "ddpjob-operator" / "files" / "dashboard.json"

# What the panels showed. docs/images/dashboard.py draws it.
SHOWN = ROOT / "build" / "dashboard.json"


@pytest.fixture
def prometheus(cluster: Cluster, tmp_path: Path) -> Iterator[Prometheus]:
    try:
        found = Prometheus(cluster, tmp_path)
    except Unavailable as error:
        pytest.skip(str(error))
    try:
        found.start()
        yield found
    finally:
        found.stop()


def test_each_panel_of_the_dashboard_shows_a_run(namespace: Namespace, prometheus: Prometheus):
    start = time.time()
    start_training(namespace, SHORT, hangTimeoutSeconds=300)
    namespace.kubectl("delete", "pod", f"{JOB}-0-1", "--wait=false")
    status = namespace.wait_for_status(JOB, phase="Complete")
    assert status["budget"]["disruptions"] == 1
    namespace.wait("Prometheus has seen the end", lambda: has_ended(prometheus, namespace), 60)

    shown = panels(prometheus, namespace.name, start, time.time())

    empty = [panel["title"] for panel in shown if not all(panel["series"])]
    assert not empty
    SHOWN.parent.mkdir(exist_ok=True)
    SHOWN.write_text(json.dumps({"start": start, "panels": shown}))

    # The numbers are those of the run.
    metrics = {panel["title"]: panel["series"][0] for panel in shown}
    assert metrics["Operators that lead"][0]["value"][1] == "1"
    steps = SHORT * STEPS_PER_EPOCH
    assert last_value(metrics["Step"]) == pytest.approx(steps, abs=STEPS_PER_EPOCH)
    assert 0 < last_value(metrics["Goodput of each job"]) <= 1
    legends = [one["metric"].get("budget") for one in metrics["Restarts"] if last(one) == 1]
    assert legends == ["disruptions"]

    # The rules are evaluated. An alert without a delay would show now: none does.
    rules = list(prometheus.rules())
    assert {
        rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"
    } == {}
    assert prometheus.query("ddpjob:restarts:increase_1h")
    # Jobs of the other worker have theirs.
    firing = prometheus.query(f'ALERTS{{alertstate="firing", namespace=~"|{namespace.name}"}}')
    assert [alert["metric"]["alertname"] for alert in firing] == []


def has_ended(prometheus: Prometheus, namespace: Namespace) -> bool:
    job = f'namespace="{namespace.name}", ddpjob="{JOB}"'
    return bool(prometheus.query(f'ddpjob_job_phase{{{job}, phase="Complete"}} == 1'))


def panels(prometheus: Prometheus, namespace: str, start: float, end: float) -> list[Object]:
    """Return each panel with the series of each of its queries."""
    chosen = {"$namespace": namespace, "$ddpjob": JOB, "$__rate_interval": "15s"}
    board = json.loads(DASHBOARD.read_text())
    found = []
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        series, legends = [], []
        for target in panel["targets"]:
            expression = target["expr"]
            for variable, value in chosen.items():
                expression = expression.replace(variable, value)
            if target.get("instant"):
                series.append(prometheus.query(expression))
            else:
                series.append(prometheus.query_range(expression, start, end))
            legends.append(target["legendFormat"])
        config = panel["fieldConfig"]["defaults"]
        stacked = config.get("custom", {}).get("stacking", {}).get("mode") == "normal"
        found.append(
            {
                "title": panel["title"],
                "type": panel["type"],
                "unit": config["unit"],
                "stacked": stacked,
                "legends": legends,
                "series": series,
            }
        )
    return found


def last(series: Object) -> float:
    return float(series["values"][-1][1])


def last_value(found: list[Object]) -> float:
    """Return the last value of a panel with one curve."""
    (series,) = found
    return last(series)
