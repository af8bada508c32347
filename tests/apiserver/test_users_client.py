"""The Python client and the command line with a real API server, without a kubelet."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from envtest import ADMIN_TOKEN, MERGE, ApiServer
from typer.testing import CliRunner

from ddpjob import Client, DDPJob
from ddpjob.cli.main import app
from ddpjob.client import AsyncClient, ClientError, NotConnected, NotFound, Rejected, WaitTimeout
from ddpjob.core.api.yaml_text import load_yaml

JOBS = "/apis/ddpjob.dev/v1alpha1/namespaces/{}/ddpjobs"
SCRIPT = "print('hello')\n"

Command = Callable[..., Any]


@pytest.fixture
def kubeconfig(apiserver: ApiServer, namespace: str, tmp_path: Path) -> Path:
    """Return a kubeconfig with the namespace of the test in its context."""
    config = json.loads(apiserver.kubeconfig_for(ADMIN_TOKEN))
    config["contexts"][0]["context"]["namespace"] = namespace
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def client(kubeconfig: Path) -> Iterator[Client]:
    with Client(kubeconfig=kubeconfig) as client:
        yield client


@pytest.fixture
def run(kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function for running a command as a user does, in a folder of the test."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    monkeypatch.chdir(tmp_path)

    def run(*words: str, stdin: str | None = None) -> Any:
        return CliRunner().invoke(app, words, input=stdin, env={"COLUMNS": "200"})

    return run


@pytest.fixture
def set_status(apiserver: ApiServer, namespace: str) -> Callable[..., None]:
    """Return a function for writing the status of a job, as an operator does."""

    def set_status(name: str, phase: str, **status: Any) -> None:
        if phase in ("Complete", "Failed"):
            condition = {
                "type": phase,
                "status": "True",
                "reason": "Test",
                "message": "by the test",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            status["conditions"] = [condition]
        body = {"status": {"phase": phase, "message": "by the test", **status}}
        path = f"{JOBS.format(namespace)}/{name}/status"
        assert apiserver.request("PATCH", path, body, MERGE).code == 200

    return set_status


def a_job(name: str = "digits", **spec: Any) -> DDPJob:
    return DDPJob.create(name, **{"image": "i", "args": ["train.py"], **spec})


def write(path: Path, *documents: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump_all(documents))
    return str(path)


def later(function: Callable[[], None], when: Callable[[], bool] = lambda: True) -> None:
    """Run a function a moment later, when a condition holds. The test waits for its effect."""

    def wait() -> None:
        deadline = time.monotonic() + 180.0
        while not when():
            assert time.monotonic() < deadline, "the condition never held"
            time.sleep(0.05)
        function()

    timer = threading.Timer(0.3, wait)
    timer.daemon = True
    timer.start()


def is_changed(apiserver: ApiServer, namespace: str) -> bool:
    """Return True if the spec of the job `digits` was changed after its creation."""
    answer = apiserver.request("GET", f"{JOBS.format(namespace)}/digits")
    return bool(answer.body["metadata"]["generation"] > 1)


# -- validate


def test_validate_asks_the_api_server_about_jobs_without_a_mistake(
    run: Command, client: Client, tmp_path: Path
) -> None:
    client.submit(a_job("there"))
    generated = a_job("x").manifest() | {"metadata": {"generateName": "new-"}}
    wrong = a_job("wrong").manifest()
    wrong["spec"] |= {"nodes": 0}
    changed = a_job("there", image="other").manifest()
    lost = a_job("lost", args=["a.py"]).manifest() | {
        "metadata": {"name": "lost", "namespace": "nowhere"}
    }
    file = write(tmp_path / "jobs.yaml", wrong, generated, changed, lost)
    done = run("validate", "--server", file)
    recovery = "ok, recovery: Recreate (default: without spec.checkpoint or a shared volume)"
    assert done.stdout.splitlines() == [
        "wrong: spec.nodes: must be an integer from 1 to 1000, got 0",
        f"new-: {recovery}",
        f"there: {recovery}",
        f"lost: {recovery}",
        "new-: accepted by the API server",
        "there: refused by the API server: spec.image: Invalid value: is immutable; delete the job "
        "and create it again",
        'lost: refused by the API server: namespaces "nowhere" not found',
    ]
    assert done.exit_code == 1
    assert {job.name for job in client.list()} == {"there"}


def test_validate_reports_a_good_job_and_an_api_server_that_is_not_there(
    run: Command, tmp_path: Path
) -> None:
    file = write(tmp_path / "job.yaml", a_job().manifest())
    assert run("validate", "--server", file).exit_code == 0
    done = run("validate", "--server", "--context", "nowhere", file)
    assert done.exit_code == 2
    assert "no cluster is configured" in done.stderr


# -- submit


def test_a_job_is_created_then_unchanged_then_configured(run: Command, tmp_path: Path) -> None:
    file = write(tmp_path / "job.yaml", a_job(nodes=2).manifest())
    assert "ddpjob/digits created" in run("submit", file).stdout
    assert "ddpjob/digits unchanged" in run("submit", file).stdout
    assert "ddpjob/digits configured" in run("submit", file, "--set", "spec.nodes=3").stdout


def test_a_dry_run_creates_nothing(run: Command, client: Client, tmp_path: Path) -> None:
    file = write(tmp_path / "job.yaml", a_job().manifest())
    assert "digits created (dry run)" in run("submit", file, "--dry-run").stdout
    assert client.list() == []


def test_standard_input_and_several_documents(run: Command, client: Client) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "ckpt"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    text = yaml.safe_dump_all([a_job().manifest(), claim])
    lines = run("submit", "-", stdin=text).stdout.splitlines()
    assert lines == ["persistentvolumeclaim/ckpt created", "ddpjob/digits created"]


def test_a_mistake_in_one_document_creates_none(
    run: Command, client: Client, tmp_path: Path
) -> None:
    wrong = {**a_job("wrong").manifest()}
    wrong["spec"]["nodes"] = 0
    file = write(tmp_path / "jobs.yaml", a_job().manifest(), wrong)
    refused = run("submit", file)
    assert refused.exit_code == 2
    assert "wrong: spec.nodes: must be an integer from 1 to 1000, got 0" in refused.stderr
    assert client.list() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("spec.node=2", "spec.node: unknown field (did you mean 'nodes'?)"),
        ("spec.accelerator=gpuu", "spec.accelerator: unknown profile"),
        ("spec.args=[python, x.py]", "begin with the script or -m"),
        ("spec.nodeSelector.a=1", "spec.nodeSelector.a: must be a string, got 1; put it in quotes"),
    ],
)
def test_a_refusal_is_a_sentence(run: Command, tmp_path: Path, change: str, message: str) -> None:
    refused = run("submit", write(tmp_path / "job.yaml", a_job().manifest()), "--set", change)
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


def a_claim(name: str) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": name}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--replace",)])
def test_a_claim_that_does_not_exist_is_refused_before_anything_is_created(
    run: Command, client: Client, apiserver: ApiServer, tmp_path: Path, options: Sequence[str]
) -> None:
    claims = f"/api/v1/namespaces/{client.namespace}/persistentvolumeclaims"
    assert apiserver.request("POST", claims, a_claim("checkpoints")).code == 201
    job = a_job(checkpoint={"claimName": "checkpoint"}).manifest()
    refused = run("submit", write(tmp_path / "job.yaml", job), *options)
    assert (refused.exit_code, client.list()) == (2, [])
    missing = f"""job digits: PersistentVolumeClaim "checkpoint" does not exist in namespace {
        client.namespace
    } (did you mean 'checkpoints'?)"""
    assert missing in refused.stderr


def test_a_claim_may_be_in_the_same_manifest(run: Command, client: Client, tmp_path: Path) -> None:
    job = a_job(checkpoint={"claimName": "new"}).manifest()
    done = run("submit", write(tmp_path / "both.yaml", job, a_claim("new")))
    assert (done.exit_code, [one.name for one in client.list()]) == (0, ["digits"])


@pytest.mark.parametrize("spec", [{"suspend": True}, {"managedBy": "example.com/queue"}])
def test_a_job_that_does_not_start_here_and_now_needs_no_claim_yet(
    run: Command, tmp_path: Path, spec: dict[str, Any]
) -> None:
    job = a_job(checkpoint={"claimName": "later"}, **spec).manifest()
    assert run("submit", write(tmp_path / "job.yaml", job)).exit_code == 0


def test_an_unknown_kind_is_refused_with_its_name(run: Command, tmp_path: Path) -> None:
    other = {"apiVersion": "v1", "kind": "ConfigMapp", "metadata": {"name": "x"}}
    refused = run("submit", write(tmp_path / "job.yaml", a_job().manifest(), other))
    assert 'the cluster has no kind "ConfigMapp"' in refused.stderr
    assert "(did you mean 'ConfigMap'?)" in refused.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml: cannot read the file: No such file"),
        ([], "give a manifest, or --script"),
        (["job.yaml", "--set", "nodes"], "must be PATH=VALUE"),
        (["--script", "nowhere.py"], "nowhere.py: the file does not exist"),
        (["--script", "job.yaml", "--accelerator", "gpuu"], "(did you mean 'gpu'?)"),
    ],
)
def test_a_wrong_word_is_refused(
    run: Command, tmp_path: Path, words: list[str], message: str
) -> None:
    write(tmp_path / "job.yaml", a_job().manifest())
    refused = run("submit", *words)
    assert refused.exit_code == 2
    assert message in " ".join(refused.stderr.replace("│", " ").split())


def test_an_immutable_field_is_refused_with_what_to_do(run: Command, tmp_path: Path) -> None:
    file = write(tmp_path / "job.yaml", a_job().manifest())
    run("submit", file)
    refused = run("submit", file, "--set", "spec.image=j")
    assert "is immutable" in refused.stderr
    assert "ddpjob submit --replace" in refused.stderr


def test_replace_deletes_the_existing_job_first(
    run: Command, client: Client, tmp_path: Path
) -> None:
    file = write(tmp_path / "job.yaml", a_job().manifest())
    run("submit", file)
    before = client.get("digits")
    assert run("submit", file, "--replace", "--set", "spec.image=j").exit_code == 0
    after = client.get("digits")
    assert (after.uid != before.uid, after.spec["image"]) == (True, "j")


def test_a_job_that_would_be_refused_replaces_nothing(
    run: Command, client: Client, tmp_path: Path
) -> None:
    file = write(tmp_path / "job.yaml", a_job().manifest())
    run("submit", file)
    before = client.get("digits")
    assert run("submit", file, "--replace", "--set", "spec.nodes=0").exit_code == 2
    assert client.get("digits").uid == before.uid


@pytest.mark.parametrize("second", ["a wrong job", "a wrong claim"])
def test_nothing_is_replaced_if_another_document_is_refused(
    run: Command, client: Client, tmp_path: Path, second: str
) -> None:
    file = write(tmp_path / "job.yaml", a_job().manifest())
    run("submit", file)
    before = client.get("digits")
    wrong = a_job("wrong").manifest()
    wrong["spec"]["nodes"] = 0
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "c"}}
    both = write(
        tmp_path / "both.yaml", a_job().manifest(), wrong if second == "a wrong job" else claim
    )
    assert run("submit", both, "--replace").exit_code == 2
    assert client.get("digits").uid == before.uid
    assert not list(tmp_path.glob("digits*.yaml"))


def test_a_dry_run_of_a_replacement_does_not_mind_immutable_fields(
    run: Command, client: Client, tmp_path: Path
) -> None:
    file = write(tmp_path / "job.yaml", a_job().manifest())
    run("submit", file)
    before = client.get("digits")
    tried = run("submit", file, "--replace", "--dry-run", "--set", "spec.image=j")
    assert (tried.exit_code, tried.stdout) == (0, "ddpjob/digits can be created (dry run)\n")
    assert client.get("digits").uid == before.uid


def test_code_that_has_changed_goes_with_the_old_job(
    run: Command, client: Client, apiserver: ApiServer, tmp_path: Path
) -> None:
    words = ("submit", "--script", "train.py", "--image", "i", "--nodes", "1", "--replace")
    path = f"/api/v1/namespaces/{client.namespace}/configmaps/"
    owners = {}
    jobs = []
    for text in (SCRIPT, SCRIPT * 2):
        (tmp_path / "train.py").write_text(text)
        assert run(*words).exit_code == 0
        jobs.append(client.get("train"))
    for job in jobs:
        metadata = apiserver.request("GET", path + job.code).body["metadata"]
        owners[job.uid] = [owner["uid"] for owner in metadata["ownerReferences"]]
    assert owners == {job.uid: [job.uid] for job in jobs}
    assert len(owners) == 2


def test_jobs_with_the_same_code_share_and_keep_it(
    run: Command, client: Client, apiserver: ApiServer, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("submit", "--script", "train.py", "--image", "i", "--nodes", "1")
    for name in ("one", "two"):
        assert run(*words, "--name", name).exit_code == 0
    assert run(*words, "--name", "one", "--replace").exit_code == 0
    jobs = [client.get(name) for name in ("one", "two")]
    assert len({job.code for job in jobs}) == 1
    path = f"/api/v1/namespaces/{client.namespace}/configmaps/{jobs[0].code}"
    owners = apiserver.request("GET", path).body["metadata"]["ownerReferences"]
    assert {owner["uid"] for owner in owners} == {job.uid for job in jobs}


def test_a_replaced_job_keeps_code_that_has_not_changed(
    run: Command, client: Client, apiserver: ApiServer, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("submit", "--script", "train.py", "--image", "i", "--nodes", "1")
    run(*words)
    before = client.get("train")
    assert run(*words, "--replace").exit_code == 0
    after = client.get("train")
    name = after.spec["code"]["configMap"]
    path = f"/api/v1/namespaces/{client.namespace}/configmaps/{name}"
    owners = apiserver.request("GET", path).body["metadata"]["ownerReferences"]
    assert [owner["uid"] for owner in owners] == [after.uid]
    assert after.uid != before.uid


def test_a_job_of_another_namespace_is_followed_there(
    run: Command, apiserver: ApiServer, client: Client, tmp_path: Path
) -> None:
    manifest = a_job().manifest()
    manifest["metadata"]["namespace"] = "default"
    file = write(tmp_path / "job.yaml", manifest)
    try:
        submitted = run("submit", file)
        assert "ddpjob logs digits -n default -f" in submitted.stderr
        refused = run("submit", file, "--namespace", client.namespace)
        assert "is for namespace default, and --namespace is" in refused.stderr
        path = f"{JOBS.format('default')}/digits/status"
        condition = {
            "type": "Failed",
            "status": "True",
            "reason": "Test",
            "message": "by the test",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        body = {"status": {"phase": "Failed", "conditions": [condition]}}

        later(
            lambda: void(apiserver.request("PATCH", path, body, MERGE)),
            when=lambda: is_changed(apiserver, "default"),
        )
        assert run("submit", file, "--set", "spec.nodes=2", "--wait").exit_code == 1
    finally:
        apiserver.delete_jobs("default")


def test_a_finished_job_that_is_submitted_again_does_not_look_like_a_success(
    run: Command, set_status: Callable[..., None], tmp_path: Path
) -> None:
    file = write(tmp_path / "job.yaml", a_job().manifest())
    run("submit", file)
    set_status("digits", "Complete")
    again = run("submit", file, "--wait")
    assert (again.exit_code, "ddpjob restart digits runs it again" in again.stderr) == (2, True)


def test_an_option_for_a_script_is_refused_with_a_manifest(run: Command, tmp_path: Path) -> None:
    file = write(tmp_path / "job.yaml", a_job().manifest())
    refused = run("submit", file, "--nodes", "4")
    assert refused.exit_code == 2
    assert "--set spec.nodes=4" in refused.stderr


def test_a_script_is_submitted_with_its_code(
    run: Command, client: Client, apiserver: ApiServer, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--script", "train.py", "--image", "i", "--nodes", "1", "--", "--lr", "1"]
    assert run("submit", *words).exit_code == 0
    job = client.get("train")
    assert job.spec["args"] == ["train.py", "--lr", "1"]
    name = job.spec["code"]["configMap"]
    path = f"/api/v1/namespaces/{client.namespace}/configmaps/{name}"
    code = apiserver.request("GET", path).body
    assert code["data"] == {"train.py": SCRIPT}
    assert [owner["uid"] for owner in code["metadata"]["ownerReferences"]] == [job.uid]


def test_submit_waits_and_its_exit_code_is_that_of_the_job(
    run: Command,
    apiserver: ApiServer,
    client: Client,
    set_status: Callable[..., None],
    tmp_path: Path,
) -> None:
    file = write(tmp_path / "job.yaml", a_job().manifest())
    run("submit", file)
    # If the job had ended before the change, the change would be refused.
    later(
        lambda: set_status("digits", "Failed"),
        when=lambda: is_changed(apiserver, client.namespace),
    )
    ended = run("submit", file, "--set", "spec.nodes=2", "--wait")
    assert (ended.exit_code, "digits Failed: by the test" in ended.stdout) == (1, True)


# -- read


def test_jobs_are_listed_in_several_forms(run: Command, client: Client) -> None:
    assert "no jobs in namespace" in run("list").stderr
    client.submit(a_job())
    assert run("list").stdout.splitlines()[1].split()[:3] == ["digits", "Pending", "0/1"]
    assert run("list", "-o", "name").stdout == "ddpjob/digits\n"
    assert json.loads(run("list", "-o", "json").stdout)["items"][0]["spec"]["image"] == "i"
    one = load_yaml(run("status", "digits", "-o", "yaml").stdout)
    assert one["metadata"]["uid"] == client.get("digits").uid
    assert client.namespace in run("list", "-A").stdout


def test_a_job_that_does_not_exist_is_refused_with_the_closest_name(
    run: Command, client: Client
) -> None:
    with pytest.raises(NotFound, match="has no jobs"):
        client.get("digit")
    client.submit(a_job())
    for command in ("status", "logs", "wait", "suspend", "resume", "restart", "delete"):
        refused = run(command, "digit")
        assert refused.exit_code == 2
        assert "(did you mean 'digits'?)" in refused.stderr


def test_the_changes_of_a_job_are_watched(client: Client, set_status: Callable[..., None]) -> None:
    client.submit(a_job())
    changes = client.watch("digits")
    assert [job.phase for job in next(changes)] == ["Pending"]
    set_status("digits", "Running")
    assert [job.phase for job in next(changes)] == ["Running"]
    client.delete("digits")
    assert next(changes) == []
    changes.close()


def test_a_watch_goes_on_after_the_api_server_has_restarted(
    apiserver: ApiServer, client: Client, set_status: Callable[..., None]
) -> None:
    client.submit(a_job())
    changes = client.watch("digits")
    next(changes)
    apiserver.restart()
    set_status("digits", "Running")
    while next(changes)[0].phase != "Running":
        pass
    changes.close()


# -- wait


@pytest.mark.parametrize(("phase", "code"), [("Complete", 0), ("Failed", 1)])
def test_the_exit_code_of_wait_is_that_of_the_job(
    run: Command, client: Client, set_status: Callable[..., None], phase: str, code: int
) -> None:
    client.submit(a_job())
    later(lambda: set_status("digits", phase))
    ended = run("wait", "digits", "--timeout", "1m")
    assert (ended.exit_code, ended.stdout) == (code, f"digits {phase}: by the test\n")


def test_a_finished_job_needs_no_time(
    run: Command, client: Client, set_status: Callable[..., None]
) -> None:
    client.submit(a_job())
    set_status("digits", "Complete")
    assert run("wait", "digits", "--timeout", "0s").exit_code == 0


def test_objects_of_a_namespace_in_the_same_file(run: Command, tmp_path: Path) -> None:
    name = f"new-{tmp_path.name[-8:].replace('_', '-').lower()}"
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {}}
    file = write(tmp_path / "all.yaml", a_job().manifest(), config, namespace)
    submitted = run("submit", file, "--namespace", name)
    assert submitted.exit_code == 0, submitted.stderr
    lines = submitted.stdout.splitlines()
    assert [line.partition("/")[0] for line in lines] == ["namespace", "configmap", "ddpjob"]


def test_wait_ends_with_124_after_its_time(run: Command, client: Client) -> None:
    client.submit(a_job())
    ended = run("wait", "digits", "--timeout", "1s")
    assert (ended.exit_code, "has not finished after 1 s: Pending" in ended.stderr) == (124, True)
    assert "the job goes on; ddpjob logs digits -f follows it again" in ended.stderr
    with pytest.raises(WaitTimeout):
        client.wait("digits", timeout=0.1)


@pytest.mark.parametrize(
    ("words", "stdout"),
    [
        ("submit job.yaml other.yaml --wait", "ddpjob/digits unchanged\nddpjob/other created\n"),
        ("submit job.yaml --follow", "ddpjob/digits unchanged\n"),
        ("logs digits --follow", ""),
    ],
)
def test_a_command_that_waits_ends_after_its_time(
    run: Command, client: Client, tmp_path: Path, words: str, stdout: str
) -> None:
    write(tmp_path / "job.yaml", a_job().manifest())
    write(tmp_path / "other.yaml", a_job("other").manifest())
    client.submit(a_job())
    ended = run(*words.split(), "--timeout", "1s")
    assert ended.exit_code == 124
    assert ended.stdout.startswith(stdout)
    # The command has one time limit, not one for each job.
    for name in ("digits", "other") if "other" in words else ("digits",):
        assert f"error: job {name} has not finished after 1 s: Pending" in ended.stderr
        goes_on = f"the job goes on; ddpjob logs {name} -f follows it again\n"
        assert ended.stderr.count(goes_on) == 1
    assert client.get("digits").phase == "Pending"


def test_a_time_needs_something_to_wait_for(run: Command, client: Client, tmp_path: Path) -> None:
    write(tmp_path / "job.yaml", a_job().manifest())
    for words, message in (
        ("submit job.yaml", "--timeout: requires --follow or --wait"),
        ("logs digits", "--timeout: requires --follow"),
    ):
        refused = run(*words.split(), "--timeout", "1s")
        assert (refused.exit_code, message in refused.stderr) == (2, True)
    assert client.list() == []


def test_wait_for_a_job_that_is_deleted_ends(
    run: Command, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(a_job())
    has_found_the_job = threading.Event()
    watch = AsyncClient.watch

    def noted(*args: Any, **options: Any) -> Any:
        has_found_the_job.set()
        return watch(*args, **options)

    monkeypatch.setattr(AsyncClient, "watch", noted)
    # If the job were deleted earlier, it would not be found.
    later(lambda: void(client.delete("digits")), when=has_found_the_job.is_set)
    ended = run("wait", "digits")
    assert (ended.exit_code, "was deleted" in ended.stderr) == (2, True)


def void(_: object) -> None:
    """Drop a value."""


# -- change


def test_suspend_resume_and_scale_change_the_spec(run: Command, client: Client) -> None:
    client.submit(a_job())
    run("suspend", "digits")
    assert client.get("digits").spec["suspend"] is True
    assert "it has no spec.checkpoint" in run("resume", "digits").stdout
    assert client.get("digits").spec["suspend"] is False
    assert "scaled from 1 to 4 nodes" in run("scale", "digits", "4").stdout
    assert client.get("digits").spec["nodes"] == 4


def test_a_finished_job_cannot_be_changed(
    run: Command, client: Client, set_status: Callable[..., None]
) -> None:
    client.submit(a_job())
    set_status("digits", "Complete")
    refused = run("scale", "digits", "4")
    assert (refused.exit_code, "ddpjob restart digits runs it again" in refused.stderr) == (2, True)


def test_delete_says_where_the_checkpoints_are(run: Command, client: Client) -> None:
    client.submit(a_job(checkpoint={"claimName": "ckpt"}))
    stdout = run("delete", "digits").stdout
    assert stdout == "digits deleted; its checkpoints stay: claim ckpt, folder digits/\n"
    assert client.list() == []


def test_a_finished_job_runs_again_with_the_same_manifest_and_code(
    run: Command,
    client: Client,
    apiserver: ApiServer,
    set_status: Callable[..., None],
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run("submit", "--script", "train.py", "--image", "i", "--nodes", "1")
    before = client.get("train")
    set_status("train", "Failed")
    assert run("restart", "train").exit_code == 0
    after = client.get("train")
    assert (after.uid != before.uid, after.spec, after.phase) == (True, before.spec, "Pending")
    name = after.spec["code"]["configMap"]
    path = f"/api/v1/namespaces/{client.namespace}/configmaps/{name}"
    owners = apiserver.request("GET", path).body["metadata"]["ownerReferences"]
    assert [owner["uid"] for owner in owners] == [after.uid]


def test_a_running_job_is_restarted_by_suspend_and_resume(
    run: Command, client: Client, set_status: Callable[..., None]
) -> None:
    client.submit(a_job())
    set_status("digits", "Running")
    before = client.get("digits")
    done = threading.Event()

    def play_the_operator() -> None:
        for jobs in client.watch("digits"):
            if jobs[0].spec.get("suspend"):
                break
        set_status("digits", "Suspended")
        done.set()

    threading.Thread(target=play_the_operator).start()
    assert run("restart", "digits").exit_code == 0
    assert done.is_set()
    after = client.get("digits")
    assert (after.uid, after.spec["suspend"]) == (before.uid, False)


def test_the_manifest_of_a_job_that_cannot_be_created_again_is_kept(
    run: Command,
    client: Client,
    set_status: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client.submit(a_job(nodes=3))
    set_status("digits", "Failed")

    async def refuse(*_: object) -> None:
        raise Rejected("the quota is used up")

    monkeypatch.setattr("ddpjob.client.async_client.AsyncClient._create", refuse)
    refused = run("restart", "digits")
    assert refused.exit_code == 2
    assert "the manifest of the job is in digits.yaml" in refused.stderr
    manifest = load_yaml((tmp_path / "digits.yaml").read_text())
    assert manifest["spec"]["nodes"] == 3


# -- the cluster


def test_doctor_says_what_to_do(run: Command) -> None:
    found = run("doctor")
    assert found.exit_code == 1, found.stderr
    lines = found.stdout.splitlines()
    assert any(line.startswith("ok  DDPJobs") for line in lines)
    assert any(line.startswith("ok  Rights") for line in lines)
    assert any(line.startswith("!!  Operator") for line in lines)
    assert "install the operator's chart" in found.stdout
    assert "no node is ready" in found.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no cluster is configured"),
        ("a: [", "no cluster is configured"),
        ("[]", "no cluster is configured"),
        ("{current-context: x}", "no cluster is configured"),
    ],
)
def test_a_kubeconfig_that_is_wrong_is_a_sentence(
    run: Command, kubeconfig: Path, text: str, message: str
) -> None:
    kubeconfig.write_text(text)
    refused = run("list")
    assert (refused.exit_code, message in refused.stderr) == (2, True)


def test_an_unknown_context_is_a_sentence(run: Command) -> None:
    refused = run("list", "--context", "nowhere")
    assert (refused.exit_code, "nowhere" in refused.stderr) == (2, True)


def test_a_cluster_that_does_not_answer_is_a_sentence(run: Command, kubeconfig: Path) -> None:
    config = json.loads(kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    kubeconfig.write_text(json.dumps(config))
    refused = run("list")
    assert (refused.exit_code, "cannot reach the API server" in refused.stderr) == (2, True)
    with pytest.raises(NotConnected):
        Client(kubeconfig=kubeconfig).list()


def test_wrong_credentials_are_a_sentence(run: Command, kubeconfig: Path) -> None:
    config = json.loads(kubeconfig.read_text())
    config["users"][0]["user"]["token"] = "wrong"
    kubeconfig.write_text(json.dumps(config))
    refused = run("list")
    assert (refused.exit_code, "log in to the cluster again" in refused.stderr) == (2, True)


TOKENS = """#!/bin/sh
count=$(cat {folder}/count 2>/dev/null || echo 0)
echo $((count + 1)) > {folder}/count
echo '{{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
  "status": {{"token": "{good}", "expirationTimestamp": "{expires}"}}}}'
