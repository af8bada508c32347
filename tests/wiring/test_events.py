"""The whole operator, with kopf, against the fake API server."""

import asyncio
import copy
import itertools
import socket
import time
from types import SimpleNamespace

import aiohttp
import pytest
from fake_api import hanging_webhook, refusal, unanswered
from gang import a_job, fails, is_running, pods, runs, status, succeeds, until

from ddpjob.controller import act, lister, workqueue
from ddpjob.controller.cache import Cache
from ddpjob.controller.errors import CannotRun
from ddpjob.controller.lister import Lister
from ddpjob.controller.main import operate
from ddpjob.controller.reconcile import Reconciler
from ddpjob.core.decide import budget

POD_PATH = "/api/v1/namespaces/ml/pods/digits-0-1"


def is_latched(status):
    """Return True if every pod of the attempt was seen."""
    return status.get("operator", {}).get("attempt", {}).get("latched", False)


@pytest.fixture
def quick_resync(monkeypatch):
    monkeypatch.setattr(lister, "INTERVAL", 0.2)
    monkeypatch.setattr(lister, "EARLY_INTERVALS", ())
    monkeypatch.setattr(lister, "COMPLETE_INTERVAL", 0)


@pytest.fixture
def discovery_held(fake):
    """Delay kopf's first LIST and WATCH until this event is set. Only kopf requests /api."""
    free = asyncio.Event()

    async def later(_, proceed):
        await free.wait()
        return await proceed()

    fake.fault("GET", "/api", later)
    return free


@pytest.fixture
def quick_retries(monkeypatch):
    monkeypatch.setattr(workqueue, "FIRST_RETRY", 0.05)
    monkeypatch.setattr(act, "FIRST_RETRY", 0.2)


async def settled(fake, quiet=0.5):
    """Nothing was asked for a while, streams and the Lease aside."""

    def asked():
        return [a for a in fake.log if a.method != "WATCH" and "/leases" not in a.path]

    await until(lambda: asked() and time.monotonic() - asked()[-1].time > quiet)


async def metrics(options):
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{options.http_port}/metrics") as page,
    ):
        return await page.text()


# --- the normal path


async def test_a_job_gets_a_service_pods_and_an_event_when_they_run(fake, operator):
    await settled(fake)
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    assert pods(fake) == ["digits-0-0", "digits-0-1"]
    assert fake.get("services", "digits")["spec"]["clusterIP"] == "None"
    assert [event["reason"] for event in fake.all("events")] == ["Running"]


async def test_a_job_from_before_the_operator_is_started(fake, operator):
    fake.create("ddpjobs", a_job())
    await is_running(fake)


async def test_the_normal_path_reads_nothing_and_writes_at_most_six_times_beside_the_pods(
    fake, operator
):
    await settled(fake)
    before = len(fake.log)
    fake.create("ddpjobs", a_job(nodes=8))
    await is_running(fake, nodes=8)
    del fake.log[:before]
    assert fake.reads() == []
    assert len(fake.writes()) <= 8 + 6


async def test_a_field_of_a_newer_crd_is_ignored_and_named_in_one_event(
    fake, quick_resync, operator
):
    fake.create("ddpjobs", a_job(minNodes=1))
    await is_running(fake)
    lists = len(fake.reads("/api/v1/pods"))
    await until(lambda: len(fake.reads("/api/v1/pods")) >= lists + 3)
    reasons = [event["reason"] for event in fake.all("events")]
    assert sorted(reasons) == ["Running", "UnknownFields"]
    assert status(fake)["ignoredFields"] == ["spec.minNodes"]


async def test_an_idle_operator_writes_nothing(fake, quick_resync, operator):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    before = len(fake.writes())
    lists = len(fake.reads("/api/v1/pods"))
    await until(lambda: len(fake.reads("/api/v1/pods")) >= lists + 5)
    assert len(fake.writes()) == before


async def test_a_job_ends_complete(fake, operator):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    succeeds(fake, "digits-0-0", "digits-0-1")
    await until(lambda: status(fake)["phase"] == "Complete")


async def test_a_failure_restarts_the_gang_once_its_last_pod_has_ended(fake, operator):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    fails(fake, "digits-0-1")
    await until(lambda: status(fake)["reason"] == "WaitingForOldPods")
    assert "digits-1-0" not in pods(fake)
    fake.remove("pods", "digits-0-0")
    await is_running(fake, attempt=1)
    assert (status(fake)["restarts"], status(fake)["budget"]["disruptions"]) == (1, 0)


