"""`ddpjob convert`: chains of `&&` and `||`, blocks and folders in the text of a shell."""

import subprocess

import pytest
from conversions import a_pytorchjob, convert, converted, converted_script

from ddpjob.core.api.readers import SpecError


def run_setup(setup, folder):
    """Run a setup as the pods do, with `pip` and `make` as files of their calls."""
    commands = 'pip() { echo "$*" >> calls; }; make() { [ "$1" != fails ]; }\n'
    return subprocess.run(["/bin/sh", "-ec", "--", commands + setup], cwd=folder).returncode


# Chains


@pytest.mark.parametrize(
    "chain",
    [
        "[ -f /x ] && pip install /x",
        "test -f /x && pip install /x",
        "[[ -f a && -f b ]] && pip install x",
        "command -v x && pip install x",
        "! grep -q x f && pip install x",
        "pip install a && pip install b || pip install c",
        "pip install a || pip install b",
        "[ -d d ] || { make d; make e; }",
        "cd d && [ -f x ] && pip install x",
    ],
)
def test_a_chain_with_a_test_stays_whole_in_a_setup(chain):
    spec, _ = converted("sh", "-c", f"make a; {chain}; make b; torchrun train.py")
    assert chain in spec["setup"].replace("'\"'\"'", "'")
    assert spec["args"] == ["train.py"]


@pytest.mark.parametrize("end", ["", "; make b"])
def test_a_failed_test_ends_no_setup(tmp_path, end):
    chain = "[ -f x ] && pip install x"
    spec, _ = converted("sh", "-c", f"{chain}{end}; torchrun train.py")
    assert run_setup(spec["setup"], tmp_path) == 0
    assert not (tmp_path / "calls").exists()
    (tmp_path / "x").touch()
    assert run_setup(spec["setup"], tmp_path) == 0
    assert (tmp_path / "calls").exists()


def test_a_failed_test_before_the_training_ends_the_setup(tmp_path):
    spec, _ = converted("sh", "-c", "[ -f x ] && pip install x && torchrun train.py")
    assert run_setup(spec["setup"], tmp_path) == 1


@pytest.mark.parametrize("exit_", ["exit 1", "exit", "exit $?", "{ echo no; exit 2; }"])
def test_an_exit_after_a_failure_is_that_of_the_setup(exit_):
    text = (
        f"cd /app || {exit_}; make a || {exit_}; pip install b && make c || {exit_}; torchrun a.py"
    )
    spec, _ = converted("sh", "-c", text)
    assert spec["setup"] == "make a\npip install b\nmake c"
    (trainer,) = spec["podTemplate"]["spec"]["containers"]
    assert trainer["workingDir"] == "/app"


def test_an_export_after_a_test_has_no_known_value():
    text = '[ -n "$DEBUG" ] && export NCCL_DEBUG=INFO; torchrun a.py'
    spec, comments = converted("sh", "-c", text)
    assert "env" not in spec
    assert "NCCL_DEBUG: the block may export it" in comments
    spec, comments = converted_script('[ -n "$D" ] && export B=1', "srun torchrun a.py")
    assert "env" not in spec
    assert '[ -n \\"$D\\" ] && export B=1' in comments


def test_what_a_test_guards_in_a_script_of_slurm_is_not_unconditional():
    lines = ("[ -d code ] && cd code", "[ -f r.txt ] && pip install -r r.txt", "srun torchrun a.py")
    spec, comments = converted_script(*lines)
    assert spec["args"] == ["a.py"]
    assert spec["setup"] == "[ -f r.txt ] && pip install -r r.txt\ntrue"
    assert '"[ -d code ] && cd code": because' in comments


def test_a_chain_without_a_use_in_a_pod_is_dropped():
    text = "[ -f v ] && source v; ulimit -n 1 || true; which x && nvidia-smi; torchrun a.py"
    spec, comments = converted("sh", "-c", text)
    assert "setup" not in spec
    assert '"[ -f v ] && source v": because what it changes' in comments


