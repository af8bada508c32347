"""`ddpjob exec` and `ddpjob cp`, with a kubectl that runs the commands of a pod in a folder."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from fake_api import FakeApi
from gang import a_job
from typer.testing import CliRunner, Result

from ddpjob.cli.archive import Unpacker
from ddpjob.cli.main import app

ROOT = Path(__file__).parents[2]

# It notes its words, and runs those after -- in the folder of the pod. The code of a job is in the
# folder `work` of it, and its claim in `checkpoints`.
KUBECTL = """#!{python} -S
import json, os, sys
words = sys.argv[1:]
with open("{pod}/words", "w") as file:
    json.dump(words, file)
command = words[words.index("--") + 1 :]
command = ["{pod}/work" if word == "/ddpjob/work" else word for word in command]
command = ["{pod}" + word if word.startswith("/checkpoints/") else word for word in command]
os.chdir("{pod}/image")
os.environ["PATH"] = os.environ.get("PATH_IN_POD", os.environ["PATH"])
os.execvp(command[0], command)
"""

Run = Callable[..., Awaitable[Result]]


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of all pods, and put kubectl on the PATH. It is the only program there."""
    folder = tmp_path / "pod"
    for part in ("image/out", "work/out", "checkpoints/train/tensorboard"):
        (folder / part).mkdir(parents=True)
        (folder / part / "model.pt").write_text(f"weights in {part}")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "kubectl").write_text(KUBECTL.format(python=sys.executable, pod=folder))
    (programs / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH_IN_POD", os.environ["PATH"])
    monkeypatch.setenv("PATH", str(programs))
    return folder


@pytest.fixture
def run(pod: Path, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function for running a command as a user does, in a folder of the test."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    def becomes(_: str, words: list[str]) -> None:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
        raise SystemExit(done.returncode)

    monkeypatch.setattr("os.execvp", becomes)

    async def run(words: str) -> Result:
        # The loop of the test serves the API.
        return await asyncio.to_thread(
            CliRunner().invoke, app, [*words.split(" "), "-n", "ml"], env={"COLUMNS": "300"}
        )

    return run


def before_dashes(words: str, *options: str) -> list[str]:
    """Return words with these options added before `--`."""
    command, dashes, rest = words.partition(" -- ")
    return [*command.split(), *options, *(["--", *rest.split()] if dashes else ())]


def kubectl_words(pod: Path) -> str:
    return " ".join(json.loads((pod / "words").read_text()))


def add_pod(fake: FakeApi, job: dict[str, Any], index: int, **fields: Any) -> None:
    """Create a pod of a job's attempt 1 with a running trainer."""
    attempt = fields.pop("attempt", 1)
    labels = {"job": job["metadata"]["name"], "attempt": str(attempt), "index": str(index)}
    owner = {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
        "controller": True,
    }
    metadata = {
        "name": f"{job['metadata']['name']}-{attempt}-{index}",
        "labels": {f"ddpjob.dev/{key}": value for key, value in labels.items()},
        "ownerReferences": [owner],
        **fields.pop("metadata", {}),
    }
    state = fields.pop("state", {"running": {"startedAt": "2026-11-21T12:00:00Z"}})
    status = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": state}]}
    fake.create("pods", {"metadata": metadata, "spec": {"nodeName": "n"}, "status": status})


@pytest.fixture
def train(fake: FakeApi) -> dict[str, Any]:
    """Create a job of two nodes with two ranks each, from an image, running as attempt 1."""
    job = fake.create("ddpjobs", a_job("train", nodes=2, nprocPerNode=2))
    for index in range(2):
        add_pod(fake, job, index)
    return job


# exec


async def test_a_command_runs_in_the_pod_of_a_rank(
    run: Run, pod: Path, train: dict[str, Any]
) -> None:
    done = await run("exec train --rank 3 --context it")
    assert done.exit_code == 0, done.stderr
    shell = "/bin/sh -c command -v bash > /dev/null && exec bash; exec sh"
    assert kubectl_words(pod) == (
        "exec --namespace ml --context it --stdin train-1-1 --container trainer -- " + shell
    )


async def test_the_exit_code_and_the_output_are_those_of_the_command(
    fake: FakeApi, pod: Path, kubeconfig: Path, train: dict[str, Any]
) -> None:
    options = ("-n", "ml", "--kubeconfig", str(kubeconfig))
    words = before_dashes("exec train -- sh -c cat;pwd;exit${IFS}7", *options)
    # The program is replaced by kubectl, so it is a process of its own here.
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "ddpjob.cli.main", *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await process.communicate(b"from here\n")
    assert (printed.decode(), process.returncode) == (f"from here\n{pod / 'image'}\n", 7)
    assert f"--kubeconfig {kubeconfig} --stdin train-1-0 " in kubectl_words(pod)


async def test_a_terminal_is_passed_on(
    run: Run, pod: Path, train: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpjob.cli.commands.exec.has_terminal", lambda: True)
    await run("exec train")
    assert " --stdin --tty train-1-0 " in kubectl_words(pod)


async def test_a_command_runs_where_the_code_was_sent(fake: FakeApi, run: Run, pod: Path) -> None:
    job = fake.create("ddpjobs", a_job("train", code={"configMap": "train-1"}))
    add_pod(fake, job, 0)
    done = await asyncio.to_thread(
        CliRunner().invoke, app, before_dashes("exec train -- sh -c pwd", "-n", "ml")
    )
    assert done.stdout == f"{pod / 'work'}\n"


async def test_a_pod_of_an_attempt_that_ends_is_not_chosen(
    fake: FakeApi, run: Run, pod: Path, train: dict[str, Any]
) -> None:
    ending = {"deletionTimestamp": "2026-11-21T12:00:30Z", "deletionGracePeriodSeconds": 30}
    add_pod(fake, train, 0, attempt=2, metadata=ending)
    add_pod(fake, train, 0, attempt=0, state={"terminated": {"exitCode": 1}})
    await run("exec train --node 0")
    assert " train-1-0 " in kubectl_words(pod)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("exec train --rank 4", "--rank: job train has 4 ranks, 0 to 3"),
        ("exec train --node 2", "--node: job train has 2 nodes, 0 to 1"),
        ("exec train --node 1 --rank 1", "--node: cannot be combined with --rank"),
        ("exec trian", "job \"trian\" not found in namespace ml (did you mean 'train'?)"),
        ("cp train:4:out .", "--rank: job train has 4 ranks, 0 to 3"),
        ("cp trian:0:out .", "job \"trian\" not found in namespace ml (did you mean 'train'?)"),
    ],
)
async def test_a_wrong_place_is_a_sentence(
    run: Run, train: dict[str, Any], words: str, message: str
) -> None:
    refused = await run(words)
    assert refused.exit_code == 2
    assert message in " ".join(refused.stderr.replace("│", " ").split())


@pytest.mark.parametrize("words", ["exec train", "cp train:0:out ."])
async def test_without_kubectl_there_is_a_sentence(
    run: Run, train: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = await run(words)
    assert refused.exit_code == 2
    assert "needs kubectl, which is not on the PATH; https://kubernetes.io/docs" in refused.stderr


async def test_a_kubectl_that_cannot_be_run_is_a_sentence(
    run: Run, train: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(8, "Exec format error")

    monkeypatch.setattr("os.execvp", fails)
    monkeypatch.setattr("subprocess.Popen", fails)
    for words in ("exec train", "cp train:0:out ."):
        refused = await run(words)
        assert refused.exit_code == 2
        assert refused.stderr == "error: cannot run kubectl: Exec format error\n"


CHECKPOINT = {"checkpoint": {"claimName": "ckpt"}}


@pytest.mark.parametrize(
    ("phase", "spec", "message"),
    [
        (
            "Complete",
            CHECKPOINT,
            "job train is Complete, so its pods have ended; its checkpoints stay: claim ckpt, "
            "folder train/; ",
        ),
        ("Failed", CHECKPOINT, "users/storage.md#copy-checkpoints shows how to copy them"),
        ("Failed", {}, "deleted with them; ddpjob submit --checkpoints CLAIM keeps checkpoints"),
        ("Suspended", {}, "is suspended and has no pods; ddpjob resume train continues it"),
        (
            "Starting",
            {},
            "node 0 of job train has no running pod; the job is Starting: pulls the image; "
            "ddpjob status train has the reason",
        ),
    ],
)
async def test_without_a_running_pod_the_sentence_has_what_to_do(
    fake: FakeApi, run: Run, phase: str, spec: dict[str, Any], message: str
) -> None:
    condition = {"type": phase, "status": "True", "reason": "Test", "message": "by the test"}
    status = {"phase": phase, "message": "pulls the image"}
    if phase in ("Complete", "Failed"):
        status["conditions"] = [condition]  # type: ignore[assignment]
    job = fake.create("ddpjobs", {**a_job("train", **spec), "status": status})
    add_pod(fake, job, 0, state={"waiting": {"reason": "ContainerCreating"}})
    for words in ("exec train", "cp train:0:out ."):
        refused = await run(words)
        assert (refused.exit_code, message in refused.stderr) == (2, True), refused.stderr


# cp


async def test_a_file_is_copied_into_a_folder_and_under_another_name(
    run: Run, train: dict[str, Any]
) -> None:
    copied = await run("cp train:0:out/model.pt .")
    assert (copied.exit_code, copied.stdout) == (0, "model.pt: 20 bytes\n"), copied.stderr
    await run("cp train:0:./out/model.pt best.pt")
    for name in ("model.pt", "best.pt"):
        assert Path(name).read_text() == "weights in image/out"
    assert {path.name for path in Path().iterdir()} == {"model.pt", "best.pt"}


async def test_an_absolute_path_is_copied(run: Run, pod: Path, train: dict[str, Any]) -> None:
    await run(f"cp train:0:{pod / 'work'}/out/model.pt .")
    assert Path("model.pt").read_text() == "weights in work/out"


async def test_a_relative_path_begins_where_the_code_was_sent(
    fake: FakeApi, run: Run, pod: Path
) -> None:
    job = fake.create("ddpjobs", a_job("train", code={"configMap": "train-1"}))
    add_pod(fake, job, 0)
    await run("cp train:0:out/model.pt .")
    assert Path("model.pt").read_text() == "weights in work/out"


async def test_a_folder_is_copied_with_its_links(
    run: Run, pod: Path, train: dict[str, Any]
) -> None:
    (pod / "image/out/last.pt").symlink_to("model.pt")
    copied = await run("cp train:3:out results")
    assert (copied.exit_code, copied.stdout) == (0, "results: 2 files, 20 bytes\n"), copied.stderr
    assert os.readlink("results/last.pt") == "model.pt"
    # The working directory. Its name is not known.
    await run("cp train:0: all")
    assert Path("all/out/model.pt").exists()


async def test_a_link_that_the_user_names_is_followed(
    run: Run, pod: Path, train: dict[str, Any]
) -> None:
    (pod / "image/last.pt").symlink_to(pod / "image/out/model.pt")
    (pod / "image/latest").symlink_to(pod / "image/out")
    await run("cp train:0:last.pt .")
    await run("cp train:0:latest .")
    assert Path("last.pt").read_text() == Path("latest/model.pt").read_text()
    assert not Path("last.pt").is_symlink()


async def test_a_link_out_of_the_folder_is_refused_unless_it_is_followed(
    run: Run, pod: Path, train: dict[str, Any]
) -> None:
    (pod / "image/out/last.pt").symlink_to(pod / "work/out/model.pt")
    refused = await run("cp train:0:out .")
    assert refused.exit_code == 2
    assert "outside of the folder; -L copies what links lead to" in refused.stderr
    assert list(Path().iterdir()) == []
    assert (await run("cp -L train:0:out .")).exit_code == 0
    assert Path("out/last.pt").read_text() == "weights in work/out"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("cp out/model.pt train:0:out", "copies out of a pod only"),
        ("cp train:0:a train:1:a", 'TARGET: must be on this machine, got "train:1:a"'),
        ("cp train:out .", 'must be JOB:RANK:PATH, such as train:0:out/model.pt, got "train:out"'),
        ("cp train:x:out .", "must be JOB:RANK:PATH"),
        ("cp train:0:out/.. .", "name the copy, such as ./copy, for out/.."),
        ("cp train:0:out nowhere/out", "TARGET: folder nowhere does not exist"),
        ("cp train:0:out file", "file is a file, and out is a folder"),
        ("cp train:0:missing .", "rank 0 of job train has no 'missing', or may not read it"),
        ("cp train:0:/dev/null .", "'./null', which is neither a file nor a folder"),
        ("cp train:0:folder .", "folder folder exists; remove it, or give the copy another name"),
    ],
)
async def test_what_cannot_be_copied_is_a_sentence(
    run: Run, train: dict[str, Any], words: str, message: str
) -> None:
    Path("file").write_text("mine")
    Path("folder").mkdir()
    refused = await run(words)
    assert refused.exit_code == 2
    assert message in " ".join(refused.stderr.replace("│", " ").split())
    assert {path.name for path in Path().iterdir()} == {"file", "folder"}
    assert Path("file").read_text() == "mine"


async def test_a_folder_that_may_not_be_written_is_a_sentence(
    run: Run, train: dict[str, Any]
) -> None:
    # Root may write into every folder, but not into those of the kernel.
    refused = await run("cp train:0:out /proc/self/out")
    assert (refused.exit_code, "error: cannot write " in refused.stderr) == (2, True)


async def test_an_image_without_tar_is_a_sentence(
    run: Run, train: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH_IN_POD", str(tmp_path))
    refused = await run("cp train:1:out .")
    assert refused.stderr == (
        "error: the image of job train has no tar; for one file: ddpjob exec train --rank 1 -- "
        "cat PATH > FILE\n"
    )


@pytest.fixture
def put_tar(pod: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function to put another program `tar` into the pods."""

    def put_tar(script: str) -> None:
        programs = tmp_path / "programs"
        programs.mkdir()
        (programs / "tar").write_text(f"#!/bin/sh\n{script}\n")
        (programs / "tar").chmod(0o755)
        monkeypatch.setenv("PATH_IN_POD", f"{programs}:{os.environ['PATH_IN_POD']}")

    return put_tar


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exec head -c 700 ARCHIVE", "the archive cannot be read: unexpected end of data"),
        ("head -c 700 ARCHIVE; echo lost >&2; exit 1", "error: lost"),
        ("cat ARCHIVE; echo 'a: Permission denied' >&2; exit 2", "error: a: Permission denied"),
        ("cat ARCHIVE; echo 'unable to upgrade' >&2; exit 1", "error: unable to upgrade"),
        ("echo Welcome; exec cat ARCHIVE", "the archive cannot be read"),
        ("exit 0", "the archive cannot be read: empty file"),
    ],
)
async def test_a_partial_copy_leaves_nothing(
    run: Run,
    train: dict[str, Any],
    put_tar: Callable[[str], None],
    script: str,
    message: str,
) -> None:
    archive = Path("../archive.tar").resolve()
    member = tarfile.TarInfo("./model.pt")
    member.size = 1000
    with tarfile.open(archive, "w") as file:
        file.addfile(member, BytesIO(bytes(1000)))
    put_tar(script.replace("ARCHIVE", str(archive)))
    Path("model.pt").write_text("the copy of yesterday")
    failed = await run("cp train:0:out/model.pt .")
    assert (failed.exit_code, message in failed.stderr) == (2, True), failed.stderr
    assert [path.name for path in Path().iterdir()] == ["model.pt"]
    assert Path("model.pt").read_text() == "the copy of yesterday"


async def test_a_file_that_is_written_meanwhile_is_copied_with_a_note(
    run: Run, train: dict[str, Any], put_tar: Callable[[str], None]
) -> None:
    real = shutil.which("tar", path=os.environ["PATH_IN_POD"])
    warning = "tar: ./log.txt: file changed as we read it"
    put_tar(f'{real} "$@"; echo "{warning}" >&2; exit 1')
    copied = await run("cp train:0:out .")
    assert (copied.exit_code, copied.stderr) == (0, f"{warning}\n")
    assert Path("out/model.pt").exists()


async def test_after_an_interruption_there_is_no_half_file(
    run: Run,
    train: dict[str, Any],
    put_tar: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(unpacker: Unpacker, _: object) -> None:
        unpacker.place.write_text("a half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Unpacker, "unpack", interrupted)
    put_tar("exec sleep 600")
    stopped = await run("cp train:0:out/model.pt .")
    assert (stopped.exit_code, list(Path().iterdir())) == (130, [])


async def test_a_hostile_archive_leaves_nothing(
    run: Run, train: dict[str, Any], put_tar: Callable[[str], None]
) -> None:
    archive = Path("../archive.tar").resolve()
    with tarfile.open(archive, "w") as file:
        folder = tarfile.TarInfo(".")
        folder.type = tarfile.DIRTYPE
        file.addfile(folder)
        file.addfile(tarfile.TarInfo("../../../evil"))
    put_tar(f"cat {archive}; sleep 600")
    refused = await run("cp train:0:out .")
    assert refused.exit_code == 2
    assert "refused: the archive has the path '../../../evil', outside" in refused.stderr
    assert list(Path().iterdir()) == []


# The documentation


def commands_in_docs() -> list[str]:
    lines = [
        line.strip()
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for line in page.read_text().splitlines()
        if line.startswith(("    ddpjob exec ", "    ddpjob cp "))
    ]
    assert lines
    return lines


@pytest.mark.parametrize("line", commands_in_docs())
async def test_a_command_in_the_documentation_works(
    run: Run, pod: Path, train: dict[str, Any], line: str
) -> None:
    (pod / "image/out/log.txt").write_text("a line")
    words = before_dashes(line.partition("  #")[0].removeprefix("ddpjob "), "-n", "ml")
    done = await asyncio.to_thread(CliRunner().invoke, app, words)
    assert done.exit_code == 0, done.stderr
