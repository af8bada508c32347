"""The checks of this program beside the rules of a real API server: both refuse the same jobs."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from envtest import ApiServer
from test_crd import ACCEPTED, job

from ddpjob import DDPJob
from ddpjob.core.api.kubernetes import UNKNOWN_TO_NEWEST
from ddpjob.core.api.readers import SpecError

# Number of specs made by changes of good ones, and the seed of these changes.
MUTATED = 2_000
SEED = 20260101

# Values of all types, in the place of any value.
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    1,
    -1,
    7,
    1001,
    2**31,
    2**40,
    2**63,
    -(2**63),
    2.5,
    "",
    "a",
    "auto",
    "gpu",
    "trn1.2xlarge",
    "trn1.32xlarge",
    "ddpjob-x",
    "/ddpjob/x",
    "python3",
    "--nnodes=2",
    "x" * 70,
    "a\u00a0b",
    "a\vb",
    [],
    ["a"],
    [1],
    {},
    {"name": "a"},
    {"a": "b"},
)


def server_refuses(apiserver: ApiServer, manifest: dict[str, Any]) -> str:
    """Return why the API server refuses to create a job, or an empty string."""
    path = "/apis/ddpjob.dev/v1alpha1/namespaces/default/ddpjobs"
    answer = apiserver.request("POST", f"{path}?fieldValidation=Strict&dryRun=All", manifest)
    return "" if answer.code == 201 else str(answer.body["message"])


def we_refuse(manifest: dict[str, Any]) -> str:
    """Return why this program refuses a job, or an empty string."""
    try:
        DDPJob.from_manifest(manifest).check()
    except SpecError as error:
        return str(error)
    return ""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in an object."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value)
    for key, child in items:
        yield from places(child, (*path, key))


def mutated(number: int) -> dict[str, Any]:
    """Return a good spec with up to three changed values, or with other fields."""
    chooser = random.Random(SEED + number)
    spec = copy.deepcopy(job("bad", **chooser.choice(list(ACCEPTED.values())))["spec"])
    for _ in range(chooser.randint(1, 3)):
        found = list(places(spec))
        # Nothing is left of a small spec without its fields.
        if not found:
            break
        *parents, last = chooser.choice(found)
        place = spec
        for key in parents:
            place = place[key]
        if isinstance(place, dict) and chooser.random() < 0.15:
            place["extra"] = copy.deepcopy(chooser.choice(VALUES))
        elif chooser.random() < 0.15:
            del place[last]
        else:
            place[last] = copy.deepcopy(chooser.choice(VALUES))
    return {**job("bad"), "spec": spec}


@pytest.mark.parametrize("case", ACCEPTED)
def test_this_program_accepts_what_the_api_server_accepts(case: str) -> None:
    assert we_refuse(job("good", **ACCEPTED[case])) == ""


def test_a_rule_of_the_api_server_and_its_check_judge_changed_jobs_alike(
    apiserver: ApiServer,
) -> None:
    different = []
    refused = 0
    for number in range(MUTATED):
        manifest = mutated(number)
        theirs, ours = server_refuses(apiserver, manifest), we_refuse(manifest)
        refused += bool(theirs)
        # The CRD accepts any field below those that it declares. The API server refuses the pod.
        is_below = not theirs and ours.endswith(UNKNOWN_TO_NEWEST)
        if bool(theirs) != bool(ours) and not is_below:
            spec = json.dumps(manifest["spec"])
            different.append(f"{number}: {spec}\n  theirs {theirs}\n  ours   {ours}")
    assert not different, f"{len(different)} differ\n" + "\n".join(different[:20])
    # Most changes break a job, and some do not.
    assert MUTATED // 4 < refused < MUTATED