"""


def test_the_token_of_a_program_is_renewed_when_it_has_expired(
    kubeconfig: Path, tmp_path: Path
) -> None:
    program = tmp_path / "token"
    expired = "2020-01-01T00:00:00Z"
    program.write_text(TOKENS.format(folder=tmp_path, good=ADMIN_TOKEN, expires=expired))
    program.chmod(0o755)
    config = json.loads(kubeconfig.read_text())
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program)}
    config["users"][0]["user"] = {"exec": {**command, "interactiveMode": "Never"}}
    kubeconfig.write_text(json.dumps(config))
    with Client(kubeconfig=kubeconfig) as client:
        before = int((tmp_path / "count").read_text())
        client.list()
        assert int((tmp_path / "count").read_text()) > before


def test_a_closed_client_says_so(kubeconfig: Path) -> None:
    client = Client(kubeconfig=kubeconfig)
    client.close()
    client.close()
    with pytest.raises(ClientError, match="the client is closed"):
        client.list()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("status di", ["digits"]),
        ("status --namespace kube-system di", []),
        ("logs --kubeconfig /nowhere di", []),
        ("list --namespace kube-sy", ["kube-system"]),
        ("-n {namespace} status di", ["digits"]),
    ],
)
def test_names_are_completed_by_what_the_options_choose(
    client: Client,
    kubeconfig: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    expected: list[str],
) -> None:
    client.submit(a_job())
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    words = words.format(namespace=client.namespace)
    environment = {
        "_DDPJOB_COMPLETE": "complete_bash",
        "COMP_WORDS": f"ddpjob {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    completed = CliRunner().invoke(app, [], prog_name="ddpjob", env=environment)
    assert completed.stdout.split() == expected
