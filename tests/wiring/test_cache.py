"""The cache never goes back in time, whatever the order of events and the age of LISTs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ddpjob.controller.cache import Cache
from ddpjob.core import names

NAMES = ("one", "two")


def a_job(uid, version, name):
    metadata = {
        "name": name,
        "namespace": "ml",
        "uid": uid,
        "resourceVersion": str(version),
        "generation": version,
    }
    return {"metadata": metadata, "spec": {"image": "i", "args": ["a"]}}


def a_pod(uid, version, name):
    owner = {"kind": names.KIND, "controller": True, "uid": f"owner-of-{name}"}
    labels = {names.LABEL_JOB: name, names.LABEL_ATTEMPT: "0", names.LABEL_INDEX: "0"}
    metadata = {
        "name": f"{name}-0-0",
        "namespace": "ml",
        "uid": uid,
        "resourceVersion": str(version),
    }
    return {
        "metadata": metadata | {"labels": labels, "ownerReferences": [owner]},
        "spec": {"nodeName": str(version)},
    }


@st.composite
def histories(draw):
    """Draw a history [(version, kind, event type, object)] of objects with two names.

    They are created, changed, deleted, and created again with new UIDs.
    """
    alive, history = {}, []
    for version in range(1, draw(st.integers(1, 12))):
        kind, name = draw(st.sampled_from(("job", "pod"))), draw(st.sampled_from(NAMES))
        uid = alive.get((kind, name))
        event = draw(st.sampled_from(("MODIFIED", "MODIFIED", "DELETED"))) if uid else "ADDED"
        uid = uid or f"{kind}-{name}-{version}"
        alive[kind, name] = None if event == "DELETED" else uid
        history.append(
            (version, kind, event, (a_job if kind == "job" else a_pod)(uid, version, name))
        )
    return history


def state_at(history, version):
    """Objects by kind as they were at a version."""
    found = {}
    for at, kind, event, obj in history:
        if at <= version:
            found[kind, obj["metadata"]["uid"]] = None if event == "DELETED" else obj
    return {kind: [o for (k, _), o in found.items() if k == kind and o] for kind in ("job", "pod")}


def show(cache, kind, event, obj):
    """Show an event to the cache, as the watches do."""
    see, forget = (
        (cache.see_job, cache.forget_job) if kind == "job" else (cache.see_pod, cache.forget_pod)
    )
    (forget if event == "DELETED" else see)(obj)


def show_list(cache, history, version):
    """Show a LIST to the cache whose answer is as old as `version`."""
    state = state_at(history, version)
    for kind, see, keep in (
        ("job", cache.see_job, cache.drop_unlisted_jobs),
        ("pod", cache.see_pod, cache.drop_unlisted_pods),
    ):
        for obj in state[kind]:
            see(obj)
        keep({obj["metadata"]["uid"] for obj in state[kind]}, version, None)


def content(cache):
    """(UID, version) of everything in the cache."""
    jobs = {(seen.job.uid, seen.version) for seen in cache.jobs.values()}
    return jobs | {(s.pod.uid, s.version) for known in cache.pods.values() for s in known.values()}


def content_of(state):
    return {
        (o["metadata"]["uid"], int(o["metadata"]["resourceVersion"]))
        for objects in state.values()
        for o in objects
    }


@settings(max_examples=50)
@given(st.data())
def test_events_in_any_order_and_lists_of_any_age_end_at_the_newest_state(data):
    history = data.draw(histories())
    last = len(history)
    answers = [("event", *rest) for _, *rest in history * 2]
    answers += [
        ("list", version) for version in data.draw(st.lists(st.integers(0, last), max_size=3))
    ]
    cache = Cache()
    for what, *answer in data.draw(st.permutations(answers)):
        if what == "event":
            show(cache, *answer)
        else:
            show_list(cache, history, *answer)
    assert content(cache) == content_of(state_at(history, last))


@settings(max_examples=50)
@given(st.data())
def test_a_list_alone_corrects_every_missed_event(data):
    history = data.draw(histories())
    cache = Cache()
    for what in data.draw(st.lists(st.sampled_from(history), max_size=10)) if history else ():
        show(cache, *what[1:])
    show_list(cache, history, len(history))
    assert content(cache) == content_of(state_at(history, len(history)))


def test_an_unchanged_pod_is_not_reported():
    cache = Cache()
    pod = a_pod("u", 1, "one")
    assert cache.see_pod(pod)
    touched = {**pod, "metadata": {**pod["metadata"], "resourceVersion": "2"}}
    assert not cache.see_pod(touched)
    assert not cache.see_pod(pod)


def test_a_list_of_one_namespace_removes_nothing_of_another():
    cache = Cache()
    cache.see_job(a_job("u", 1, "one"))
    cache.drop_unlisted_jobs(set(), 5, "elsewhere")
    assert content(cache) == {("u", 1)}
    cache.drop_unlisted_jobs(set(), 5, "ml")
    assert content(cache) == set()


def test_a_removal_is_remembered_until_the_second_list_after_it():
    cache = Cache()
    cache.see_pod(a_pod("u", 3, "one"))
    cache.drop_unlisted_pods(set(), 5, None)
    cache.prune(4)
    assert not cache.see_pod(a_pod("u", 3, "one"))
    cache.prune(5)
    assert cache.gone == {}


def test_a_pod_that_was_thought_gone_can_be_restored():
    cache = Cache()
    pod = a_pod("u", 3, "one")
    cache.drop_pod("owner-of-one", "u")
    assert cache.restore_pod(pod)
    assert content(cache) == {("u", 3)}
    nobodys = {**pod, "metadata": {**pod["metadata"], "uid": "v", "labels": {}}}
    assert not cache.restore_pod(nobodys)


def test_a_pod_that_lost_its_owner_is_removed():
    """`kubectl delete --cascade=orphan` leaves it; a new job of that name need not wait for it."""
    cache, pod = Cache(), a_pod("pod", 1, "one")
    cache.see_pod(pod)
    assert cache.pod_of_another_job(("ml", "one"), "new") is not None
    pod["metadata"] |= {"ownerReferences": [], "resourceVersion": "2"}
    cache.see_pod(pod)
    assert cache.pod_of_another_job(("ml", "one"), "new") is None
    assert cache.pods_of("owner-of-one") == []