def test_a_chain_of_commands_that_ends_with_the_training_is_read():
    spec, _ = converted("sh", "-c", "cd x && pip install -e . && torchrun a.py || exit 1")
    assert spec["setup"] == "cd x\npip install -e ."
    assert spec["args"] == ["x/a.py"]


def test_a_training_only_after_a_failure_always_begins():
    spec, comments = converted("sh", "-c", "[ -f done ] || torchrun a.py")
    assert "setup" not in spec
    assert '"[ -f done ]": because the training began only after its failure' in comments


def test_a_test_that_chooses_a_training_ends_no_setup():
    text = "[ $NODE_RANK -eq 0 ] && torchrun a.py || torchrun b.py"
    spec, comments = converted("sh", "-c", text)
    assert "setup" not in spec
    assert '"[ $NODE_RANK -eq 0 ]": because it chose one of two trainings' in comments
    assert '"torchrun a.py": because it could be the training too' in comments


def test_the_end_of_a_script_in_a_chain_is_named():
    _, comments = converted("sh", "-c", "[ -f done ] && make x && exit 0; torchrun a.py")
    assert "exit 0 ends only the setup" in comments
    _, comments = converted("sh", "-c", "torchrun a.py && touch a || touch b")
    assert '"touch a || touch b": because it ran after the training' in comments
    _, comments = converted("sh", "-c", "torchrun a.py || exit 1")
    assert '"exit 1": because a pod ends when its processes do' in comments


@pytest.mark.parametrize("line", ["while true; do x; sleep 9; done &", "[ -f x ] && y &", "(x) &"])
def test_a_block_in_the_background_is_no_part_of_the_setup(line):
    spec, comments = converted("sh", "-c", f"{line}\ntorchrun a.py")
    assert "setup" not in spec
    assert "because it ran in the background" in comments


# Folders


def working_folder(spec):
    (trainer,) = spec.get("podTemplate", {}).get("spec", {}).get("containers", [{}])
    return trainer.get("workingDir", "")


@pytest.mark.parametrize(
    ("text", "folder", "setup", "script"),
    [
        ("cd /app && pip install -e . && cd -", "", "cd /app\npip install -e .", "a.py"),
        ("cd /app; make x; cd -; make y", "", "cd /app\nmake x\ncd -\nmake y", "a.py"),
        ("cd /app; cd -", "", None, "a.py"),
        ("cd /app; cd /data; cd -", "/app", None, "a.py"),
        ("cd /app; cd /data; make x; cd -", "/app", "cd /data\nmake x", "a.py"),
        ("cd /app; cd -; cd -", "/app", None, "a.py"),
        ("cd /app; cd -; make x; cd -; make y", "", "make x\ncd /app\nmake y", "/app/a.py"),
        ("cd /app; make x; cd /data; make y; cd -", "/app", "make x\ncd /data\nmake y", "a.py"),
        ("cd /app; make x; cd sub; cd -", "/app", "make x", "a.py"),
    ],
)
def test_the_folder_before_the_last_cd_is_known(text, folder, setup, script):
    spec, _ = converted("sh", "-c", f"{text}; torchrun a.py")
    assert (working_folder(spec), spec.get("setup"), spec["args"]) == (folder, setup, [script])


def test_the_working_directory_in_a_note_is_the_one_of_the_pods():
    _, comments = converted("sh", "-c", "cd /a; make x; cd b; torchrun a.py")
    assert "the working directory stays /a" in comments
    _, comments = converted("sh", "-c", "make x; cd b; torchrun a.py")
    assert "the working directory stays that of the image" in comments


def test_a_dropped_folder_is_not_left():
    spec, comments = converted_script("cd /work", "pip install x", "cd -", "srun torchrun a.py")
    assert spec["setup"] == "pip install x"
    assert '"cd -": because' in comments


def test_a_folder_of_a_block_is_named():
    spec, comments = converted("sh", "-c", "if [ -d c ]; then cd c; fi; torchrun a.py")
    assert spec["args"] == ["a.py"]
    assert "it may change the folder for the setup, not for the script" in comments


# Failures


EARLY = "it ends at the first command that fails, without a training"


