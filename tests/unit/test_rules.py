"""The rules for Prometheus: promtool evaluates them on made-up series.

A series is a text such as `5+1x60`: 5, and then 60 values, each 1 more than the last, one a minute.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpjob.core.api.yaml_text import load_yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "charts" / "ddpjob-operator" / "files" / "rules.yaml"
RUNBOOK = "docs/users/operations.md"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="needs promtool: apt install prometheus"
)

Alert = dict[str, Any]
Series = Mapping[str, str]

GROUPS = load_yaml(RULES.read_text())["groups"]
ALERTS: dict[str, Alert] = {
    rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule
}


def promtool(*args: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", str(RULES))


# The runbook


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_has_a_section_in_its_runbook(name: str) -> None:
    annotations = ALERTS[name]["annotations"]
    assert {"summary", "description", "runbook_url"} == set(annotations)
    _, _, path = annotations["runbook_url"].partition("/blob/main/")
    # A heading's anchor is its text in lower case.
    assert path == f"{RUNBOOK}#{name.lower()}"


def test_the_runbook_has_exactly_the_sections_of_the_alerts() -> None:
    text = (ROOT / RUNBOOK).read_text()
    sections = text.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (.*)$", sections, re.MULTILINE) == list(ALERTS)


# When an alert fires


JOB = 'namespace="team",ddpjob="digits"'
# A scrape of the operator adds the labels of its pod.
TARGET = 'pod="operator-1"'
MINUTE = 60


def phase(name: str) -> str:
    return f'ddpjob_job_phase{{{JOB},{TARGET},phase="{name}"}}'


INFO = f"ddpjob_job_info{{{JOB},{TARGET}}}"
COMPLETION = f"ddpjob_job_completion_timestamp_seconds{{{JOB},{TARGET}}}"
HANG_END = f'ddpjob_job_attempt_end_timestamp_seconds{{{JOB},{TARGET},cause="Hang"}}'
FAILURE_END = HANG_END.replace("Hang", "Failure")
HANGS = f'ddpjob_restarts_total{{{TARGET},cause="Hang"}}'
ERRORS = f'ddpjob_reconciles_total{{{TARGET},result="error"}}'
FAILURES = f'ddpjob_job_restarts{{{JOB},{TARGET},budget="failures"}}'
GOODPUT = f"ddpjob_job_goodput_ratio{{{JOB},{TARGET}}}"
QUEUED = f'ddpjob_job_activity_seconds{{{JOB},{TARGET},activity="queued"}}'
LEADER = f"ddpjob_leader{{{TARGET}}}"

ALWAYS_1 = "1+0x180"


def at(minutes: int) -> str:
    """Return the series of a Unix time. The clock of promtool begins at 0."""
    return f"{minutes * MINUTE}+0x180"


def failed(minutes: int) -> Series:
    return {phase("Failed"): ALWAYS_1, COMPLETION: at(minutes), INFO: ALWAYS_1}


# For each situation its series, and the alerts firing after 100 minutes: first those about a job,
# then those without one.
SITUATIONS: dict[str, tuple[Series, set[str], set[str]]] = {
    "nothing is wrong": ({phase("Running"): ALWAYS_1, INFO: ALWAYS_1}, set(), set()),
    "no operator leads": ({LEADER: "0+0x180"}, set(), {"DDPJobOperatorDown"}),
    "there is no operator": ({LEADER: "_x180"}, set(), {"DDPJobOperatorDown"}),
    "a job waits": ({phase("Pending"): ALWAYS_1}, {"DDPJobStuckPending"}, set()),
    "a job starts slowly": ({phase("Starting"): ALWAYS_1}, {"DDPJobStuckPending"}, set()),
    "a job restarts often": ({FAILURES: "0+0.2x180"}, {"DDPJobRestartingOften"}, set()),
    "a job trains little": (
        {GOODPUT: "0.4+0x180", QUEUED: "3600+30x180"},
        {"DDPJobGoodputLow"},
        set(),
    ),
    "a job has trained little, and is new": (
        {GOODPUT: "0.4+0x180", QUEUED: "0+30x180"},
        set(),
        set(),
    ),
    "a job has just failed": (failed(99), {"DDPJobFailed"}, set()),
    "a job failed an hour ago": (failed(40), set(), set()),
    "a job failed and was deleted": (
        {phase("Failed"): "1+0x99 stale", COMPLETION: f"{98 * MINUTE}+0x99 stale"},
        set(),
        set(),
    ),
    "a job has just completed": (
        {phase("Complete"): ALWAYS_1, COMPLETION: at(99)},
        set(),
        set(),
    ),
    "a job has hung": (
        {INFO: ALWAYS_1, HANG_END: at(90), HANGS: "0+0x89 1+0x90"},
        {"DDPJobHang"},
        set(),
    ),
    "a job hung long ago": ({INFO: ALWAYS_1, HANG_END: at(80)}, set(), set()),
    "an attempt of a job failed": ({INFO: ALWAYS_1, FAILURE_END: at(90)}, set(), set()),
    "a job has hung, and jobs have no metrics": (
        {HANGS: "0+0x89 1+0x90"},
        set(),
        {"DDPJobHang"},
    ),
    "requests fail": ({ERRORS: "0+1x180"}, set(), {"DDPJobReconcileErrors"}),
}


def run_rules(folder: Path, series: Series, **expected: Any) -> None:
    """Let promtool compare what the rules make of some series with what is expected.

    One operator leads, unless the series say otherwise.
    """
    inputs = {LEADER: ALWAYS_1, **series}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in inputs.items()],
        **expected,
    }
    file = folder / "test.json"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "tests": [test]}))
    promtool("test", "rules", str(file))


def firing(name: str, labels: str) -> dict[str, Any]:
    """Return Prometheus' sample for a firing alert."""
    severity = ALERTS[name]["labels"]["severity"]
    state = f'alertname="{name}",alertstate="firing",severity="{severity}"'
    return {"labels": f"ALERTS{{{','.join(filter(None, (state, labels)))}}}", "value": 1}


