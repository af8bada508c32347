"""A user's script or folder as a ConfigMap."""

import base64
import io
import os
import random
import re
from zipfile import ZipFile

import pytest

from ddpjob.agent import code as agent_code
from ddpjob.cli.own_script import Container, OwnScript
from ddpjob.client.code import owned_code
from ddpjob.core.api.readers import SpecError
from ddpjob.core.api.yaml_text import load_all_yaml
from ddpjob.sources import code
from ddpjob.sources.code import read_code
from ddpjob.sources.script import job_name


@pytest.fixture
def project(tmp_path):
    files = {
        "train.py": "import lib.model\n",
        "lib/__init__.py": "",
        "lib/model.py": "x = 1\n",
        ".git/config": "secret",
        "__pycache__/a.pyc": "x",
        "lib/b.pyc": "x",
        "env/pyvenv.cfg": "",
        "env/lib/torch.py": "x",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_a_script_travels_alone(project):
    found = read_code(project / "train.py", None)
    assert found.text == {"train.py": "import lib.model\n"}


def test_a_folder_travels_without_hidden_files_and_byte_code(project):
    found = read_code(project / "train.py", project)
    assert sorted(found.files) == ["lib/__init__.py", "lib/model.py", "train.py"]


def unpacked(config_map):
    """Return the files of a ConfigMap of code, as the agent unpacks them."""
    if "data" in config_map:
        return {path: text.encode() for path, text in config_map["data"].items()}
    packed = base64.b64decode(config_map["binaryData"]["code.zip"])
    with ZipFile(io.BytesIO(packed)) as archive:
        return {path: archive.read(path) for path in archive.namelist()}


def test_the_job_has_the_code_and_runs_the_script_in_it(project):
    own = OwnScript(project / "train.py", "i", project, ["--epochs", "3"], nodes=2, claim="ckpt")
    config_map, job = own.job().documents
    assert config_map["immutable"] is True
    assert unpacked(config_map)["lib/model.py"] == b"x = 1\n"
    spec = job["spec"]
    assert spec["args"] == ["train.py", "--epochs", "3"]
    assert spec["code"] == {"configMap": config_map["metadata"]["name"]}
    assert spec["checkpoint"] == {"claimName": "ckpt"}


def test_files_that_are_no_text_travel_too_and_programs_stay_programs(project):
    (project / "lib" / "weights.bin").write_bytes(b"\xff\xfe")
    (project / "my tool.sh").write_text("#!/bin/sh\n")
    (project / "my tool.sh").chmod(0o755)
    found = read_code(project / "train.py", project)
    assert found.files["lib/weights.bin"] == (b"\xff\xfe", False)
    assert found.files["my tool.sh"] == (b"#!/bin/sh\n", True)


def test_a_script_whose_name_is_no_key_travels_in_an_archive(tmp_path):
    (tmp_path / "my train.py").write_text("print(1)\n")
    config_map, job = OwnScript(tmp_path / "my train.py", "i").job().documents
    assert unpacked(config_map) == {"my train.py": b"print(1)\n"}
    assert "binaryData" in config_map
    assert job["spec"]["args"] == ["my train.py"]


def test_a_folder_that_cannot_be_read_is_refused(project):
    with pytest.raises(SpecError, match=r"nowhere: cannot read the folder: No such file"):
        read_code(project / "train.py", project / "nowhere")


def test_more_files_than_the_agent_unpacks_are_refused(project, monkeypatch):
    monkeypatch.setattr(code, "MAX_ENTRIES", 2)
    with pytest.raises(SpecError, match=r"has 3 files, and the limit is 2; name data in"):
        read_code(project / "train.py", project)


def test_a_local_run_sends_nothing_so_its_folder_may_have_keys_and_data(project):
    (project / "id_rsa").write_text("x")
    with (project / "data").open("wb") as file:
        file.truncate(65 * 2**20)
    own = OwnScript(project / "lib" / "model.py", "i", project, ["--x"])
    assert own.local_document()["spec"]["args"] == ["lib/model.py", "--x"]
    with pytest.raises(SpecError, match="is not in the folder"):
        OwnScript(project / "train.py", "i", project / "lib").local_document()


def test_the_same_folder_gives_the_same_archive(project, tmp_path):
    before = read_code(project / "train.py", project)
    os.utime(project / "train.py", (0, 0))
    after = read_code(project / "train.py", project)
    assert (before.archive(), before.digest) == (after.archive(), after.digest)
    (project / "train.py").chmod(0o755)
    assert read_code(project / "train.py", project).digest != before.digest


def test_two_jobs_with_the_same_code_share_its_config_map(project):
    one, _ = OwnScript(project / "train.py", "i", name="a").job().documents
    two, _ = OwnScript(project / "train.py", "i", name="b").job().documents
    assert one == two


def test_what_git_ignores_stays_out(project):
    files = {
        ".gitignore": "/data/\n*.log\n",
        ".ddpjobignore": "notes.md\n!lib/keep.log\n",
        "data/x.bin": "x",
        "lib/data/y.py": "y",
        "a.log": "x",
        "lib/keep.log": "x",
        "notes.md": "x",
        "lib/.gitignore": "model.py\n",
        "ddpjob-runs/train/job.yaml": "x",
    }
    for path, text in files.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)
    found = read_code(project / "train.py", project)
    assert sorted(found.files) == ["lib/__init__.py", "lib/data/y.py", "lib/keep.log", "train.py"]