async def test_progress_is_written_at_intervals_and_always_at_the_end(fake, operator, monkeypatch):
    monkeypatch.setattr(act, "PROGRESS_INTERVAL", 0.5)
    fake.create("ddpjobs", a_job(nodes=12))
    names = [f"digits-0-{index}" for index in range(11)]  # one never runs: all of it is progress
    await until(lambda: status(fake).get("reason") == "ContainersStarting")
    before = len(fake.log)
    for name in names:
        runs(fake, name)
        await asyncio.sleep(0.05)
    await until(lambda: status(fake)["nodes"]["ready"] == 11)
    del fake.log[:before]
    times = [a.time for a in fake.writes(".*/status")]
    assert len(times) < len(names)
    assert all(later - sooner >= 0.45 for sooner, later in itertools.pairwise(times))


async def test_the_more_jobs_have_progress_the_rarer_each_writes_it(fake, operator, monkeypatch):
    monkeypatch.setattr(act, "PROGRESS_INTERVAL", 0.1)
    monkeypatch.setattr(act, "PROGRESS_RATE", 5)
    jobs = [f"job-{number}" for number in range(5)]
    for name in jobs:
        fake.create("ddpjobs", a_job(name, nodes=12))
    await until(lambda: all(status(fake, n).get("reason") == "ContainersStarting" for n in jobs))
    before = len(fake.log)
    for index in range(11):
        for name in jobs:
            runs(fake, f"{name}-0-{index}")
        await asyncio.sleep(0.05)
    await until(lambda: all(status(fake, name)["nodes"]["ready"] == 11 for name in jobs))
    del fake.log[:before]
    # Each may write at once, and after a second: five jobs have progress, and five may write it. On
    # a slow machine it lasts longer.
    times = [a.time for a in fake.writes(".*/status")]
    more_seconds = max(0.0, times[-1] - times[0] - 1)
    assert len(times) <= 3 * len(jobs) + 2 * act.PROGRESS_RATE * more_seconds


@pytest.mark.parametrize("namespaces", [("ml",)])
async def test_an_operator_of_one_namespace_leaves_the_others_alone(fake, operator):
    fake.create(
        "ddpjobs", {**a_job("elsewhere"), "metadata": {"name": "elsewhere", "namespace": "other"}}
    )
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    assert pods(fake) == ["digits-0-0", "digits-0-1"]
    assert not [
        a for a in fake.log if a.path in ("/api/v1/pods", "/apis/ddpjob.dev/v1alpha1/ddpjobs")
    ]


# --- what was missed


async def test_a_compacted_history_stops_nothing(fake, operator):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    fake.compact()
    fake.create("ddpjobs", a_job("second"))
    await until(lambda: "second-0-1" in pods(fake))
    succeeds(fake, "digits-0-0", "digits-0-1")
    await until(lambda: status(fake)["phase"] == "Complete")


async def test_a_pod_deleted_without_a_watch_is_confirmed_by_one_get(fake, quick_resync, operator):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    # The watches end, and what happened since cannot be watched any more.
    fake.stall()
    fake.remove("pods", "digits-0-1")
    fake.compact()
    before = len(fake.log)
    fake.cut_watches()
    fake.flow()
    await until(lambda: status(fake)["attempt"]["number"] == 1)
    await until(
        lambda: (
            "digits-0-0"
            in [
                p["metadata"]["name"]
                for p in fake.all("pods")
                if p["metadata"].get("deletionTimestamp")
            ]
        )
    )
    assert len([a for a in fake.log[before:] if a.method == "GET" and a.path == POD_PATH]) == 1
    assert (status(fake)["budget"]["failures"], status(fake)["budget"]["disruptions"]) == (0, 1)


async def test_a_pod_deleted_between_the_first_list_and_the_first_watch_is_noticed_soon(
    fake, discovery_held, operator
):
    fake.create("ddpjobs", a_job())
    await until(lambda: is_latched(status(fake)))
    fake.remove("pods", "digits-0-1")
    discovery_held.set()
    await until(lambda: status(fake)["attempt"]["number"] == 1, seconds=15)


async def test_a_job_deleted_without_a_watch_is_forgotten(fake, quick_resync, operator, options):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    fake.fault("WATCH", ".*", refusal(500), times=float("inf"))
    fake.remove("ddpjobs", "digits")
    fake.compact()
    lists = len(fake.reads("/api/v1/pods"))
    await until(lambda: len(fake.reads("/api/v1/pods")) >= lists + 3)
    before = len(fake.writes())
    fake.faults.clear()
    fails(fake, "digits-0-1")
    lists = len(fake.reads("/api/v1/pods"))
    await until(lambda: len(fake.reads("/api/v1/pods")) >= lists + 3)
    assert len(fake.writes()) == before


