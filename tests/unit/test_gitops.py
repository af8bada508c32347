"""The health of jobs in Argo CD, and what the page on GitOps shows.

Argo CD runs Lua 5.1 without the libraries for files and programs. tests/apiserver evaluates the
expressions for Flux.
"""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from builders.jobs import a_condition, a_job, a_running_job
from builders.plans import observation, plan_for
from builders.times import NOW
from lupa import lua51

from ddpjob.core.api.names import Condition, Phase
from ddpjob.core.api.queue import Queue
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.yaml_text import load_all_yaml, load_yaml
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.observation import ApiState

ROOT = Path(__file__).parents[2]
HEALTH = (ROOT / "examples/argocd/health.lua").read_text()
FLUX = (ROOT / "examples/flux/kustomization.yaml").read_text()
PAGE = (ROOT / "docs/users/gitops.md").read_text()
CRD = load_yaml((ROOT / "charts/ddpjob-operator/files/crd.yaml").read_text())
SPEC = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]

# What a script of a health check may use.
LIBRARIES = ("ipairs", "next", "pairs", "table", "tonumber", "tostring", "type")

# The phase in which a job has a reason, and its health then. A new reason needs a row here.
HEALTHY, PROGRESSING, DEGRADED, SUSPENDED = "Healthy", "Progressing", "Degraded", "Suspended"
OF_REASON = {
    Reason.CREATING_PODS: (Phase.STARTING, PROGRESSING),
    Reason.STARTING: (Phase.STARTING, PROGRESSING),
    Reason.SETTING_UP: (Phase.STARTING, PROGRESSING),
    Reason.WAITING_FOR_PEERS: (Phase.STARTING, PROGRESSING),
    Reason.NODES_RUNNING: (Phase.RUNNING, HEALTHY),
    Reason.SUCCEEDED: (Phase.COMPLETE, HEALTHY),
    # These end by themselves, or when other jobs do.
    Reason.UNSCHEDULABLE: (Phase.PENDING, PROGRESSING),
    Reason.GATED: (Phase.PENDING, PROGRESSING),
    Reason.QUOTA: (Phase.PENDING, PROGRESSING),
    Reason.NAME_IN_USE: (Phase.PENDING, PROGRESSING),
    Reason.NAMESPACE_ENDING: (Phase.PENDING, PROGRESSING),
    Reason.NO_ANSWER: (Phase.PENDING, PROGRESSING),
    Reason.YIELDED: (Phase.PENDING, PROGRESSING),
    Reason.WAITING_FOR_OLD_PODS: (Phase.RESTARTING, PROGRESSING),
    Reason.BACK_OFF: (Phase.RESTARTING, PROGRESSING),
    # These end when a person changes something.
    Reason.CLAIM_NOT_FOUND: (Phase.PENDING, DEGRADED),
    Reason.HELD_BY_KUEUE: (Phase.PENDING, DEGRADED),
    Reason.IMAGE_PULL: (Phase.PENDING, DEGRADED),
    Reason.POD_SECURITY: (Phase.PENDING, DEGRADED),
    Reason.FORBIDDEN: (Phase.PENDING, DEGRADED),
    Reason.NO_QUEUE: (Phase.PENDING, DEGRADED),
    Reason.NO_GANGS: (Phase.PENDING, DEGRADED),
    Reason.INVALID_POD: (Phase.PENDING, DEGRADED),
    Reason.INVALID_SPEC: (Phase.RUNNING, DEGRADED),
    # A job without pods.
    Reason.SUSPENDED: (Phase.SUSPENDED, SUSPENDED),
    Reason.QUEUED: (Phase.PENDING, SUSPENDED),
    Reason.PREEMPTED: (Phase.PENDING, SUSPENDED),
    # A new attempt begins.
    Reason.RESIZED: (Phase.RESTARTING, PROGRESSING),
    Reason.RESUMED: (Phase.RESTARTING, PROGRESSING),
    Reason.ADMITTED: (Phase.RESTARTING, PROGRESSING),
    Reason.RETRIED: (Phase.RESTARTING, PROGRESSING),
    Reason.FAILURE: (Phase.RESTARTING, PROGRESSING),
    Reason.DISRUPTION: (Phase.RESTARTING, PROGRESSING),
    Reason.HANG: (Phase.RESTARTING, PROGRESSING),
    Reason.NOT_RESUMED: (Phase.RESTARTING, PROGRESSING),
    Reason.RENDEZVOUS_TIMEOUT: (Phase.RESTARTING, PROGRESSING),
    Reason.STATUS_RECOVERED: (Phase.STARTING, PROGRESSING),
    # The job has failed.
    Reason.MAX_RESTARTS: (Phase.FAILED, DEGRADED),
    Reason.MAX_DISRUPTIONS: (Phase.FAILED, DEGRADED),
    Reason.NON_RETRYABLE: (Phase.FAILED, DEGRADED),
    Reason.SCRIPT_NOT_FOUND: (Phase.FAILED, DEGRADED),
    Reason.SAME_ERROR: (Phase.FAILED, DEGRADED),
    Reason.NO_PROGRESS: (Phase.FAILED, DEGRADED),
    Reason.DEADLINE: (Phase.FAILED, DEGRADED),
    Reason.STARTUP_DEADLINE: (Phase.FAILED, DEGRADED),
}