@pytest.mark.parametrize(
    "text",
    [
        "pip install a; torchrun a.py",
        "make a && make b\ntorchrun a.py",
        "if [ -f a ]; then make a; fi; torchrun a.py",
        "set +e; make a; torchrun a.py",
        "make a; set -e; torchrun a.py",
        "set -e; set +e; make a; torchrun a.py",
        "set -o errexit; set +o errexit; make a; torchrun a.py",
    ],
)
def test_an_earlier_end_of_the_setup_is_noted_once(text):
    _, comments = converted("sh", "-c", text)
    assert comments.count(EARLY) == 1


@pytest.mark.parametrize(
    ("shell", "text"),
    [
        (["sh", "-c"], "set -e; make a; torchrun a.py"),
        (["bash", "-c"], "set -euo pipefail\nmake a\ntorchrun a.py"),
        (["bash", "-c"], "set -o errexit\nmake a\ntorchrun a.py"),
        (["bash", "-ec"], "make a; torchrun a.py"),
        (["bash", "-e", "-c"], "make a; torchrun a.py"),
        (["sh", "-c"], "make a && make b && torchrun a.py"),
        (["sh", "-c"], "make a || exit 1; torchrun a.py"),
        (["sh", "-c"], "make a || true; torchrun a.py"),
        (["sh", "-c"], '[ -n "$D" ] && export A=1; torchrun a.py'),
        (["sh", "-c"], "cat > f << EOF\nx\nEOF\ntorchrun a.py"),
        (["sh", "-c"], "torchrun a.py; make a"),
    ],
)
def test_a_setup_that_ends_as_its_script_has_no_note(shell, text):
    _, comments = converted(*shell, text)
    assert EARLY not in comments


def test_a_script_of_slurm_may_end_at_a_failure_by_its_first_line():
    lines = ["pip install a", "srun torchrun a.py"]
    assert EARLY in converted_script(*lines)[1]
    text = "\n".join(["#!/bin/bash -e", *lines])
    assert EARLY not in convert(text, image="i").comments()


# Sentences


@pytest.mark.parametrize("name", ["PATH", "HOSTNAME", "PYTHONPATH", "TMPDIR"])
def test_a_variable_of_every_pod_is_not_set_by_torchrun(name):
    text = f"make ${name}; torchrun a.py ${name}"
    _, comments = converted("sh", "-c", text, env=[{"name": "X", "value": f"/x:$({name})"}])
    assert f"{name} in setup" not in comments
    assert f'{name} in args: nothing expands it; instead: read os.environ["{name}"]' in comments
    assert f"nothing expands {name}; instead: write the whole value" in comments
    assert "torchrun sets it" not in comments


def test_a_default_of_a_variable_is_its_value():
    text = ': ${A:=1}; : "${B:=2}"; A=${A}0; export B; torchrun a.py $A'
    spec, comments = converted("sh", "-c", text)
    assert spec["args"] == ["a.py", "10"]
    assert spec["env"] == [{"name": "B", "value": "2"}]
    assert "because" not in comments


def test_a_default_does_not_replace_a_value():
    env = [{"name": "A", "value": "5"}]
    spec, _ = converted("sh", "-c", "B=6; : ${A:=1} ${B:=1}; torchrun a.py $A $B", env=env)
    assert (spec["env"], spec["args"]) == (env, ["a.py", "$(A)", "6"])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (": x", '": x": because it does nothing'),
        ("wait", '"wait": because the operator waits for the processes'),
        ("torchrun a.py < input.txt", '"< input.txt": because a process of a DDPJob has no input'),
        ("torchrun a.py > log", '"> log": because the agent reads the output'),
    ],
)
def test_the_reason_for_a_dropped_part_is_its_own(line, sentence):
    text = line if "torchrun" in line else f"{line}\ntorchrun a.py"
    assert sentence in converted("sh", "-c", text)[1]


def test_an_older_version_of_a_kind_is_named():
    text = a_pytorchjob().replace("kubeflow.org/v1", "kubeflow.org/v1beta2")
    with pytest.raises(SpecError, match=r"got PyTorchJob \(kubeflow.org/v1beta2\)"):
        convert(text)