@pytest.mark.parametrize("name", ["server.pem", "id_rsa", "Token.txt", "my-kubeconfig.yaml"])
def test_a_file_that_looks_like_a_key_is_refused_unless_it_is_ignored(project, name):
    (project / "lib" / name).write_text("x")
    with pytest.raises(SpecError, match=r"looks like a key or a token.*as a Secret"):
        read_code(project / "train.py", project)
    (project / ".ddpjobignore").write_text(f"{name}\n")
    assert f"lib/{name}" not in read_code(project / "train.py", project).files


def test_a_note_warns_of_code_that_is_large(project):
    (project / "noise").write_bytes(random.Random(1).randbytes(300_000))
    (text,) = OwnScript(project / "train.py", "i", project).job().notes
    assert "bytes, which etcd keeps as long as the job" in text


@pytest.mark.parametrize("folder", [False, True])
def test_a_script_may_be_a_link(project, folder):
    (project / "link.py").symlink_to(project / "train.py")
    own = OwnScript(project / "link.py", "i", project if folder else None)
    config_map, job = own.job().documents
    assert unpacked(config_map)[job["spec"]["args"][0]] == b"import lib.model\n"


def test_other_code_is_another_config_map(project):
    own = OwnScript(project / "train.py", "i")
    before, _ = own.job().documents
    (project / "train.py").write_text("print(2)\n")
    after, _ = own.job().documents
    assert before["metadata"]["name"] != after["metadata"]["name"]


def test_a_printed_manifest_shows_the_script_line_by_line(project):
    (project / "train.py").write_text("import torch\n\nprint(1)\n")
    text = OwnScript(project / "train.py", "i").manifest()
    assert "  train.py: |\n    import torch\n\n    print(1)\n" in text
    kinds = [one["kind"] for one in load_all_yaml(text)]
    assert kinds == ["ConfigMap", "DDPJob"]


@pytest.mark.parametrize(
    ("stem", "name"),
    [("train", "train"), ("My_Train 2", "my-train-2"), ("2fast", "job-2fast"), ("__", "job")],
)
def test_the_name_of_a_script_becomes_that_of_the_job(tmp_path, stem, name):
    assert job_name(tmp_path / f"{stem}.py") == name


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("train.sh", "python train.py\n", "is a shell script, and torchrun starts Python scripts"),
        ("train", "#!/bin/bash\n", "is a shell script, and torchrun starts Python scripts"),
        ("train.SH", "", "is a shell script, and torchrun starts Python scripts"),
        ("train.ipynb", "{}", "jupyter nbconvert --to script train.ipynb"),
        ("train", "#!/usr/bin/env node\n", "#!/usr/bin/env node is not the first line of a"),
    ],
)
def test_a_file_that_is_no_script_of_python_is_refused(tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError) as refused:
        OwnScript(tmp_path / name, "i").job()
    assert str(refused.value).startswith(f"{tmp_path / name}: ")
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "first_line"),
    [("train", ""), ("train", "#!/usr/bin/env python3"), ("train.py", "#!/opt/my env/python3.12")],
)
def test_a_script_of_python_may_have_any_name(tmp_path, name, first_line):
    (tmp_path / name).write_text(f"{first_line}\nprint(1)\n")
    _, job = OwnScript(tmp_path / name, "i").job().documents
    assert job["spec"]["args"] == [name]


