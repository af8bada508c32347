"""`ddpjob validate` beside a real API server: both refuse the same jobs with the same sentences."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from envtest import ApiServer
from test_crd import ACCEPTED, REFUSED, job

from ddpjob.client.validation import validate
from ddpjob.core.api.kubernetes import UNKNOWN_TO_CRD

# Specs that are made by changes of good ones, and the changes in each.
MUTATED = 400
SEED = 20260101

# What the API server adds when a value is wrong, and what says nothing of its own.
NOISE = ("<nil>", "accessor error", "evaluating rule", "Checked value must be", "2147483647")

# Values of all types, which take the place of any value.
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    1,
    -1,
    7,
    1001,
    2**40,
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
    [],
    ["a"],
    [1],
    {},
    {"name": "a"},
    {"a": "b"},
)


def ask(apiserver: ApiServer, manifest: dict[str, Any]) -> list[str]:
    """Return the sentences with which the API server refuses to create a job."""
    path = "/apis/ddpjob.dev/v1alpha1/namespaces/default/ddpjobs"
    answer = apiserver.request("POST", f"{path}?fieldValidation=Strict&dryRun=All", manifest)
    if answer.code == 201:
        return []
    message = answer.body["message"]
    if "strict decoding error: " in message:
        return str(message.partition("strict decoding error: ")[2]).split(", ")
    found = [cause["message"] for cause in answer.body["details"]["causes"]]
    fields = [cause["field"] for cause in answer.body["details"]["causes"]]
    both = [f"{field}: {text}" for field, text in zip(fields, found, strict=True)]
    return [one for one in both if not any(words in one for words in NOISE)]


def without_hint(sentence: str) -> str:
    return sentence.partition(" (did you mean")[0].removesuffix(UNKNOWN_TO_CRD)


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
    """Return a good spec with up to three values that are others, or with other fields."""
    chooser = random.Random(SEED + number)
    spec = copy.deepcopy(job("bad", **chooser.choice(list(ACCEPTED.values())))["spec"])
    for _ in range(chooser.randint(1, 3)):
        found = list(places(spec))
        # Nothing is left of a small spec that has lost its fields.
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


@pytest.mark.parametrize("case", [*REFUSED, *ACCEPTED])
def test_the_same_jobs_are_refused_with_the_same_sentences(apiserver: ApiServer, case: str) -> None:
    spec = REFUSED[case][0] if case in REFUSED else ACCEPTED[case]
    manifest = job("bad", **spec)
    assert sorted(map(without_hint, validate(manifest))) == sorted(ask(apiserver, manifest))


def test_hundreds_of_changed_jobs_are_judged_alike(apiserver: ApiServer) -> None:
    different = []
    refused = 0
    for number in range(MUTATED):
        manifest = mutated(number)
        theirs = sorted(ask(apiserver, manifest))
        ours = sorted(map(without_hint, validate(manifest)))
        refused += bool(theirs)
        if theirs != ours:
            spec = json.dumps(manifest["spec"])
            different.append(f"{number}: {spec}\n  theirs {theirs}\n  ours   {ours}")
    assert not different, f"{len(different)} differ\n" + "\n".join(different[:20])
    # Most changes break a job, and some do not.
    assert MUTATED // 4 < refused < MUTATED