async def test_a_list_older_than_a_pod_does_not_remove_it(fake, quick_resync, operator):
    await settled(fake, quiet=0.05)
    old = fake.snapshot()
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    fake.stale_list = old
    lists = len(fake.reads("/api/v1/pods"))
    before = len(fake.writes())
    await until(lambda: len(fake.reads("/api/v1/pods")) >= lists + 3)
    assert len(fake.writes()) == before
    assert fake.reads(POD_PATH) == []
    succeeds(fake, "digits-0-0", "digits-0-1")
    await until(lambda: status(fake)["phase"] == "Complete")


async def test_an_old_event_of_a_job_neither_creates_nor_restarts_anything_again(fake, operator):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    running = copy.deepcopy(fake.get("ddpjobs", "digits"))
    fails(fake, "digits-0-1")
    await until(lambda: status(fake)["reason"] == "WaitingForOldPods")
    fake.emit("ddpjobs", "MODIFIED", running)
    fake.remove("pods", "digits-0-0")
    await is_running(fake, attempt=1)
    fake.emit("ddpjobs", "MODIFIED", running)
    await settled(fake)
    assert (status(fake)["attempt"]["number"], status(fake)["restarts"]) == (1, 1)
    assert pods(fake) == ["digits-0-1", "digits-1-0", "digits-1-1"]


async def test_a_pod_of_an_unknown_attempt_makes_the_operator_read_the_job_again(fake, operator):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    fake.fault("WATCH", ".*/ddpjobs", refusal(500), times=float("inf"))
    fake.cut_watches()
    pod = copy.deepcopy(fake.get("pods", "digits-0-1"))
    newer = {"attempt": {"number": 1}, "nodes": {"desired": 2}, "operator": {}}
    fake.change("ddpjobs", "digits", status={**status(fake), **newer})
    for name in ("digits-0-0", "digits-0-1"):
        fake.remove("pods", name)
    labels = {**pod["metadata"]["labels"], "ddpjob.dev/attempt": "1"}
    meta = {
        "name": "digits-1-1",
        "labels": labels,
        "ownerReferences": pod["metadata"]["ownerReferences"],
    }
    fake.create("pods", {**pod, "metadata": meta, "status": {"phase": "Pending"}})
    await until(lambda: "digits-1-0" in pods(fake))
    assert status(fake)["attempt"]["number"] == 1


async def test_a_pod_missing_from_a_watch_but_found_by_get_costs_nothing(fake, operator):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    labels = dict(fake.get("pods", "digits-0-1")["metadata"]["labels"])
    del labels["ddpjob.dev/job"]
    fake.change("pods", "digits-0-1", metadata={"labels": labels})
    await until(lambda: fake.reads(POD_PATH))
    await settled(fake)
    assert (status(fake)["attempt"]["number"], status(fake)["budget"]["disruptions"]) == (0, 0)


async def test_a_pod_that_lost_its_labels_counts_as_lost_once(fake, quick_resync, operator):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    fake.change("pods", "digits-0-1", metadata={"labels": {}})
    await until(lambda: status(fake)["attempt"]["number"] == 1)
    assert status(fake)["budget"]["disruptions"] == 1
    assert len(fake.reads(POD_PATH)) == 1


@pytest.mark.parametrize(
    "changed", [{"ddpjob.dev/index": "0"}, {"ddpjob.dev/attempt": "9999999999"}]
)
async def test_a_pod_with_other_labels_is_reported_once_and_not_replaced(fake, operator, changed):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    labels = {**fake.get("pods", "digits-0-1")["metadata"]["labels"], **changed}
    fake.change("pods", "digits-0-1", metadata={"labels": labels})

    def reports():
        return [event for event in fake.all("events") if event["reason"] == "LabelsChanged"]

    await until(reports)
    await settled(fake)
    assert len(reports()) == 1
    assert status(fake)["attempt"]["number"] == 0
    assert len(fake.reads(POD_PATH)) < 5


# --- an API server with faults


async def test_an_api_server_that_is_silent_for_a_while_stops_nothing(fake, operator, monkeypatch):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    fake.stall()
    fails(fake, "digits-0-1")
    before = len(fake.log)
    await until(lambda: len(fake.log) > before)
    fake.flow()
    await until(lambda: status(fake)["restarts"] == 1)