def test_a_shell_script_beside_the_script_travels_with_it(project):
    (project / "prepare.sh").write_text("#!/bin/sh\n")
    own = OwnScript(project / "train.py", "i", folder=project)
    config_map, _ = own.job().documents
    assert "prepare.sh" in unpacked(config_map)


def test_more_code_than_a_config_map_takes_is_refused(project):
    (project / "train.py").write_text("x" * 300_000)
    with pytest.raises(SpecError, match="has 300,000 bytes of code, and the limit is 190,000"):
        OwnScript(project / "train.py", "i").manifest()


def test_code_that_is_too_large_is_refused_with_its_largest_files(project):
    noise = random.Random(1)
    for name, size in {"b.bin": 700_000, "a.bin": 500_000, "lib/c.bin": 5_000, "d": 10}.items():
        (project / name).write_bytes(noise.randbytes(size))
    with pytest.raises(SpecError) as refused:
        OwnScript(project / "train.py", "i", project).job()
    largest = re.findall(r"(\S+) \(([\d,]+)\)", str(refused.value).partition("files: ")[2])
    assert [path for path, _ in largest] == ["b.bin", "a.bin", "lib/c.bin"]
    assert largest[0][1].startswith("700,")


def test_more_code_than_the_agent_unpacks_is_refused(project):
    with (project / "data").open("wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(
        SpecError, match=r"67,108,864; the largest of its 4 files: data \(68,157,440\), "
    ):
        read_code(project / "train.py", project)


def test_a_script_outside_of_its_folder_is_refused(project):
    with pytest.raises(SpecError, match="is not in the folder"):
        read_code(project / "train.py", project / "lib")


def test_a_script_that_does_not_exist_is_refused(project):
    with pytest.raises(SpecError, match=r"nowhere.py: the file does not exist"):
        OwnScript(project / "nowhere.py", "i").job()


def a_body(kind, name, **fields):
    metadata = {"name": name, "namespace": "n", "uid": f"uid-{name}", **fields.pop("metadata", {})}
    version = "ddpjob.dev/v1alpha1" if kind == "DDPJob" else "v1"
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def test_the_code_becomes_its_jobs_own():
    jobs = [a_body("DDPJob", name, spec={"code": {"configMap": "c"}}) for name in ("i", "j")]
    other_job = a_body("DDPJob", "k", spec={})
    sent = {"labels": {"ddpjob.dev/code": "sent"}}
    bodies = [
        a_body("ConfigMap", "c", metadata=sent),
        a_body("ConfigMap", "d", metadata=sent),
        a_body("ConfigMap", "c", metadata={**sent, "namespace": "other"}),
        a_body("ConfigMap", "c", metadata={"namespace": "n2"}),
        *jobs,
        other_job,
    ]
    (patch,) = owned_code(bodies)
    assert (patch["metadata"]["name"], patch["metadata"]["namespace"]) == ("c", "n")
    owners = [owner["uid"] for owner in patch["metadata"]["ownerReferences"]]
    assert owners == ["uid-i", "uid-j"]


def test_code_that_a_user_has_made_is_not_owned():
    job = a_body("DDPJob", "j", spec={"code": {"configMap": "c"}})
    assert list(owned_code([a_body("ConfigMap", "c"), job])) == []


def test_options_set_variables_and_resources(project):
    container = Container(["A=b=c", "B="], ["TOKEN=hf", "KEY=aws:secret"], "4", "16Gi")
    own = OwnScript(project / "train.py", "i", accelerator="gpu", gpus=2, container=container)
    _, job = own.job().documents
    assert job["spec"]["env"] == [
        {"name": "A", "value": "b=c"},
        {"name": "B", "value": ""},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "TOKEN"}}},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "aws", "key": "secret"}}},
    ]
    assert job["spec"]["resources"] == {
        "requests": {"cpu": "4", "memory": "16Gi"},
        "limits": {"nvidia.com/gpu": "2", "memory": "16Gi"},
    }


def test_a_quantity_that_is_none_is_refused(project):
    own = OwnScript(project / "train.py", "i", container=Container(memory="16GB"))
    with pytest.raises(SpecError, match="memory: must be a quantity such as 500m or 2Gi"):
        own.job()


@pytest.mark.parametrize("name", ["ARCHIVE", "MAX_ENTRIES", "MAX_BYTES"])
def test_the_agent_expects_what_is_sent(name):
    assert getattr(agent_code, name) == getattr(code, name)
