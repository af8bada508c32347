"""A job as the operator last saw it."""

import pytest
from builders.containers import failed, running
from builders.jobs import a_job, a_manifest, a_running_job, a_status
from builders.plans import plan_for
from builders.pods import a_pod
from builders.times import NOW

from ddpjob.core.api.job import Job, require_job_name
from ddpjob.core.api.readers import SpecError


def test_a_job_is_read():
    job = Job.from_dict(a_manifest(name="digits", generation=4))
    assert (job.name, job.namespace, job.generation) == ("digits", "ml", 4)
    assert (job.deleting, job.spec_error) == (False, "")


def test_a_job_with_a_deletion_timestamp_is_being_deleted():
    assert Job.from_dict(a_manifest(deleting=True)).deleting


def test_a_job_with_a_wrong_spec_has_the_message_instead():
    job = Job.from_dict(a_manifest(nodes=0))
    assert job.spec is None
    assert job.spec_error == "spec.nodes: must be an integer from 1 to 1000, got 0"


def test_the_age_of_a_job_is_read():
    manifest = a_manifest()
    assert Job.from_dict(manifest).created is None
    manifest["metadata"]["creationTimestamp"] = "2026-11-21T12:00:00Z"
    assert Job.from_dict(manifest).created == NOW


@pytest.mark.parametrize("spec", [{"nodes": 3}, {"nodes": 0}])
def test_the_spec_is_read_again_only_if_its_generation_is_another(spec):
    job = a_job(**spec)
    status = a_status(attempt=2).to_dict()
    newer = job.reread(a_manifest(status=status, deleting=True, **spec))
    assert newer.spec is job.spec
    assert newer == Job.from_dict(a_manifest(status=status, deleting=True, **spec))
    changed = a_manifest(status=status, generation=2, nodes=4)
    assert job.reread(changed) == Job.from_dict(changed)


@pytest.mark.parametrize("job", [a_job(), a_running_job(), a_job(nodes=0)])
def test_decisions_do_not_need_what_only_the_pods_need(job):
    pods = a_pod(0, running()), a_pod(1, failed("boom"))
    small = job.for_decisions()
    assert plan_for(small, *pods) == plan_for(job, *pods)
    assert small.spec is None or small.spec.image == ""


@pytest.mark.parametrize("name", ["a", "a1", "digits", "my-job-2", "a" * 52])
def test_a_job_name_that_a_service_can_have_is_accepted(name):
    assert require_job_name(name) == name


WANTED = (
    "at most 52 lower-case letters, digits and '-', beginning with a letter and ending with a "
    "letter or digit"
)


@pytest.mark.parametrize("name", ["", "1a", "-a", "a-", "A", "a_b", "a.b", "a" * 53, "ä"])
def test_a_job_name_that_no_service_can_have_is_refused(name):
    with pytest.raises(SpecError) as refused:
        require_job_name(name)
    assert str(refused.value) == f'metadata.name: must be {WANTED}, got "{name}"'


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a\n", f'metadata.name: must be {WANTED}, got "a\\n"'),
        (7, f"metadata.name: must be {WANTED}, got 7"),
        (None, f"metadata.name: is required; it must be {WANTED}"),
    ],
)
def test_a_job_name_is_quoted_as_it_was_written(name, message):
    with pytest.raises(SpecError) as refused:
        require_job_name(name)
    assert str(refused.value) == message