@pytest.mark.parametrize("code", [429, 500, 503])
async def test_an_api_server_that_refuses_for_a_while_stops_nothing(
    fake, operator, quick_retries, code
):
    fake.fault("POST|PUT|DELETE", "/api/v1/.*|.*/ddpjobs/.*", refusal(code), times=3)
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    assert pods(fake) == ["digits-0-0", "digits-0-1"]


async def test_nothing_is_written_before_retry_after_has_passed(fake, operator):
    fake.fault("POST", ".*/pods", refusal(429, "TooManyRequests", **{"Retry-After": "1"}))
    fake.create("ddpjobs", a_job())
    await until(lambda: len(fake.writes(".*/pods")) == 2)
    fake.create("ddpjobs", a_job("second"))
    await until(lambda: "second-0-1" in pods(fake) and "digits-0-1" in pods(fake))
    told = fake.writes(".*/pods")[0].time
    assert not [a for a in fake.writes() if told + 0.1 < a.time < told + 0.9]


@pytest.mark.parametrize("path", [".*/ddpjobs/digits/status", ".*/pods", ".*/services"])
async def test_a_write_whose_answer_was_lost_is_not_repeated(fake, operator, path):
    fake.fault("POST|PUT", path, unanswered)
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    assert pods(fake) == ["digits-0-0", "digits-0-1"]
    assert status(fake).get("restarts", 0) == 0


async def test_nothing_is_created_from_a_spec_that_changed_while_an_answer_was_lost(fake, operator):
    async def suspend(request, proceed):
        spec = {**fake.get("ddpjobs", "digits")["spec"], "suspend": True}
        answer = await unanswered(request, proceed)
        fake.change("ddpjobs", "digits", spec=spec)
        return answer

    fake.fault("PUT", ".*/ddpjobs/digits/status", suspend)
    fake.create("ddpjobs", a_job())
    await until(lambda: status(fake).get("phase") == "Suspended")
    assert fake.writes(".*/(pods|services)") == []


async def test_a_conflict_on_the_status_makes_the_operator_look_again(fake, operator):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    fake.fault("WATCH", ".*/ddpjobs", refusal(500), times=float("inf"))
    fake.cut_watches()
    fake.change("ddpjobs", "digits", metadata={"annotations": {"somebody": "was here"}})
    fails(fake, "digits-0-1")
    await until(lambda: status(fake)["restarts"] == 1)
    assert fake.reads("/apis/ddpjob.dev/v1alpha1/namespaces/ml/ddpjobs/digits")


async def test_a_restart_that_could_not_be_written_is_counted_once(fake, operator, options):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    fake.fault("PUT", ".*/status", refusal(409, "Conflict"))
    fake.change("ddpjobs", "digits", metadata={"annotations": {"somebody": "was here"}})
    fails(fake, "digits-0-1")
    await until(lambda: status(fake)["restarts"] == 1)
    await settled(fake)
    said = await metrics(options)
    assert 'ddpjob_restarts_total{cause="Failure"} 1.0' in said
    assert 'ddpjob_activity_seconds_total{activity="training"}' in said


async def test_an_attempt_that_costs_no_budget_is_counted_too(fake, operator, options):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    fake.change("ddpjobs", "digits", spec=a_job(nodes=3)["spec"])
    await until(lambda: status(fake)["attempt"]["number"] == 1)
    await settled(fake)
    said = await metrics(options)
    assert 'ddpjob_restarts_total{cause="Resized"} 1.0' in said
    assert 'ddpjob_restarts_total{cause="Disruption"} 0.0' in said


async def test_a_restart_whose_answer_was_lost_is_counted_and_reported(fake, operator, options):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    fake.fault("PUT", ".*/status", unanswered)
    fails(fake, "digits-0-1")
    await until(lambda: status(fake)["attempt"]["number"] == 1)
    await settled(fake)
    assert 'ddpjob_restarts_total{cause="Failure"} 1.0' in await metrics(options)
    assert [event["reason"] for event in fake.all("events")].count("Restarting") == 1


async def test_an_attempt_that_was_found_again_is_not_counted(fake, operator, options):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    before = status(fake)
    fails(fake, "digits-0-1")
    await until(lambda: status(fake)["attempt"]["number"] == 1)
    fake.remove("pods", "digits-0-0")
    await is_running(fake, attempt=1)
    fake.change("ddpjobs", "digits", status=before)
    await until(lambda: any(event["reason"] == "StatusRecovered" for event in fake.all("events")))
    await settled(fake)
    said = await metrics(options)
    assert 'ddpjob_restarts_total{cause="Failure"} 1.0' in said
    assert 'ddpjob_restarts_total{cause="Resized"} 0.0' in said


