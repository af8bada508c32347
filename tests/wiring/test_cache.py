"""The cache never goes back in time, whatever the order of events and the age of LISTs."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from ddpjob.controller.cache import Cache, place_of
from ddpjob.core.api import names
from ddpjob.core.api.names import Identity
from ddpjob.kube.kinds import NODES

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
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "controller": True,
        "name": name,
        "uid": f"owner-of-{name}",
    }
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


def store_of(cache, kind):
    return cache.jobs if kind == "job" else cache.pods


def show(cache, kind, event, obj):
    """Show an event to the cache, as the watches do."""
    store = store_of(cache, kind)
    (store.forget if event == "DELETED" else store.see)(obj)


def show_list(cache, history, version):
    """Show a LIST to the cache with an answer as old as `version`."""
    state = state_at(history, version)
    for kind in ("job", "pod"):
        store = store_of(cache, kind)
        for obj in state[kind]:
            store.see(obj)
        store.drop_unlisted({obj["metadata"]["uid"] for obj in state[kind]}, version, None)


def content(cache):
    """Return (UID, version) of everything in the cache. Its indices must show the same."""
    assert {seen.uid for seen in cache.jobs.by_key.values()} == set(cache.jobs.objects)
    owned = [pod.uid for pods in cache.pods.by_owner.values() for pod in pods.values()]
    assert sorted(owned) == sorted(cache.pods.objects)
    assert cache.jobs._places == sorted(map(place_of, cache.jobs.namespaces))
    stores = (cache.jobs, cache.pods)
    return {(uid, seen.version) for store in stores for uid, seen in store.objects.items()}


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
    assert cache.pods.see(pod)
    touched = {**pod, "metadata": {**pod["metadata"], "resourceVersion": "2"}}
    assert not cache.pods.see(touched)
    assert not cache.pods.see(pod)


def test_a_job_is_reported_if_more_than_its_metadata_has_changed():
    cache = Cache()
    job = a_job("u", 1, "one")
    assert cache.jobs.see(job)
    touched = {**job, "metadata": {**job["metadata"], "resourceVersion": "2", "labels": {}}}
    assert not cache.jobs.see(touched)
    touched["metadata"]["resourceVersion"] = "3"
    assert cache.jobs.see({**touched, "status": {"phase": "Running"}})
    assert cache.job(("ml", "one")).value.phase == "Running"
    assert cache.job(("ml", "one")).version == 3


def test_a_list_of_one_namespace_removes_nothing_of_another():
    cache = Cache()
    cache.jobs.see(a_job("u", 1, "one"))
    cache.jobs.drop_unlisted(set(), 5, "elsewhere")
    assert content(cache) == {("u", 1)}
    cache.jobs.drop_unlisted(set(), 5, "ml")
    assert content(cache) == set()


def test_a_removal_is_remembered_until_the_second_list_after_it():
    cache = Cache()
    cache.pods.see(a_pod("u", 3, "one"))
    cache.pods.drop_unlisted(set(), 5, None)
    cache.pods.prune(4)
    assert not cache.pods.see(a_pod("u", 3, "one"))
    cache.pods.prune(5)
    assert cache.pods.gone == {}


def test_a_pod_that_was_thought_gone_can_be_restored():
    cache = Cache()
    pod = a_pod("u", 3, "one")
    cache.pods.drop("u")
    assert cache.pods.restore(pod)
    assert content(cache) == {("u", 3)}
    nobodys = {**pod, "metadata": {**pod["metadata"], "uid": "v", "labels": {}}}
    assert not cache.pods.restore(nobodys)


def test_a_pod_that_lost_its_owner_is_removed():
    """`kubectl delete --cascade=orphan` leaves it; a new job of its name need not wait for it."""
    cache, pod = Cache(), a_pod("pod", 1, "one")
    cache.pods.see(pod)
    new, old = (Identity("ml", "one", uid) for uid in ("new", "owner-of-one"))
    assert cache.pods_of_earlier_jobs(new) != []
    pod["metadata"] |= {"ownerReferences": [], "resourceVersion": "2"}
    cache.pods.see(pod)
    assert cache.pods_of_earlier_jobs(new) == []
    assert cache.pods_of(old) == []


def test_a_list_of_pods_in_another_etcd_does_not_bring_a_removed_job_back():
    # Versions of different kinds cannot be compared: each kind may have an etcd of its own.
    cache = Cache()
    cache.jobs.see(a_job("u", 1_000_000, "one"))
    cache.jobs.forget(a_job("u", 1_000_001, "one"))
    cache.pods.prune(2_000_000)
    assert not cache.jobs.see(a_job("u", 1_000_000, "one"))


def test_a_job_that_was_created_again_replaces_the_one_before_it():
    cache = Cache()
    cache.jobs.see(a_job("old", 1, "one"))
    cache.jobs.see(a_job("new", 5, "one"))
    cache.jobs.see(a_job("old", 1, "one"))
    assert content(cache) == {("new", 5)}


def a_node(version, ready):
    metadata = {"name": "node-1", "uid": "n", "resourceVersion": str(version)}
    conditions = [{"type": "Ready", "status": ready}]
    return {"metadata": metadata, "spec": {}, "status": {"conditions": conditions}}


def test_a_change_of_a_node_concerns_the_jobs_that_have_pods_on_it():
    cache = Cache()
    for name, node in (("one", "node-1"), ("two", "node-2")):
        pod = a_pod(f"pod-of-{name}", 1, name)
        pod["spec"]["nodeName"] = node
        cache.pods.see(pod)
    assert cache.nodes.see(a_node(1, "True"))
    # A heartbeat changes nothing needed for decisions.
    assert not cache.nodes.see(a_node(2, "True"))
    assert cache.nodes.see(a_node(3, "Unknown"))
    assert set(cache.keys_of(NODES, a_node(3, "Unknown"))) == {("ml", "one")}


def test_the_cache_does_not_keep_what_only_pods_need():
    cache = Cache()
    job = a_job("u", 1, "one")
    job["spec"]["env"] = [{"name": "LARGE", "value": "x" * 60_000}]
    cache.jobs.see(job)
    kept = cache.job(("ml", "one")).value.unpack().spec
    assert (kept.pod_fields, kept.args, kept.image) == ({}, (), "")


# What others may write into an owner reference, with what the operator writes first.
OWNERS = {
    "apiVersion": (names.API_VERSION, "ddpjob.dev/v1", "batch/v1", None),
    "kind": (names.KIND, "Job"),
    "controller": (True, False, None),
    "name": ("one", "two"),
    "uid": ("uid-1", "uid-2"),
}


@st.composite
def pods_of_anybody(draw):
    """Draw pods in two namespaces, with any owners and any label of a job."""
    pods = []
    for number in range(draw(st.integers(1, 6))):
        pod = a_pod(f"pod-{number}", number + 1, draw(st.sampled_from(NAMES)))
        owner = {field: draw(st.sampled_from(values)) for field, values in OWNERS.items()}
        pod["metadata"] |= {
            "namespace": draw(st.sampled_from(("ml", "evil"))),
            "ownerReferences": [owner],
        }
        pods.append(pod)
    return pods


@given(pods_of_anybody())
def test_a_pod_counts_for_the_job_that_its_namespace_and_its_whole_owner_name(pods):
    cache = Cache()
    for pod in pods:
        cache.pods.see(pod)
    for namespace in ("ml", "evil"):
        for name, uid in itertools.product(NAMES, OWNERS["uid"]):
            owner = {field: values[0] for field, values in OWNERS.items()}
            right = (namespace, [owner | {"name": name, "uid": uid}])
            expected = {
                pod["metadata"]["uid"]
                for pod in pods
                if (pod["metadata"]["namespace"], pod["metadata"]["ownerReferences"]) == right
            }
            job = Identity(namespace, name, uid)
            assert {pod.uid for pod in cache.pods_of(job)} == expected
            earlier = [Identity(namespace, name, other) for other in OWNERS["uid"] if other != uid]
            assert {pod.uid for pod in cache.pods_of_earlier_jobs(job)} == {
                pod.uid for other in earlier for pod in cache.pods_of(other)
            }


def test_the_news_of_a_node_concern_the_jobs_that_have_pods_there():
    cache = Cache()
    for number, name in enumerate(NAMES):
        cache.pods.see(a_pod(f"pod-{name}", number + 1, name))
    node = {"metadata": {"name": "2"}}
    assert set(cache.keys_of(NODES, node)) == {("ml", "two")}
    cache.pods.drop("pod-two")
    assert set(cache.keys_of(NODES, node)) == set()
    assert set(cache.pods.by_node) == {"1"}


def test_a_node_that_went_and_came_back_under_its_name_is_there():
    cache = Cache()
    for version, uid in ((1, "old"), (5, "new")):
        metadata = {"name": "gpu-7", "uid": uid, "resourceVersion": str(version)}
        cache.nodes.see({"metadata": metadata, "status": {}})
    cache.nodes.drop_unlisted({"new"}, 6, None)
    assert set(cache.nodes.by_name) == {"gpu-7"}
    cache.nodes.drop("new")
    assert cache.nodes.by_name == {}


# Nodes as they were just read


def a_read_node(uid, version, ready="True"):
    status = {"conditions": [{"type": "Ready", "status": ready}]}
    metadata = {"name": "gpu-7", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {}, "status": status}


def test_a_node_that_was_read_goes_with_its_event():
    cache = Cache()
    cache.nodes.see(a_read_node("a", 5, "Unknown"))
    assert cache.nodes.correct("gpu-7", a_read_node("a", 5, "Unknown")).uid == "a"
    cache.nodes.forget(a_read_node("a", 6))
    assert cache.nodes.by_name == {}


def test_a_node_that_the_watch_has_not_told_of_is_found_by_its_name():
    cache = Cache()
    cache.nodes.see(a_read_node("old", 5, "Unknown"))
    assert cache.nodes.correct("gpu-7", a_read_node("new", 7)).health == "True"
    cache.nodes.drop("old", 8)
    assert cache.nodes.by_name["gpu-7"].uid == "new"


def test_an_older_answer_does_not_replace_what_the_watch_has_shown():
    cache = Cache()
    cache.nodes.see(a_read_node("a", 9))
    assert cache.nodes.correct("gpu-7", a_read_node("a", 5, "Unknown")).health == "True"


def test_a_node_that_is_gone_is_known_no_more():
    cache = Cache()
    cache.nodes.see(a_read_node("a", 5))
    assert cache.nodes.correct("gpu-7", None) is None
    assert (cache.nodes.by_name, cache.nodes.objects) == ({}, {})


class CountedObjects(dict):
    """Objects of a store or of an index, with the number of those that were looked at."""

    looks = 0

    def __iter__(self):
        self.looks += len(self)
        return super().__iter__()

    def __getitem__(self, uid):
        self.looks += 1
        return super().__getitem__(uid)

    def values(self):
        self.looks += len(self)
        return super().values()

    def items(self):
        self.looks += len(self)
        return super().items()


def test_a_list_of_one_namespace_looks_at_its_own_objects_only():
    cache = Cache()
    for number in range(100):
        pod = a_pod(f"uid-{number}", 1, f"job-{number}")
        pod["metadata"]["namespace"] = f"team-{number // 2}"
        cache.pods.see(pod)
    cache.pods.objects = CountedObjects(cache.pods.objects)
    assert cache.pods.count("team-7") == 2
    assert cache.pods.drop_unlisted({"uid-14"}, 2, "team-7") == 1
    assert cache.pods.count("team-7") == 1
    assert cache.pods.objects.looks <= 2
    assert len(cache.pods.objects) == 99
    assert cache.pods.drop_unlisted(frozenset(), 2, "team-7") == 1
    assert "team-7" not in cache.pods._of_namespace


def test_the_news_of_a_node_look_at_its_own_pods_only():
    cache = Cache()
    for number in range(100):
        pod = a_pod(f"uid-{number}", 1, f"job-{number}")
        pod["spec"]["nodeName"] = f"node-{number // 2}"
        cache.pods.see(pod)
    indices = ("objects", "by_owner", "owners", "by_node")
    for name in indices:
        setattr(cache.pods, name, CountedObjects(getattr(cache.pods, name)))
    keys = cache.keys_of(NODES, {"metadata": {"name": "node-7"}})
    assert set(keys) == {("ml", "job-14"), ("ml", "job-15")}
    assert sum(getattr(cache.pods, name).looks for name in indices) <= 2


def test_the_jobs_of_namespaces_are_found_in_the_order_of_a_list():
    cache = Cache()
    for number, namespace in enumerate(("ml", "ml-dev", "ops", "a", "ml")):
        job = a_job(f"uid-{number}", 1, f"job-{number}")
        job["metadata"]["namespace"] = namespace
        cache.jobs.see(job)
    assert cache.jobs.keys_between("", "ml") == [("a", "job-3"), ("ml-dev", "job-1")]
    assert sorted(cache.jobs.keys_between("ml", "ops")) == [("ml", "job-0"), ("ml", "job-4")]
    cache.jobs.drop("uid-0")
    cache.jobs.drop("uid-1")
    assert cache.jobs.keys_between("", "ops") == [("a", "job-3"), ("ml", "job-4")]
    assert len(cache.jobs.keys_in(None)) == 3
