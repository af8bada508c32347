"""Whether pods stay for the next attempt, if the job does not say it."""

import pytest
from builders.jobs import a_spec

from ddpjob.core.api.resolved import Spec

CLAIM = {"persistentVolumeClaim": {"claimName": "data"}}
MOUNT = {"name": "v", "mountPath": "/data"}


def recovery(**fields):
    return str(Spec.from_dict(a_spec(**fields)).recovery[0])


def with_volume(source, **mount):
    return {"volumes": [{"name": "v", **source}], "volumeMounts": [{**MOUNT, **mount}]}


def overlay(*, volumes=(), mounts=(), container="trainer"):
    containers = [{"name": container, "image": "i", "volumeMounts": list(mounts)}]
    return {"podTemplate": {"spec": {"volumes": list(volumes), "containers": containers}}}


IN_PLACE = {
    "a checkpoint": {"checkpoint": {"claimName": "c"}},
    "a claim": with_volume(CLAIM),
    "a network volume": with_volume({"nfs": {"server": "s", "path": "/"}}),
    "a driver of a network volume": with_volume({"csi": {"driver": "gcsfuse"}}),
    "a folder of a claim": with_volume(CLAIM, subPath="train"),
    "a claim in podTemplate": overlay(volumes=[{"name": "v", **CLAIM}], mounts=[MOUNT]),
    "a claim that podTemplate mounts": {
        "volumes": [{"name": "v", **CLAIM}],
        **overlay(mounts=[MOUNT]),
    },
    "an explicit value": {"recovery": "InPlace"},
}

RECREATE = {
    "no volume": {},
    "a folder of the pod": with_volume({"emptyDir": {}}),
    "a folder of the node": with_volume({"hostPath": {"path": "/data"}}),
    "a claim of the pod": with_volume({"ephemeral": {"volumeClaimTemplate": {"spec": {}}}}),
    "a ConfigMap": with_volume({"configMap": {"name": "code"}}),
    "a claim that is not mounted": {"volumes": [{"name": "v", **CLAIM}]},
    "a claim that is mounted read-only": with_volume(CLAIM, readOnly=True),
    "a claim that is read-only": with_volume(
        {"persistentVolumeClaim": {"claimName": "data", "readOnly": True}}
    ),
    "a driver of secrets": with_volume({"csi": {"driver": "secrets-store", "readOnly": True}}),
    "a folder of a claim for each pod": with_volume(CLAIM, subPathExpr="$(DDP_NODE_NAME)"),
    "a claim of a sidecar": overlay(
        volumes=[{"name": "v", **CLAIM}], mounts=[MOUNT], container="sidecar"
    ),
    "a claim that podTemplate replaces": {
        **with_volume(CLAIM),
        **overlay(volumes=[{"name": "v", "emptyDir": {}}]),
    },
    "a folder of the pod that podTemplate mounts at the same path": {
        **with_volume(CLAIM),
        **overlay(
            volumes=[{"name": "mine", "emptyDir": {}}],
            mounts=[{"name": "mine", "mountPath": "/data/"}],
        ),
    },
    "an explicit value": {"checkpoint": {"claimName": "c"}, "recovery": "Recreate"},
}


@pytest.mark.parametrize("fields", IN_PLACE.values(), ids=IN_PLACE)
def test_pods_stay_if_the_script_can_save_checkpoints_elsewhere(fields):
    assert recovery(**fields) == "InPlace"


@pytest.mark.parametrize("fields", RECREATE.values(), ids=RECREATE)
def test_all_pods_are_made_anew_if_it_can_save_them_only_in_the_pod(fields):
    assert recovery(**fields) == "Recreate"


def test_what_decides_is_told():
    assert {Spec.from_dict(a_spec(**fields)).recovery[1] for fields in IN_PLACE.values()} == {
        "default: with spec.checkpoint",
        "default: with the shared volume v",
        "spec.recovery",
    }
    told = "default: without spec.checkpoint or a shared volume"
    assert Spec.from_dict(a_spec()).recovery == ("Recreate", told)


def test_an_unknown_value_is_refused():
    with pytest.raises(ValueError, match=r"spec\.recovery: must be InPlace or Recreate"):
        recovery(recovery="inplace")
