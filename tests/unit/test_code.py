"""A user's script or folder as a ConfigMap."""

import pytest
import yaml

from ddpjob.cli.own_script import OwnScript, job_name
from ddpjob.client.code import PRINTED_BYTES, owned_code, read_code
from ddpjob.core.api.readers import SpecError


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
    code = read_code(project / "train.py", None, PRINTED_BYTES)
    assert code == {"train.py": "import lib.model\n"}


def test_a_folder_travels_without_hidden_files_and_byte_code(project):
    code = read_code(project / "train.py", project, PRINTED_BYTES)
    assert sorted(code) == ["lib/__init__.py", "lib/model.py", "train.py"]


def test_the_job_mounts_the_code_and_runs_the_script(project):
    own = OwnScript(project / "train.py", "i", project, ["--epochs", "3"], nodes=2, claim="ckpt")
    config_map, job = own.documents(PRINTED_BYTES)
    name = config_map["metadata"]["name"]
    assert name.startswith("train-")
    assert config_map["immutable"] is True
    assert config_map["data"]["lib__model.py"] == "x = 1\n"
    spec = job["spec"]
    assert spec["args"] == ["/mnt/code/train.py", "--epochs", "3"]
    assert spec["volumes"][0]["configMap"]["name"] == name
    items = spec["volumes"][0]["configMap"]["items"]
    assert {"key": "lib__model.py", "path": "lib/model.py"} in items
    assert spec["checkpoint"] == {"claimName": "ckpt"}


@pytest.mark.parametrize("folder", [False, True])
def test_a_script_may_be_a_link(project, folder):
    (project / "link.py").symlink_to(project / "train.py")
    own = OwnScript(project / "link.py", "i", project if folder else None)
    config_map, job = own.documents(PRINTED_BYTES)
    script = job["spec"]["args"][0].removeprefix("/mnt/code/")
    assert config_map["data"][script] == "import lib.model\n"


def test_other_code_is_another_config_map(project):
    own = OwnScript(project / "train.py", "i")
    before, _ = own.documents(PRINTED_BYTES)
    (project / "train.py").write_text("print(2)\n")
    after, _ = own.documents(PRINTED_BYTES)
    assert before["metadata"]["name"] != after["metadata"]["name"]


def test_a_printed_manifest_shows_the_script_line_by_line(project):
    (project / "train.py").write_text("import torch\n\nprint(1)\n")
    text = OwnScript(project / "train.py", "i").manifest(PRINTED_BYTES)
    assert "  train.py: |\n    import torch\n\n    print(1)\n" in text
    kinds = [one["kind"] for one in yaml.safe_load_all(text)]
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
        OwnScript(tmp_path / name, "i").documents(PRINTED_BYTES)
    assert str(refused.value).startswith(f"{tmp_path / name}: ")
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "first_line"),
    [("train", ""), ("train", "#!/usr/bin/env python3"), ("train.py", "#!/opt/my env/python3.12")],
)
def test_a_script_of_python_may_have_any_name(tmp_path, name, first_line):
    (tmp_path / name).write_text(f"{first_line}\nprint(1)\n")
    _, job = OwnScript(tmp_path / name, "i").documents(PRINTED_BYTES)
    assert job["spec"]["args"] == [f"/mnt/code/{name}"]


def test_a_shell_script_beside_the_script_travels_with_it(project):
    (project / "prepare.sh").write_text("#!/bin/sh\n")
    config_map, _ = OwnScript(project / "train.py", "i", folder=project).documents(PRINTED_BYTES)
    assert "prepare.sh" in config_map["data"]


def test_more_code_than_a_config_map_takes_is_refused(project):
    (project / "train.py").write_text("x" * 300_000)
    with pytest.raises(SpecError, match="300,000 bytes of code, and a ConfigMap takes 200,000"):
        read_code(project / "train.py", None, PRINTED_BYTES)


def test_a_file_that_is_no_text_is_refused(project):
    (project / "lib" / "weights.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match=r"weights.bin: is no text"):
        read_code(project / "train.py", project, PRINTED_BYTES)


def test_a_file_whose_name_is_no_key_is_refused(project):
    (project / "lib" / "my model.py").write_text("")
    with pytest.raises(SpecError, match="rename it"):
        read_code(project / "train.py", project, PRINTED_BYTES)


def test_a_script_outside_of_its_folder_is_refused(project):
    with pytest.raises(SpecError, match="is not in the folder"):
        read_code(project / "train.py", project / "lib", PRINTED_BYTES)


def test_two_files_whose_keys_are_the_same_are_refused(project):
    (project / "lib__model.py").write_text("")
    with pytest.raises(SpecError, match="rename a file"):
        OwnScript(project / "train.py", "i", project).documents(PRINTED_BYTES)


def test_a_script_that_does_not_exist_is_refused(project):
    with pytest.raises(SpecError, match=r"nowhere.py: the file does not exist"):
        OwnScript(project / "nowhere.py", "i").documents(PRINTED_BYTES)


def test_the_code_becomes_the_jobs_own():
    job = {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": "j", "namespace": "n", "uid": "u"},
    }
    code = {
        "kind": "ConfigMap",
        "metadata": {"name": "c", "namespace": "n", "labels": {"ddpjob.dev/code-of": "j"}},
    }
    other = {"kind": "ConfigMap", "metadata": {"name": "d", "namespace": "n"}}
    patches = list(owned_code([code, other, job]))
    assert [patch["metadata"]["name"] for patch in patches] == ["c"]
    assert patches[0]["metadata"]["ownerReferences"][0]["uid"] == "u"