@needs_promtool
@pytest.mark.parametrize(
    ("series", "about_the_job", "without_a_job"), SITUATIONS.values(), ids=SITUATIONS
)
def test_exactly_these_alerts_fire(
    series: Series, about_the_job: set[str], without_a_job: set[str], tmp_path: Path
) -> None:
    samples = [firing(name, JOB) for name in about_the_job]
    samples += [firing(name, "") for name in without_a_job]
    query = {
        "expr": 'ALERTS{alertstate="firing"}',
        "eval_time": "100m",
        "exp_samples": samples,
    }
    run_rules(tmp_path, series, promql_expr_test=[query])


def test_each_alert_fires_in_a_situation() -> None:
    fired: set[str] = set()
    for _, about_the_job, without_a_job in SITUATIONS.values():
        fired |= about_the_job | without_a_job
    assert fired == ALERTS.keys()


# What an alert says


@needs_promtool
@pytest.mark.parametrize(
    ("name", "situation", "labels", "summary"),
    [
        (
            "DDPJobFailed",
            "a job has just failed",
            {"namespace": "team", "ddpjob": "digits"},
            "Job team/digits has failed.",
        ),
        (
            "DDPJobHang",
            "a job has hung",
            {"namespace": "team", "ddpjob": "digits"},
            "Job team/digits has hung.",
        ),
        ("DDPJobHang", "a job has hung, and jobs have no metrics", {}, "A job has hung."),
    ],
)
def test_an_alert_names_its_job(
    name: str, situation: str, labels: dict[str, str], summary: str, tmp_path: Path
) -> None:
    alert = ALERTS[name]
    expected = {
        "exp_labels": {**alert["labels"], **labels},
        "exp_annotations": {**alert["annotations"], "summary": summary},
    }
    test = {"alertname": name, "eval_time": "100m", "exp_alerts": [expected]}
    run_rules(tmp_path, SITUATIONS[situation][0], alert_rule_test=[test])
