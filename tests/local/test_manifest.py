"""What `ddpjob run --local` says of a manifest before it starts anything."""

from pathlib import Path

import pytest

from ddpjob.core.readers import SpecError
from ddpjob.local.manifest import check_claims, read

HEAD = "apiVersion: ddpjob.dev/v1alpha1\nkind: DDPJob\nmetadata: {name: j}\n"


def manifest(tmp_path: Path, spec: str, head: str = HEAD, more: str = "") -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(f"{head}spec: {{image: i, args: [-m, x]{spec and ', ' + spec}}}\n{more}")
    return path


def test_what_a_laptop_cannot_honour_is_said_once_each(tmp_path):
    notes = read(
        manifest(tmp_path, "nodeSelector: {a: b}, priorityClassName: p, accelerator: trn1.32xlarge")
    ).notes
    assert [note.split(":")[0] for note in notes] == [
        "image",
        "nodeSelector",
        "priorityClassName",
        "accelerator",
    ]
    assert "aws.amazon.com/neuron" in notes[-1]


def test_sidecars_and_pod_settings_are_named(tmp_path):
    template = (
        "podTemplate: {spec: {dnsPolicy: None, containers: [{name: trainer}, {name: proxy}]}}"
    )
    notes = read(manifest(tmp_path, template)).notes
    assert any("proxy" in note for note in notes)
    assert any("dnsPolicy" in note for note in notes)


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
def test_secrets_are_refused_with_a_sentence(tmp_path, spec):
    with pytest.raises(SpecError, match="takes a Secret, which only a cluster has"):
        read(manifest(tmp_path, spec))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must hold one DDPJob; it holds 0"),
        (f"{HEAD}spec: {{}}\n---\n{HEAD}spec: {{}}\n", "it holds 2"),
        ("a: [", "is not YAML"),
        (HEAD.replace("v1alpha1", "v9") + "spec: {}", "apiVersion must be ddpjob.dev/v1alpha1"),
        (
            HEAD.replace("name: j", "name: J_1") + "spec: {image: i, args: [a]}",
            "metadata.name 'J_1'",
        ),
        (HEAD + "spec: {image: i, args: [a], nodez: 2}", "no field 'nodez'"),
        (HEAD, "spec.image"),
    ],
)
def test_a_bad_file_gets_a_sentence(tmp_path, text, says):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=says):
        read(path)


def test_a_file_that_is_not_there_gets_a_sentence(tmp_path):
    with pytest.raises(SpecError, match="No such file"):
        read(tmp_path / "nowhere.yaml")


def test_config_maps_come_from_the_same_file(tmp_path):
    more = "---\nkind: ConfigMap\nmetadata: {name: scripts}\ndata: {train.py: pass}\n"
    assert read(manifest(tmp_path, "", more=more)).config_maps == {"scripts": {"train.py": "pass"}}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("{epochs: 3}", "must be texts .numbers in quotes., but 'epochs' is 3"),
        ("[a]", "must be an object of texts"),
    ],
)
def test_config_maps_hold_texts(tmp_path, data, says):
    more = f"---\nkind: ConfigMap\nmetadata: {{name: c}}\ndata: {data}\n"
    with pytest.raises(SpecError, match=says):
        read(manifest(tmp_path, "", more=more))


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
def test_a_wrong_shape_gets_a_sentence(tmp_path, spec):
    with pytest.raises(SpecError, match="must be"):
        read(manifest(tmp_path, spec))


def test_a_date_that_is_none_is_no_traceback(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("a: 2026-13-45\n")
    with pytest.raises(SpecError, match="is not YAML"):
        read(path)


def test_what_the_overlay_says_of_the_trainer_is_noted(tmp_path):
    trainer = (
        "{name: trainer, image: other, workingDir: /w, livenessProbe: {}, lifecycle: {}, tty: true}"
    )
    notes = read(manifest(tmp_path, f"podTemplate: {{spec: {{containers: [{trainer}]}}}}")).notes
    said = [note.split(": ")[1] for note in notes if note.startswith("podTemplate's trainer")]
    assert said == ["image", "lifecycle", "livenessProbe", "tty", "workingDir"]


def test_volumes_that_only_a_cluster_has_are_noted_once_each_kind(tmp_path):
    volumes = (
        "[{name: a, nfs: {}}, {name: b, nfs: {}}, {name: c, csi: {}}, {name: d, emptyDir: {}}]"
    )
    notes = [
        note
        for note in read(manifest(tmp_path, f"volumes: {volumes}")).notes
        if note.startswith("volumes")
    ]
    assert len(notes) == 2
    assert "a, b: there is no nfs here" in notes[1]


def test_a_claim_that_the_job_does_not_use_is_refused(tmp_path):
    spec = read(manifest(tmp_path, "checkpoint: {claimName: ckpt}")).spec
    check_claims(spec, ["ckpt"])
    with pytest.raises(SpecError, match=r"--claim names 'data'.*its claims are ckpt"):
        check_claims(spec, ["data"])