async def test_the_operator_ends_with_a_message_if_the_crd_is_missing(fake, options):
    unserved = refusal(404, message="404 page not found")
    fake.fault("GET", "/apis/ddpjob.dev/v1alpha1", unserved, times=float("inf"))
    with pytest.raises(CannotRun, match="Install the CRD"):
        await asyncio.to_thread(asyncio.run, operate(options))


async def test_the_operator_ends_with_a_message_if_its_port_is_in_use(fake, options):
    with (
        socket.create_server(("", options.http_port)),
        pytest.raises(CannotRun, match="--http-port"),
    ):
        await asyncio.to_thread(asyncio.run, operate(options))


@pytest.fixture
def team_b_is_gone(fake):
    """Refuse all requests to a namespace deleted with the operator's Role."""
    fake.fault(
        "GET|WATCH", ".*/namespaces/team-b/.*", refusal(403, "Forbidden"), times=float("inf")
    )


@pytest.mark.parametrize("namespaces", [("team-b", "ml")])
async def test_an_unreadable_namespace_does_not_block_the_others(
    fake, team_b_is_gone, operator, caplog
):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    assert not [asked for asked in fake.log if asked.method == "WATCH" and "/team-b/" in asked.path]
    assert "remove the namespace from watchNamespaces" in caplog.text


@pytest.mark.parametrize("namespaces", [("ml", "team-b")])
async def test_the_operator_restarts_when_a_namespace_becomes_readable(
    fake, team_b_is_gone, options, quick_resync
):
    running = asyncio.create_task(asyncio.to_thread(asyncio.run, operate(options)))
    await until(lambda: [asked for asked in fake.log if asked.method == "WATCH"])
    fake.faults.clear()
    with pytest.raises(CannotRun, match="team-b can be read now; the next start watches it"):
        await running


async def test_the_operator_waits_for_an_api_server_that_is_starting(fake, operator):
    fake.fault("GET", "/apis/ddpjob.dev/v1alpha1", refusal(503))
    fake.create("ddpjobs", a_job())
    await is_running(fake)


# --- what an API server refuses


async def test_a_foreign_service_with_the_jobs_name_is_reported_and_never_adopted(fake, operator):
    fake.create("services", {"metadata": {"name": "digits"}, "spec": {}})
    fake.create("ddpjobs", a_job())
    await until(lambda: status(fake).get("reason") == "NameInUse")
    assert "service digits" in status(fake)["message"]
    assert pods(fake) == []
    fake.remove("services", "digits")
    await is_running(fake)


async def test_a_pod_that_is_going_away_is_waited_for(fake, operator):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    fake.remove("ddpjobs", "digits")
    for name in pods(fake):
        fake.change("pods", name, metadata={"deletionTimestamp": "2026-11-21T12:00:30Z"})
    fake.remove("services", "digits")
    fake.create("ddpjobs", a_job())
    await until(lambda: status(fake).get("reason") == "NameInUse")
    old = {pod["metadata"]["uid"] for pod in fake.all("pods")}
    for name in pods(fake):
        fake.remove("pods", name)
    await is_running(fake)
    assert not old & {pod["metadata"]["uid"] for pod in fake.all("pods")}


async def test_pods_of_any_attempt_of_an_earlier_job_are_waited_for(fake, operator):
    """Both would write checkpoints into the same folder."""
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    fails(fake, "digits-0-1")
    await until(lambda: status(fake)["attempt"]["number"] == 1)
    fake.remove("pods", "digits-0-0")
    await is_running(fake, attempt=1)
    fake.remove("ddpjobs", "digits")
    fake.remove("services", "digits")
    fake.remove("pods", "digits-0-1")
    for name in pods(fake):
        fake.change("pods", name, metadata={"deletionTimestamp": "2026-11-21T12:00:30Z"})
    fake.create("ddpjobs", a_job())
    await until(lambda: status(fake).get("reason") == "NameInUse")
    assert "of an earlier job with this name to end" in status(fake)["message"]
    assert pods(fake) == ["digits-1-0", "digits-1-1"]
    for name in pods(fake):
        fake.remove("pods", name)
    await is_running(fake)
    assert pods(fake) == ["digits-0-0", "digits-0-1"]


