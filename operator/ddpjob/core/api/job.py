"""A DDPJob as the operator last saw it: its identity, its spec and its status."""

import re
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from ddpjob.core.api import names
from ddpjob.core.api.queue import Queue, read_queue
from ddpjob.core.api.readers import Dict, SpecError, child, integer_or_zero, refuse
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.spec_rules import Clause
from ddpjob.core.api.status import Status
from ddpjob.core.api.times import parse_time

JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

# The clause of the CRD for the name, as `require_job_name` has it.
NAME_CLAUSE = Clause(
    f'must be at most {names.MAX_JOB_NAME} lower-case letters, digits and "-", beginning with a '
    "letter and ending with a letter or digit; the job's Service has the same name",
    f"self.metadata.name.matches('^[a-z]([-a-z0-9]{{0,{names.MAX_JOB_NAME - 2}}}[a-z0-9])?$')",
    "metadata.name",
)


@dataclass(frozen=True)
class Job:
    """A DDPJob. If its spec cannot be read, `spec` is None and `spec_error` is the reason."""

    name: str
    namespace: str
    uid: str
    spec: Spec | None
    status: Status = field(default_factory=Status)
    generation: int = 1
    deleting: bool = False
    spec_error: str = ""
    created: datetime | None = None
    managed_by: str = names.CONTROLLER
    queue: Queue | None = None

    @classmethod
    def from_dict(cls, data: Dict) -> "Job":
        """Read a job. Never raises for an object that an API server can hold."""
        metadata = child(data, "metadata")
        job = cls(
            name=str(metadata.get("name", "")),
            namespace=str(metadata.get("namespace", "default")),
            uid=str(metadata.get("uid", "")),
            spec=None,
            status=Status.from_dict(data.get("status")),
            generation=integer_or_zero(metadata.get("generation")),
            deleting=bool(metadata.get("deletionTimestamp")),
            created=parse_time(metadata.get("creationTimestamp")),
            # The operator may be unable to read the spec of another controller's job.
            managed_by=str(child(data, "spec").get("managedBy", names.CONTROLLER)),
            queue=read_queue(metadata.get("labels")),
        )
        try:
            return replace(job, spec=Spec.from_dict(data.get("spec")))
        except SpecError as error:
            return replace(job, spec_error=str(error))

    def reread(self, data: Dict) -> "Job":
        """Return the job in a newer version of its object. Never raises, as `from_dict`.

        Most versions differ only in their status. To read the spec takes as long as all the rest,
        so it is not read again unless the API server has raised `metadata.generation`.
        """
        metadata = child(data, "metadata")
        if integer_or_zero(metadata.get("generation")) != self.generation:
            return Job.from_dict(data)
        return replace(
            self,
            status=Status.from_dict(data.get("status")),
            deleting=bool(metadata.get("deletionTimestamp")),
            queue=read_queue(metadata.get("labels")),
        )

    @property
    def identity(self) -> names.Identity:
        return names.Identity(self.namespace, self.name, self.uid)

    def for_decisions(self) -> "Job":
        """Return the job without the fields that only its pods need: they can be large."""
        if self.spec is None:
            return self
        spec = replace(
            self.spec,
            image="",
            args=(),
            code="",
            command=(),
            torchrun_args=(),
            rdzv_conf={},
            pod_fields={},
            pod_template={},
        )
        return replace(self, spec=spec)


def require_job_name(name: Any) -> str:
    """Return the name of a job. Raises SpecError if a Service cannot have the name.

    The length limit keeps the addresses of the pods within 63 characters.
    """
    valid = isinstance(name, str) and JOB_NAME.fullmatch(name)
    if not valid or len(name) > names.MAX_JOB_NAME:
        wanted = (
            f"at most {names.MAX_JOB_NAME} lower-case letters, digits and '-', beginning with a "
            "letter and ending with a letter or digit"
        )
        raise refuse("metadata.name", wanted, name)
    return str(name)
