"""A planned pod, or another object of a job, as the object to create.

The skeletons in `templates/` show an administrator the shape of each object. They get their values
from pod_context.py. Then the user's overlay is merged, and merged_pod.py completes the pod.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from ddpjob.core.agent_files import agent_files, config_map_name
from ddpjob.core.api import names
from ddpjob.core.api.job import Job
from ddpjob.core.api.merge import merge
from ddpjob.core.api.readers import SpecError
from ddpjob.core.api.status import Attempt, PodCounts
from ddpjob.core.api.yaml_text import load_yaml
from ddpjob.core.plan import Owned
from ddpjob.core.render.assignment import assignment
from ddpjob.core.render.merged_pod import (
    NO_CONSTRAINTS,
    Constraints,
    add_domain,
    complete,
    constrain,
)
from ddpjob.core.render.pod_context import (
    ASSIGNMENT,
    HOSTNAME,
    INDEX,
    PORT,
    Settings,
    common_context,
    pod_context,
)

PLACEHOLDER = re.compile("\ue000[a-z]+\ue000")
SURROGATES = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")


def rendered(
    job: Job,
    kind: Owned,
    indices: Iterable[int],
    settings: Settings,
    constraints: Constraints = NO_CONSTRAINTS,
) -> Iterator[dict[str, Any]]:
    """Yield the objects of a kind to create for a job. Raises SpecError as `pods` does."""
    if kind is Owned.POD:
        yield from pods(job, indices, settings, constraints)
    else:
        yield shared(job, kind)


def pods(
    job: Job,
    indices: Iterable[int],
    settings: Settings,
    constraints: Constraints | None = NO_CONSTRAINTS,
) -> Iterator[dict[str, Any]]:
    """Yield the pods of the nodes `indices` of the job's current attempt, in their order.

    `constraints` decide about their nodes, beside the spec. None leaves the choice open.

    The pods of a gang differ in a few values. So the skeleton is rendered and parsed once, and then
    only placeholders are replaced. Parsing YAML for each of 1,000 pods would take seconds.

    Raises SpecError if fields of the spec do not have the shape of a pod's, or if a user's mount
    takes the place of one of the operator's.
    """
    assert job.status.attempt.number is not None
    attempt = job.status.attempt.number
    try:
        shape = _render_shape(job, settings, constraints)
    except (TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        # The CRD leaves the shape of some fields open, such as affinity's.
        raise SpecError(
            f"spec: cannot render a pod from it ({type(error).__name__}: {error}); check the types "
            "of nested pod fields, such as affinity"
        ) from error
    for index in indices:
        words = {
            INDEX: str(index),
            HOSTNAME: names.hostname(attempt, index),
            # It is JSON within JSON.
            ASSIGNMENT: json.dumps(assignment(job, index, settings.addresses))[1:-1],
            PORT: str(settings.addresses.port(job, index)),
        }
        pod = json.loads(_fill(shape, words))
        if constraints and constraints.placement:
            add_domain(pod, constraints.placement, index)
        yield pod


def pod_template(job: Job, settings: Settings) -> dict[str, Any]:
    """Return the template of a job's pods, for what chooses their nodes.

    Raises SpecError as `pods` does.
    """
    assert job.spec is not None
    status = replace(job.status, attempt=Attempt(0), pods=PodCounts(desired=job.spec.nodes))
    (pod,) = pods(replace(job, status=status), [0], settings, None)
    return pod


def _fill(shape: str, words: Mapping[str, str]) -> str:
    return PLACEHOLDER.sub(lambda found: words.get(found[0], found[0]), shape)


def _render_shape(job: Job, settings: Settings, constraints: Constraints | None) -> str:
    """Return what the pods of a gang have in common as JSON, with placeholders for the rest."""
    assert job.spec is not None
    settings = settings.of_job(job.spec)
    text = _template("pod.yaml.j2").render(pod_context(job, job.spec, settings))
    merged = merge(load_yaml(text), job.spec.pod_template)
    pod = complete(merged, job, job.spec, settings)
    if constraints:
        constrain(pod, job, constraints)
    return json.dumps(pod, ensure_ascii=False)


def agent_config_map(namespace: str, lease_uid: str) -> dict[str, Any]:
    """Return the ConfigMap with the agent's files for the jobs of a namespace.

    The Lease of the namespace owns it; without one, it has no owner.
    """
    text = _template("agent.yaml.j2").render(
        namespace=namespace,
        lease=names.INSTALLATION_LEASE,
        lease_uid=lease_uid,
        labels={names.LABEL_MANAGED_BY: names.MANAGER},
        name=config_map_name(),
        files=agent_files(),
    )
    rendered: dict[str, Any] = load_yaml(text)
    return rendered


def shared(job: Job, kind: Owned) -> dict[str, Any]:
    """Return the one object of a kind shared by all pods of a job."""
    template = _template(f"{kind.lower()}.yaml.j2")
    text = template.render(common_context(job), port=names.RENDEZVOUS_PORT)
    rendered: dict[str, Any] = load_yaml(text)
    return rendered


@cache
def _template(name: str) -> Template:
    environment = Environment(
        loader=PackageLoader("ddpjob.core.render"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.policies["json.dumps_function"] = _json_for_yaml
    return environment.get_template(name)


def _json_for_yaml(value: Any, **options: Any) -> str:
    """Return JSON that is YAML too.

    JSON escapes some characters as two surrogates. YAML does not join them again.
    """
    text = json.dumps(value, **options)
    return SURROGATES.sub(lambda found: str(json.loads(f'"{found[0]}"')), text)