async def test_a_spec_that_makes_no_pod_fails_the_job(fake, operator):
    # The CRD does not check the shapes below affinity.
    node = {"requiredDuringSchedulingIgnoredDuringExecution": [{"nodeSelectorTerms": []}]}
    fake.create("ddpjobs", a_job(accelerator="trn1.32xlarge", affinity={"nodeAffinity": node}))
    await until(lambda: status(fake).get("phase") == "Failed")
    assert status(fake)["reason"] == "InvalidPod"
    assert "spec: cannot render a pod from it" in status(fake)["message"]


@pytest.mark.parametrize(
    "answer", [refusal(403, "Forbidden", "a policy"), hanging_webhook()], ids=["refused", "hangs"]
)
async def test_ended_pods_that_cannot_be_deleted_do_not_block_an_attempt(
    fake, operator, answer, monkeypatch, caplog
):
    monkeypatch.setattr(budget, "FIRST_DELAY", 0)
    monkeypatch.setattr(act, "ENDED_PODS_TIMEOUT", 0.2)
    fake.create("ddpjobs", a_job(failurePolicy={"maxRestarts": 9}))
    fake.fault("DELETE", ".*/pods/digits-0-1", answer, float("inf"))
    for attempt in range(3):
        await is_running(fake, attempt)
        fails(fake, f"digits-{attempt}-0", f"digits-{attempt}-1")
    await until(lambda: status(fake)["attempt"]["number"] == 3)
    assert "digits-0-1" in pods(fake)
    assert "digits: cannot delete ended pods" in caplog.text


async def test_an_invalid_pod_fails_the_job_with_the_api_servers_message(fake, operator):
    fake.fault(
        "POST",
        ".*/pods",
        refusal(422, "Invalid", "spec.containers[0].image: must not be blank"),
        float("inf"),
    )
    fake.create("ddpjobs", a_job())
    await until(lambda: status(fake).get("phase") == "Failed")
    assert status(fake)["reason"] == "InvalidPod"
    assert "must not be blank" in status(fake)["message"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ('pods "digits-0-0" is forbidden: exceeded quota: small', "QuotaExceeded"),
        ('pods "digits-0-0" is forbidden: violates PodSecurity "restricted:latest"', "PodSecurity"),
        (
            'pods "digits-0-0" is forbidden: unable to create new content: it is being terminated',
            "NamespaceTerminating",
        ),
        ('pods is forbidden: User "it" cannot create resource "pods"', "Forbidden"),
    ],
)
async def test_the_status_has_the_reason_while_pods_are_refused(
    fake, operator, quick_retries, words, reason
):
    fake.fault("POST", ".*/pods", refusal(403, "Forbidden", words), times=3)
    fake.create("ddpjobs", a_job())
    await until(lambda: status(fake).get("reason") == reason)
    assert status(fake)["phase"] == "Pending"
    await is_running(fake)


async def test_no_job_is_reconciled_before_the_first_list():
    # The operator died between the status of attempt 1 and the deletions of attempt 0.
    cache = Cache()
    cache.jobs.see(
        {
            **a_job(),
            "metadata": {
                **a_job()["metadata"],
                "namespace": "ml",
                "uid": "u",
                "resourceVersion": "1",
            },
        }
    )
    lister = Lister(api=None, cache=cache, queue=None, after_turn=None)
    reconciler = Reconciler(
        api=None,
        cache=cache,
        lister=lister,
        actor=None,
        queue=None,
        metrics=None,
        policy=None,
        territory=None,
        inquiries=None,
        extensions=None,
    )
    await reconciler.look_at(("ml", a_job()["metadata"]["name"]))


async def test_a_job_that_goes_while_its_look_waits_is_not_looked_at():
    # It would stay among the gangs to which younger ones give way.
    cache = Cache()
    metadata = {**a_job()["metadata"], "uid": "u", "resourceVersion": "1"}
    cache.jobs.see({**a_job(), "metadata": metadata})

    class Slow:
        async def serves(self, namespace):
            cache.jobs.drop("u")
            return True

    reconciler = Reconciler(
        api=None,
        cache=cache,
        lister=SimpleNamespace(knows_pods_of=lambda namespace: True),
        actor=None,
        queue=None,
        metrics=None,
        policy=None,
        territory=Slow(),
        inquiries=None,
        extensions=None,
    )
    await reconciler.look_at(("ml", "digits"))
    assert cache.jobs.contests.gangs == {}
