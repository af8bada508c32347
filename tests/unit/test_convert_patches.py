"""The patches of a TrainJob: errors and remarks name their places in the TrainJob."""

import pytest
import yaml
from conversions import MANIFESTS, convert

from ddpjob.core.api.readers import SpecError

VOLCANO = MANIFESTS / "trainjob/volcano.yaml"


def of_runtime(pod):
    """Return a patch of the runtime with these fields of the pod."""
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {"trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}


# Each field for patches, the patch with these fields of the pod, and their path.
KINDS = [
    (
        "runtimePatches",
        of_runtime,
        "[0].trainingRuntimeSpec.template.spec.replicatedJobs[0].template.spec.template.spec",
    ),
    ("podTemplateOverrides", lambda pod: {"spec": pod}, "[0].spec"),
    ("podSpecOverrides", lambda pod: pod, "[0]"),
]


def converted(**fields):
    """Return the spec and the comments of the example with more fields in the TrainJob."""
    job, runtime = map(yaml.safe_load, VOLCANO.read_text().split("---\n"))
    job["spec"].update(fields)
    found = convert(yaml.safe_dump_all([job, runtime]))
    return found.document["spec"], found.comments()


@pytest.mark.parametrize(("field", "patch", "path"), KINDS)
def test_a_patch_of_a_container_that_the_runtime_does_not_have_is_an_error(field, patch, path):
    pod = {"containers": [{"name": "node"}, {"name": "other", "env": []}]}
    with pytest.raises(SpecError) as caught:
        converted(**{field: [patch(pod)]})
    expected = f"spec.{field}{path}.containers[1].name: the runtime has no container other"
    assert expected in str(caught.value)


@pytest.mark.parametrize(("field", "patch", "path"), KINDS)
def test_a_remark_has_the_path_of_the_patch(field, patch, path):
    pod = {
        "hostname": "x",
        "tolerations": [{"key": "a", "foo": 1}],
        "volumes": [{"name": "data", "emptyDir": {}, "bar": 2}],
        "containers": [{"name": "node", "env": [{"name": "RANK", "value": "0"}], "tty": True}],
    }
    spec, comments = converted(**{field: [patch(pod)]})
    assert spec["tolerations"] == [{"key": "a"}]
    for place in (
        "hostname: ",
        "tolerations[0].foo: 1",
        "volumes[0].bar: 2",
        'containers[0].env[0]: {"name": "RANK"',
        "containers[0].tty: true",
    ):
        assert f"dropped: spec.{field}{path}.{place}" in comments


def test_a_value_of_the_runtime_keeps_its_path_beside_a_patch_of_its_container():
    patch = {"spec": {"containers": [{"name": "node", "stdin": True}]}}
    _, comments = converted(podTemplateOverrides=[patch], trainer={"args": ["torchrun", "$A"]})
    assert "spec.podTemplateOverrides[0].spec.containers[0].stdin: true" in comments
    assert "podTemplateOverrides[0].spec.containers[0].command" not in comments


def test_the_trainer_of_the_job_comes_before_a_patch():
    patch = {"spec": {"containers": [{"name": "node", "env": [{"name": "RANK", "value": "0"}]}]}}
    env = [{"name": "RANK", "value": "1"}]
    _, comments = converted(podTemplateOverrides=[patch], trainer={"env": env})
    assert 'spec.trainer.env[0]: {"name": "RANK", "value": "1"}: because torchrun' in comments


def test_a_field_in_the_wrong_place_of_a_patch_is_unknown():
    _, comments = converted(podTemplateOverrides=[{"tolerations": [{"key": "a"}]}])
    assert "spec.podTemplateOverrides[0].tolerations: [" in comments
    assert "because it is an unknown field" in comments


def test_variables_keep_their_places_when_a_patch_moves_them():
    job, runtime = map(yaml.safe_load, VOLCANO.read_text().split("---\n"))
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    container["env"] = [{"name": "A", "value": "1"}, {"name": "RANK", "value": "0"}]
    patches = [
        {"spec": {"containers": [{"name": "node", "env": env}]}}
        for env in (
            [{"name": "A", "value": "2"}, {"name": "WORLD_SIZE", "value": "2"}],
            [{"name": "A", "value": "3"}],
        )
    ]
    job["spec"]["podTemplateOverrides"] = patches
    comments = convert(yaml.safe_dump_all([job, runtime])).comments()
    assert 'template.spec.containers[0].env[1]: {"name": "RANK"' in comments
    place = "spec.podTemplateOverrides[0].spec.containers[0].env[1]"
    assert f'dropped: {place}: {{"name": "WORLD_SIZE"' in comments


def test_an_error_of_a_shape_has_the_path_of_the_patch():
    with pytest.raises(
        SpecError, match=r"spec\.podTemplateOverrides\[0\]\.spec\.nodeSelector: must"
    ):
        converted(podTemplateOverrides=[{"spec": {"nodeSelector": 5}}])


def test_a_patch_of_the_runtime_for_an_unknown_job_is_an_error():
    patch = of_runtime({})
    patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["name"] = "nodes"
    with pytest.raises(SpecError, match="the runtime has no job nodes, only node"):
        converted(runtimePatches=[patch])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"spec": {"initContainers": [{"name": "zz"}]}}, "spec.initContainers[0].name"),
        ({"targetJobs": [{"name": "nod"}]}, "targetJobs[0].name: the runtime has no job nod"),
    ],
)
def test_a_patch_of_something_unknown_is_an_error(override, message):
    with pytest.raises(SpecError) as caught:
        converted(podTemplateOverrides=[override])
    assert f"spec.podTemplateOverrides[0].{message}" in str(caught.value)
