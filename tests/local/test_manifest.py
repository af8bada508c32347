"""The refusals and the notes of `ddpjob run --local` for a manifest."""

from datetime import timedelta
from pathlib import Path

import pytest

from ddpjob.core.api.readers import SpecError
from ddpjob.core.api.spec import known_fields
from ddpjob.local.manifest import Manifest, check_claims, read
from ddpjob.local.notes import CLUSTER_FIELDS
from ddpjob.local.sizes import Overrides

HEAD = "apiVersion: ddpjob.dev/v1alpha1\nkind: DDPJob\nmetadata: {name: j}\n"
TRAINER = "spec.podTemplate.spec.containers[trainer]."


def read_text(tmp_path: Path, text: str) -> Manifest:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return read(path)


def read_spec(tmp_path: Path, spec: str, more: str = "") -> Manifest:
    """Read a manifest with fields of a spec, and with further documents."""
    fields = f"image: i, args: [-m, x], {spec}"
    return read_text(tmp_path, f"{HEAD}spec: {{{fields}}}\n{more}")


def config_map(data: str) -> str:
    return f"---\nkind: ConfigMap\nmetadata: {{name: c}}\ndata: {data}\n"


# Files


def test_a_job_in_a_list_runs_with_its_config_map(tmp_path):
    spec = "{image: i, args: [-m, x], nodes: 1}"
    job = f"{{apiVersion: ddpjob.dev/v1alpha1, kind: DDPJob, metadata: {{name: j}}, spec: {spec}}}"
    items = f"items: [{job}, {{kind: ConfigMap, metadata: {{name: c}}, data: {{a: b}}}}]"
    found = read_text(tmp_path, f"apiVersion: v1\nkind: List\n{items}\n")
    assert (found.job.name, found.config_maps) == ("j", {"c": {"a": "b"}})


def test_a_list_without_a_job_is_refused(tmp_path):
    with pytest.raises(SpecError, match="must contain one DDPJob, got 0; it has Pod"):
        read_text(tmp_path, "apiVersion: v1\nkind: List\nitems: [{kind: Pod}, x]\n")