# Reasons of an attempt or of a condition, which a job as a whole never has.
NEVER_OF_A_JOB = {
    Reason.SILENT,
    Reason.PEER_LOST,
    Reason.PEER_HANGS,
    Reason.ENDED_EARLY,
    Reason.SETUP_FAILED,
    Reason.NODE_UNREACHABLE,
    Reason.NODE_ENDING,
    Reason.NODE_SHUTDOWN,
    Reason.NODE_RESTARTED,
    Reason.HEARTBEATS_SEEN,
    Reason.NO_HEARTBEAT,
}

# A queue holds such a job with the condition Suspended.
HELD = {Reason.SUSPENDED, Reason.QUEUED, Reason.PREEMPTED, Reason.NO_QUEUE}


def a_status(phase, reason, *, held=False):
    conditions = [{"type": "Running", "status": "False"}]
    if held:
        conditions.append({"type": "Suspended", "status": "True"})
    return {
        "phase": str(phase),
        "reason": str(reason),
        "message": "in a sentence",
        "observedGeneration": 1,
        "conditions": conditions,
    }


def health_of(status, generation=1):
    """Return the health and its message, as Argo CD finds them with our script."""
    lua = lua51.LuaRuntime(register_eval=False, register_builtins=False)
    names = lua.globals()
    for name in list(names):
        if name not in LIBRARIES:
            names[name] = None
    job = {"metadata": {"generation": generation}, "status": status}
    names.obj = lua.table_from(job, recursive=True)
    answer = lua.execute(HEALTH)
    return answer.status, answer.message


# The health check of Argo CD


def test_each_reason_has_an_outcome():
    assert set(OF_REASON) | NEVER_OF_A_JOB == set(Reason)
    assert not set(OF_REASON) & NEVER_OF_A_JOB
    assert {phase for phase, _ in OF_REASON.values()} == set(Phase)


@pytest.mark.parametrize("reason", OF_REASON)
def test_the_health_follows_from_phase_and_reason(reason):
    phase, expected = OF_REASON[reason]
    found, message = health_of(a_status(phase, reason, held=reason in HELD))
    assert (found, message) == (expected, f"{reason}: in a sentence")


@pytest.mark.parametrize(("phase", "end"), [(Phase.COMPLETE, HEALTHY), (Phase.FAILED, DEGRADED)])
def test_a_finished_job_has_the_health_of_its_end(phase, end):
    assert {health_of(a_status(phase, reason))[0] for reason in Reason} == {end}


def test_the_script_names_only_reasons_and_phases_that_exist():
    of_reasons, of_phases = re.findall(
        r"^local \w+ = \{\n(.*?)^\}", HEALTH, re.DOTALL | re.MULTILINE
    )
    assert set(re.findall(r"(\w+) =", of_reasons)) <= set(Reason)
    assert set(re.findall(r"(\w+) =", of_phases)) <= set(Phase)


