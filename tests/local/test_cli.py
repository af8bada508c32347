"""Wrong options, arguments and jobs, and what `ddpjob` says of them."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ddpjob.cli.main import app
from ddpjob.core.api.yaml_text import load_yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.yaml"

JOB = """
apiVersion: ddpjob.dev/v1alpha1
kind: DDPJob
metadata: {name: j}
spec: {image: i, args: [-m, x], checkpoint: {claimName: ckpt}}
"""


def refusal(*words: str) -> str:
    """Return what a refused command prints, without the frame around it."""
    refused = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    return " ".join(refused.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("init digit", "got \"digit\" (did you mean 'digits'?)"),
        ("init digits --accelerator trn1.2xlarg", "(did you mean 'trn1.2xlarge'?)"),
        ("operator --pod-security restrictd", "(did you mean 'restricted'?)"),
        ("operator --job-defaults {", "--job-defaults: Expecting property name"),
        ("operator --job-defaults []", "--job-defaults: must be an object with fields of"),
        ("operator --log-format jso", "(did you mean 'json'?)"),
        ("operator --log-level warn", 'must be one of debug, info, warning, error, got "warn"'),
    ],
)
def test_a_misspelt_choice_is_refused_with_the_name_that_is_closest(words, message):
    assert message in refusal(*words.split())


def test_the_operator_refuses_to_exclude_a_namespace_from_a_list_of_watched_ones():
    refused = refusal("operator", "--namespace=a", "--exclude-namespace=b")
    assert "--exclude-namespace: cannot be combined with --namespace" in refused


@pytest.fixture
def logging_is_restored():
    """Remove the handler of the operator: its stream is closed after the end of the command."""
    root, kopf = logging.getLogger(), logging.getLogger("kopf")
    before = root.handlers[:], root.level, kopf.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    kopf.setLevel(before[2])


def test_the_log_level_may_be_in_upper_case(logging_is_restored):
    # The command ends because the file is missing, not because of the level.
    ended = CliRunner().invoke(app, ["operator", "--log-level", "INFO", "--kubeconfig", "missing"])
    assert ended.exit_code == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("job.yaml", "--local: is required to run a job on this machine"),
        ("job.yaml job.yaml --local", "FILE: give one manifest, or --script with its arguments"),
        ("--local", "FILE: give one manifest, or --script with its arguments"),
        ("job.yaml --local --name a", "--name: requires --script"),
        ("job.yaml --local --gpus 2", "--gpus: requires --script"),
        ("job.yaml --local --setup", "--setup: the job has no spec.setup; leave the option out"),
        ("--local --setup --script a.py", "--setup: is for a manifest with spec.setup"),
        ("job.yaml --local --claim ckpt", '--claim: must be NAME=FOLDER, got "ckpt"'),
        ("job.yaml --local --claim ckpt=no", "--claim: ckpt=no: folder no does not exist"),
        (
            "job.yaml --local --claim cpkt=.",
            "--claim: the job has no claim \"cpkt\" (did you mean 'ckpt'?); its claims are ckpt",
        ),
        ("job.yaml --local --config-map script", '--config-map: must be NAME=PATH, got "script"'),
        (
            "job.yaml --local --config-map script=no.py",
            "--config-map: script=no.py: cannot read no.py: No such file or directory",
        ),
        ("job.yaml --local --runs job.yaml", "--runs: cannot write"),
        ("no.yaml --local", "no.yaml: cannot read the file: No such file or directory"),
    ],
)
def test_wrong_use_of_run_is_refused(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    assert message in refusal("run", *words.split())


def test_a_command_ends_in_silence_with_the_program_that_reads_its_output():
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "ddpjob.cli.main", "validate", str(EXAMPLE)],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_validate_says_what_the_operator_would_refuse(tmp_path):
    trainer = {"name": "trainer", "volumeMounts": [{"name": "v", "mountPath": "/checkpoints/"}]}
    job = load_yaml(JOB)
    job["spec"]["podTemplate"] = {"spec": {"containers": [trainer]}}
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(job))
    done = CliRunner().invoke(app, ["validate", str(manifest)])
    assert done.exit_code == 1
    assert "with a mount at /checkpoints, checkpoints would not get to" in done.stdout


AFTER = "No such option: --epochs; an argument of the script follows after --, such as"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("submit --script train.py --epochs 3", AFTER),
        ("run --local --script train.py --epochs 3", AFTER),
        ("init --script train.py --epochs 3", AFTER),
        ("submit job.yaml --folow", "(Possible options: --follow)"),
        ("submit train.py", "train.py: is a Python script and not a manifest; give it as --script"),
        ("run --local train.py", "train.py: is a Python script and not a manifest"),
        ("submit job.yaml --set env.X=1", "a job has no field env; did you mean spec.env.X?"),
        ("plot folder", "folder: the run has printed no figures; print lines such as {"),
        ("logs j --previous --attempt 1", "--previous: cannot be combined with --follow or"),
        ("logs j --previous --since 5m", "--previous: cannot be combined with --since"),
        ("logs j --attempt 1 --since 5m", "--attempt: cannot be combined with --since"),
        (
            "logs j --attempt 1 --tail 1 -f",
            "--tail: cannot be combined with --follow and --attempt",
        ),
    ],
)
def test_a_hint_leads_to_what_was_meant(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    Path("train.py").write_text("print({'a': 1}['a'])\n")
    Path("folder").mkdir()
    shown = refusal(*words.split())
    assert message in shown
    assert "--nproc" not in shown


def test_options_of_ddpjob_after_the_dashes_are_noted_as_those_of_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print(1)\n")
    words = ["init", "--script", "train.py", "--image", "i", "--", "--nodes", "4", "--env", "x"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0
    assert "--nodes is passed to the script; before --, it is an option of ddpjob" in shown.stderr
    assert "--env is passed" not in shown.stderr
    # Without a script, they belong to nothing.
    assert "is passed to the script" not in refusal("submit", "job.yaml", "--", "--dry-run")


def test_the_folder_of_a_script_must_exist_and_its_error_has_one_place(tmp_path):
    (tmp_path / "train.py").write_text("print(1)\n")
    script = ["run", "--local", "--script", str(tmp_path / "train.py")]
    shown = refusal(*script, "--code", str(tmp_path / "nowhere"))
    assert shown == f"{tmp_path}/nowhere: the folder does not exist"


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("logs", "[OPTIONS] JOB"),
        ("scale", "[OPTIONS] JOB NODES"),
        ("submit", "[OPTIONS] [FILE…]"),
        ("init", "[OPTIONS] [WORKLOAD…]"),
        ("delete", "[OPTIONS] JOB…"),
    ],
)
def test_the_usage_has_the_arguments_as_they_are_typed(command, usage):
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    (line,) = [one.strip() for one in shown.splitlines() if "Usage:" in one]
    assert line.endswith(f"{command} {usage}")


@pytest.mark.parametrize("words", [[], ["logs"], ["submit"], ["list"]])
def test_a_flag_has_no_type(words):
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"}).stdout
    assert "--help" in shown
    assert "bool" not in shown.lower()