def test_a_file_that_powershell_has_written_is_read(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(f"{HEAD}spec: {{image: i, args: [-m, x], nodes: 1}}\n", encoding="utf-16")
    assert read(path).job.name == "j"


def test_a_file_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(SpecError, match="is not text in UTF-8; save it as UTF-8"):
        read(path)


# Restarts


@pytest.mark.parametrize(
    ("policy", "wanted", "restarts"),
    [
        ("nodes: 1", Overrides(), 0),
        ("failurePolicy: {windowSeconds: 60}", Overrides(), 0),
        ("failurePolicy: {maxRestarts: null}", Overrides(), 0),
        ("failurePolicy: {maxRestarts: 5}", Overrides(), 5),
        ("nodes: 1", Overrides(max_restarts=2), 2),
        ("failurePolicy: {maxRestarts: 5}", Overrides(max_restarts=0), 0),
    ],
)
def test_a_run_has_no_restarts_after_failures_unless_they_were_chosen(
    tmp_path, policy, wanted, restarts
):
    path = tmp_path / "job.yaml"
    path.write_text(f"{HEAD}spec: {{image: i, args: [-m, x], {policy}}}\n")
    for manifest in (read(path, wanted), read(path, wanted, cores=1)):
        assert manifest.job.spec.failure_policy.max_restarts == restarts
        # What the cluster loses is another matter.
        assert manifest.job.spec.failure_policy.max_disruptions == 20


# Notes


def test_each_field_without_effect_has_one_note(tmp_path):
    spec = "nodeSelector: {a: b}, priorityClassName: p, accelerator: trn1.32xlarge"
    notes = read_spec(tmp_path, spec).notes
    assert [note.split(":")[0] for note in notes] == [
        "spec.image",
        "spec.nodeSelector",
        "spec.priorityClassName",
        "spec.accelerator",
    ]
    assert "aws.amazon.com/neuron" in notes[-1]


def test_sidecars_and_pod_settings_have_notes(tmp_path):
    template = "{dnsPolicy: None, containers: [{name: trainer}, {name: proxy, image: p}]}"
    notes = read_spec(tmp_path, f"podTemplate: {{spec: {template}}}").notes
    assert any("proxy" in note for note in notes)
    assert any("dnsPolicy" in note for note in notes)


def test_names_of_fields_may_be_numbers(tmp_path):
    with pytest.raises(SpecError, match=r"spec\.podTemplate\.spec\.1: unknown field"):
        read_spec(tmp_path, "podTemplate: {spec: {1: x, dnsPolicy: None}}")


def test_each_field_of_the_overlays_trainer_without_effect_has_a_note(tmp_path):
    trainer = "{name: trainer, image: other, workingDir: /w, livenessProbe: {}, lifecycle: {}}"
    notes = read_spec(tmp_path, f"podTemplate: {{spec: {{containers: [{trainer}]}}}}").notes
    found = [note.removeprefix(TRAINER).split(":")[0] for note in notes if note.startswith(TRAINER)]
    assert found == ["image", "lifecycle", "livenessProbe", "workingDir"]


def test_each_kind_of_volume_that_only_a_cluster_has_gets_one_note(tmp_path):
    volumes = (
        "[{name: a, nfs: {}}, {name: b, nfs: {}}, {name: c, csi: {}}, {name: d, emptyDir: {}}]"
    )
    notes = read_spec(tmp_path, f"volumes: {volumes}").notes
    found = [note for note in notes if note.startswith("spec.volumes")]
    assert len(found) == 2
    assert "a, b: nfs volumes are not available here" in found[1]


# Refusals


@pytest.mark.parametrize(
    "spec",
    [
        "env: [{name: A, valueFrom: {secretKeyRef: {name: s, key: k}}}]",
        "envFrom: [{secretRef: {name: s}}]",
        "volumes: [{name: v, secret: {secretName: s}}]",
        "volumes: [{name: v, projected: {sources: [{secret: {name: s}}]}}]",
        "podTemplate: {spec: {volumes: [{name: v, secret: {secretName: s}}]}}",
    ],
)
def test_secrets_are_refused(tmp_path, spec):
    with pytest.raises(SpecError, match="uses a Secret, which is not available on this machine"):
        read_spec(tmp_path, spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must contain one DDPJob, got 0"),
        (f"{HEAD}spec: {{}}\n---\n{HEAD}spec: {{}}\n", "must contain one DDPJob, got 2"),
        ("a: [", "is not YAML at line 1, column 5: "),
        (
            HEAD.replace("v1alpha1", "v9") + "spec: {}",
            'apiVersion: must be ddpjob.dev/v1alpha1, got "ddpjob.dev/v9"',
        ),
        (
            HEAD.replace("name: j", "name: J_1") + "spec: {image: i, args: [a]}",
            'metadata.name: must be .*, got "J_1"',
        ),
        (HEAD, "spec.image: is required"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    with pytest.raises(SpecError, match=message):
        read_text(tmp_path, text)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nodez: 2", r"spec\.nodez: unknown field \(did you mean 'nodes'\?\)"),
        ("zzz: 2", r"spec\.zzz: unknown field; spec has accelerator, activeDeadlineSeconds, "),
        (
            "failurePolicy: {maxRestart: 1}",
            r"spec\.failurePolicy\.maxRestart: unknown field \(did you mean 'maxRestarts'\?\)",
        ),
    ],
)
def test_an_unknown_field_is_refused_with_the_name_that_is_closest(tmp_path, spec, message):
    with pytest.raises(SpecError, match=message):
        read_spec(tmp_path, spec)


def test_a_misspelt_accelerator_is_refused_with_the_name_that_is_closest(tmp_path):
    with pytest.raises(SpecError, match=r"spec.accelerator: .*\(did you mean 'trn1.32xlarge'\?\)"):
        read_spec(tmp_path, "accelerator: trn1.32xlarg")


def test_a_file_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(SpecError, match="cannot read the file: No such file"):
        read(tmp_path / "nowhere.yaml")


def test_a_date_that_does_not_exist_is_a_string_as_in_kubernetes(tmp_path):
    with pytest.raises(SpecError, match="must contain one DDPJob, got 0"):
        read_text(tmp_path, "a: 2026-13-45\n")


@pytest.mark.parametrize(
    "spec",
    [
        "volumes: [{name: v, persistentVolumeClaim: }]",
        "volumes: [{name: v, projected: {sources: all}}]",
        "podTemplate: {spec: {volumes: {name: v}}}",
        "podTemplate: {spec: {containers: [{name: trainer, env: {A: b}}]}}",
        "podTemplate: {spec: {initContainers: [a]}}",
    ],
)
def test_a_field_of_the_wrong_shape_is_refused(tmp_path, spec):
    with pytest.raises(SpecError, match="must be"):
        read_spec(tmp_path, spec)


# ConfigMaps and claims


def test_config_maps_come_from_the_same_file(tmp_path):
    manifest = read_spec(tmp_path, "", config_map("{train.py: pass}"))
    assert manifest.config_maps == {"c": {"train.py": "pass"}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{epochs: 3}", r"ConfigMap c data.epochs: must be a string \(put numbers in quotes\)"),
        ("[a]", "ConfigMap c data: must be an object"),
    ],
)
def test_config_maps_contain_only_strings(tmp_path, data, message):
    with pytest.raises(SpecError, match=message):
        read_spec(tmp_path, "", config_map(data))


def test_a_folder_for_a_claim_that_the_job_does_not_use_is_refused(tmp_path):
    manifest = read_spec(tmp_path, "checkpoint: {claimName: ckpt}")
    check_claims(manifest, ["ckpt"])
    with pytest.raises(SpecError, match=r'the job has no claim "data"; its claims are ckpt'):
        check_claims(manifest, ["data"])


def test_a_misspelt_claim_is_refused_with_the_name_that_is_closest(tmp_path):
    manifest = read_spec(tmp_path, "checkpoint: {claimName: ckpt}")
    with pytest.raises(SpecError, match=r"\(did you mean 'ckpt'\?\)"):
        check_claims(manifest, ["ckp"])


# Fields with the same effect in a local run as in a cluster.
HONOURED = {
    "nodes",
    "nprocPerNode",
    "accelerator",
    "args",
    "code",
    "setup",
    "setupTimeoutSeconds",
    "torchrun",
    "env",
    "envFrom",
    "volumes",
    "volumeMounts",
    "checkpoint",
    "failurePolicy",
    "recovery",
    "fastStart",
    "podTemplate",
    "hangTimeoutSeconds",
    "firstHeartbeatSeconds",
    "heartbeat",
    "activeDeadlineSeconds",
    "startupDeadlineSeconds",
}


def test_each_field_has_its_effect_or_a_note():
    assert set(known_fields()["spec"]) == HONOURED | set(CLUSTER_FIELDS)
    assert not HONOURED & set(CLUSTER_FIELDS)


def test_hangs_and_recovery_are_those_of_the_manifest(tmp_path):
    fields = "hangTimeoutSeconds: 8, heartbeat: Log, recovery: Recreate, suspend: true"
    lifecycle = read_spec(tmp_path, fields).job.spec.lifecycle
    assert lifecycle.hang_timeout == timedelta(seconds=8)
    assert (lifecycle.heartbeat, lifecycle.recovery) == ("Log", "Recreate")
    assert not lifecycle.suspended