@pytest.mark.parametrize(
    ("status", "generation"),
    [(None, 1), ({}, 1), ({"observedGeneration": 1}, 1), (a_status("Complete", "Succeeded"), 2)],
)
def test_a_job_that_no_operator_has_seen_is_in_progress(status, generation):
    assert health_of(status, generation) == (
        PROGRESSING,
        "the operator has not seen the job yet",
    )


def test_a_job_that_kueue_has_evicted_for_a_reason_of_its_own_is_suspended():
    assert health_of(a_status(Phase.PENDING, "PodsReadyTimeout", held=True))[0] == SUSPENDED


def test_the_statuses_of_real_decisions_have_the_same_health():
    suspended = plan_for(a_job(suspend=True))
    assert health_of(suspended.status.to_dict())[0] == SUSPENDED
    starting = plan_for(a_job())
    assert health_of(starting.status.to_dict())[0] == PROGRESSING
    assert health_of(a_running_job().status.to_dict())[0] == HEALTHY
    queued = observation(replace(a_job(), queue=Queue("team")), kueue=ApiState.SERVED)
    assert health_of(decide(queued, NOW).status.to_dict())[0] == SUSPENDED
    no_kueue = observation(replace(a_job(), queue=Queue("team")), kueue=ApiState.ABSENT)
    assert health_of(decide(no_kueue, NOW).status.to_dict())[0] == DEGRADED
    held = a_condition(Condition.SUSPENDED)
    again = replace(a_running_job().status, conditions=held)
    assert health_of(again.to_dict())[0] == SUSPENDED


# The page


def blocks(text):
    """Return the YAML blocks of the page."""
    return [found[1] for found in re.finditer(r"```yaml\n(.*?)```", text, re.DOTALL)]


def block_with(text):
    (found,) = [block for block in blocks(PAGE) if text in block]
    return found


def test_the_page_shows_the_health_check():
    shown = load_yaml(block_with("resource.customizations.health"))
    assert shown["data"]["resource.customizations.health.ddpjob.dev_DDPJob"] == HEALTH


def test_the_page_shows_the_expressions_for_flux():
    shown = load_yaml(block_with("healthCheckExprs"))
    assert shown["spec"]["healthCheckExprs"] == load_yaml(FLUX)["spec"]["healthCheckExprs"]


def test_the_expressions_for_flux_name_only_what_exists():
    (row,) = load_yaml(FLUX)["spec"]["healthCheckExprs"]
    words = set(re.findall(r"'(\w+)'", row["failed"] + row["current"]))
    assert words - {"True"} <= set(Phase) | set(Condition)
    assert (row["apiVersion"], row["kind"]) == ("ddpjob.dev/v1alpha1", "DDPJob")


def test_the_ignored_differences_are_fields_that_may_change():
    (row,) = load_yaml(block_with("ignoreDifferences"))["spec"]["ignoreDifferences"]
    assert (row["group"], row["kind"]) == ("ddpjob.dev", "DDPJob")
    for pointer in row["jsonPointers"]:
        _, spec, field = pointer.split("/")
        assert spec == "spec"
        assert field in SPEC["properties"]
        fixed = f"self.{field} == oldSelf.{field}"
        assert all(fixed not in rule["rule"] for rule in SPEC["x-kubernetes-validations"])


@pytest.mark.skipif(
    shutil.which("kubectl") is None,
    reason="kubectl not found: docs/users/quickstart-kind.md says where to get it",
)
def test_kustomize_renames_the_code_of_a_job_with_the_configuration_of_the_page(tmp_path):
    manifest = """
apiVersion: v1
kind: ConfigMap
metadata: {name: code-1}
---
apiVersion: ddpjob.dev/v1alpha1
kind: DDPJob
metadata: {name: train}
spec: {image: i, args: [train.py], code: {configMap: code-1}}
"""
    (tmp_path / "job.yaml").write_text(manifest)
    (tmp_path / "kustomization.yaml").write_text(block_with("nameSuffix"))
    (tmp_path / "names.yaml").write_text(block_with("nameReference"))
    command = ["kubectl", "kustomize", str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code, job = load_all_yaml(built)
    assert job["metadata"]["name"] != "train"
    assert job["spec"]["code"]["configMap"] == code["metadata"]["name"] != "code-1"
