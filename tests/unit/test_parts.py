"""Parts: dataclasses with fields that declare how they are read, written and described."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta

import pytest
from builders.jobs import FULL_STATUS, a_job
from builders.plans import plan_for
from builders.times import NOW, at

from ddpjob.core.api.entries import NOT_AHEAD, REQUIRED, computed, entry
from ddpjob.core.api.parts import Part, catch_up, differs, form_of, read, schema, write
from ddpjob.core.api.status import Attempt, Status, at_clock
from ddpjob.core.decide.transitions import begin_attempt
from ddpjob.core.observe.observation import observe


@dataclass(frozen=True, slots=True)
class Item(Part):
    """A part in a list."""

    name: str = entry(REQUIRED, "Name.")
    since: datetime | None = entry(None, "Since.", ahead=timedelta(seconds=10))


@dataclass(frozen=True, slots=True)
class Inner(Part):
    """A part with a field for the operator."""

    seen: int = entry(0, "Seen.", progress=True, always=True, low=0, high=9)
    first_step: int | None = entry(None, "First step.", long=True)
    latched: bool = entry(False, "Latched.", internal=True)


@dataclass(frozen=True, slots=True)
class Outer(Part):
    """A part of parts."""

    kind: str = entry("", "Kind.", choices=("A", "B"))
    inner: Inner = entry(Inner(), "Inner.", name="within")
    items: tuple[Item, ...] = entry((), "Items.", items=2, key="name")
    counts: Mapping[str, int] = entry(dict, "Counts.", low=0)
    times: tuple[datetime, ...] = entry((), "Times.", internal=True, ahead=NOT_AHEAD)

    @property
    @computed("Double.", after="kind")
    def double(self) -> str:
        return self.kind * 2


WHOLE = Outer("A", Inner(3, 7, True), (Item("x", NOW),), {"a": 1}, (NOW,))
TWO = (Item("a"), Item("b"))
WRITTEN = {
    "kind": "A",
    "double": "AA",
    "within": {"seen": 3, "firstStep": 7},
    "items": [{"name": "x", "since": "2026-11-21T12:00:00Z"}],
    "counts": {"a": 1},
    "operator": {"within": {"latched": True}, "times": ["2026-11-21T12:00:00Z"]},
}


def test_a_part_is_written_in_the_order_of_its_fields_and_read_again():
    assert write(WHOLE) == WRITTEN
    assert list(write(WHOLE)) == list(WRITTEN)
    assert read(Outer, WRITTEN) == WHOLE


def test_fields_that_have_their_default_are_absent():
    assert write(Outer()) == {"within": {"seen": 0}}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, Outer()),
        ({"kind": "C", "later": 1, 5: "x"}, Outer()),
        ({"within": {"seen": 99}}, Outer(inner=Inner(9))),
        ({"within": {"seen": -1, "firstStep": 2**70}}, Outer(inner=Inner(0, 2**63 - 1))),
        ({"within": {"seen": True}}, Outer()),
        ({"within": {"latched": True}}, Outer()),
        ({"items": [{}, "x", {"name": "a"}, {"name": "b"}]}, Outer()),
        ({"items": [{"name": "a"}, {"name": "b"}, {"name": "c"}]}, Outer(items=TWO)),
        ({"counts": {"a": -1, "b": "x", 3: 4}}, Outer(counts={"a": 0})),
        ({"operator": {"within": {"latched": True}}}, Outer(inner=Inner(latched=True))),
        ({"operator": {"times": ["x", None]}}, Outer()),
    ],
)
def test_what_cannot_be_read_is_absent_and_bounds_are_kept(data, expected):
    assert read(Outer, data) == expected


def test_the_schema_has_bounds_descriptions_and_the_object_of_the_operator():
    properties = schema(Outer)["properties"]
    assert list(properties) == ["kind", "double", "within", "items", "counts", "operator"]
    assert properties["kind"] == {"description": "Kind.", "type": "string", "enum": ["A", "B"]}
    within = properties["within"]["properties"]
    bounds = {"minimum": 0, "maximum": 9}
    assert within["seen"] == {
        "description": "Seen.",
        "type": "integer",
        "format": "int32",
        **bounds,
    }
    assert within["firstStep"]["format"] == "int64"
    assert properties["items"]["maxItems"] == 2
    assert properties["items"]["x-kubernetes-list-map-keys"] == ["name"]
    assert properties["items"]["items"]["required"] == ["name"]
    assert list(properties["operator"]["properties"]) == ["within", "times"]


def test_a_change_of_progress_alone_is_no_difference():
    assert not differs(WHOLE, replace(WHOLE, inner=Inner(4, 7, True)))
    assert differs(WHOLE, replace(WHOLE, inner=Inner(3, 7, False)))
    assert differs(WHOLE, replace(WHOLE, items=()))


def test_a_time_is_no_further_ahead_of_the_clock_than_its_field_allows():
    ahead = replace(WHOLE, items=(Item("x", at(99)), Item("y", at(9))), times=(at(1), at(-1)))
    caught_up = catch_up(ahead, NOW)
    assert caught_up.items == (Item("x", at(10)), Item("y", at(9)))
    assert caught_up.times == (NOW, at(-1))
    assert catch_up(WHOLE, NOW) is WHOLE


def test_a_part_is_the_same_after_it_was_pickled():
    assert pickle.loads(pickle.dumps(FULL_STATUS)) == FULL_STATUS


def test_a_field_without_a_declaration_is_an_error():
    @dataclass(frozen=True)
    class Undeclared(Part):
        name: str = ""

    with pytest.raises(TypeError, match="the field name of a part needs an entry"):
        form_of(Undeclared)


def test_a_field_of_two_types_is_an_error():
    @dataclass(frozen=True)
    class TwoTypes(Part):
        name: str | int = entry("", "Name.")

    with pytest.raises(TypeError, match="not a type that a field of a part can have"):
        form_of(TwoTypes)


# The parts of a status


def test_a_new_attempt_keeps_nothing_of_the_last_one_that_is_not_passed_to_it():
    job = replace(a_job(nodes=2), status=FULL_STATUS)
    begun = begin_attempt(observe(job, ()), job.spec, 3, at(90))
    passed = {"number": 3, "start": at(90), "had_pods": True}
    assert begun.attempt == Attempt(**passed)
    kept = {field.name for field in fields(Status)}
    kept -= {"attempt", "pods", "resolved", "selector", "result"}
    for name in kept:
        assert getattr(begun, name) == getattr(FULL_STATUS, name), name


def test_a_clock_that_was_set_back_changes_no_record():
    ahead = replace(FULL_STATUS, conditions=())
    now = at(-500)
    status = at_clock(ahead, now)
    assert status.attempts == ahead.attempts
    assert status.last_failure == ahead.last_failure
    assert status.attempt.running_time == status.account.since == status.start_time == now
    assert status.budget.failure_times == (now,)
    # Of a finished job only what the operator still follows is corrected.
    finished = at_clock(FULL_STATUS, now)
    assert (finished.active_since, finished.unreachable_nodes[0].since) == (now, now)
    assert (finished.start_time, finished.budget) == (NOW, FULL_STATUS.budget)


def test_a_status_of_a_clock_that_was_set_back_is_written_once():
    job = a_job(status=replace(FULL_STATUS, conditions=(), attempt=Attempt(0, start=at(99))))
    assert plan_for(job).status.attempt.start == NOW
