"""How `spec.args` begins: with a script, or with -m and a module."""

from pathlib import Path

import pytest
from builders.jobs import a_spec

from ddpjob.core.api.launcher import LAUNCHER_MODULES
from ddpjob.core.api.readers import SpecError
from ddpjob.core.api.resolved import Spec

CRD = Path(__file__).parents[2] / "charts" / "ddpjob-operator" / "files" / "crd.yaml"

BEGIN = "begin with the script or -m and a module"
STARTER = f"{BEGIN}, since torchrun starts Python itself, got"
NO_PYTHON = "to run another program, add --no-python to spec.torchrun.args"
LAUNCHER = f"{BEGIN}, since the operator starts torchrun itself, got"
ITS_FLAGS = "flags of torchrun belong to spec.torchrun.args"
ONE_WORD = f"each word must be an item of its own; {BEGIN}, got"
MODULE = "must be followed by a module, each word as an item of its own, got"


def read(words, /, **torchrun):
    """Return `spec.args` of a job, as the operator reads it."""
    return Spec.from_dict(a_spec(args=words, torchrun=torchrun)).args


def refusal_of(words, /, **torchrun):
    with pytest.raises(SpecError) as refused:
        read(words, **torchrun)
    return str(refused.value).removeprefix("spec.args: ")


# What is refused, and the whole message


@pytest.mark.parametrize(
    "program",
    [
        "python",
        "python3",
        "python3.11",
        "/opt/conda/bin/python",
        "bash",
        "/bin/sh",
        "zsh",
        "env",
        "uv",
        "conda",
        "poetry",
        "nsys",
        "numactl",
        "run.sh",
        "./scripts/run.sh",
    ],
)
def test_a_program_is_refused_since_torchrun_starts_python(program):
    assert refusal_of([program, "train.py"]) == f'{STARTER} "{program}"; {NO_PYTHON}'


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        "/opt/conda/bin/torchrun",
        "accelerate",
        "deepspeed",
        "horovodrun",
        "mpirun",
        "mpiexec",
        "/usr/bin/srun",
    ],
)
def test_a_launcher_is_refused_since_the_operator_starts_torchrun(launcher):
    args = [launcher, "--nproc-per-node=1", "train.py"]
    assert refusal_of(args) == f'{LAUNCHER} "{launcher}"; {ITS_FLAGS}'


@pytest.mark.parametrize("module", LAUNCHER_MODULES)
def test_a_launcher_is_refused_as_a_module_too(module):
    assert refusal_of(["-m", module, "train.py"]) == f'{LAUNCHER} "{module}"; {ITS_FLAGS}'


@pytest.mark.parametrize(
    "line",
    [
        "python train.py --epochs 3",
        "/opt/my/python3 -m train",
        "torchrun train.py",
        "accelerate launch train.py",
        "bash run.sh",
        "./run.sh --fast",
        "uv run train.py",
        "train.py --epochs 3",
        "/my code/train.py --epochs 3",
        "-m package.train",
        "--module package.train",
        "--epochs=3 train.py x",
    ],
)
@pytest.mark.parametrize("flags", [[], ["--no-python"]])
def test_a_command_line_in_one_word_is_refused(line, flags):
    assert refusal_of([line], args=flags) == f'{ONE_WORD} "{line}"'


@pytest.mark.parametrize(
    ("args", "message"),
    [
        # A working flag has a place.
        (
            ["--role=a", "train.py"],
            f"--role=a is a flag of torchrun; put it into spec.torchrun.args, and {BEGIN}",
        ),
        (
            ["--no-python", "bash"],
            f"--no-python is a flag of torchrun; put it into spec.torchrun.args, and {BEGIN}",
        ),
        # Another one has its own sentence.
        (
            ["--nnodes=4", "train.py"],
            f"--nnodes=4 cannot be used: set spec.nodes instead; {BEGIN}",
        ),
        (
            ["--node_r", "0", "train.py"],
            "--node_r (--node-rank) cannot be used: the operator sets the rendezvous; remove it; "
            f"{BEGIN}",
        ),
        (
            ["--tees", "3", "train.py"],
            f"unknown flag of torchrun \"--tees\" (did you mean '--tee'?); {BEGIN}",
        ),
        (["-c", "print(1)"], f'unknown flag of torchrun "-c"; {BEGIN}'),
        (["-u", "train.py"], f'unknown flag of torchrun "-u"; {BEGIN}'),
        (["--", "train.py"], f'unknown flag of torchrun "--"; {BEGIN}'),
        (["-"], f'unknown flag of torchrun "-"; {BEGIN}'),
        (["-m"], f'-m {MODULE} ["-m"]'),
        (["--module", "-u", "x"], f'--module {MODULE} ["--module", "-u", "x"]'),
        (["-m", "train --epochs 3"], f'-m {MODULE} ["-m", "train --epochs 3"]'),
        (["-m", ""], f'-m {MODULE} ["-m", ""]'),
    ],
)
def test_another_beginning_is_refused_with_a_message(args, message):
    assert refusal_of(args) == message


@pytest.mark.parametrize("flag", ["-m", "--module"])
def test_a_module_needs_python(flag):
    message = f"{flag} cannot be used with --no-python; remove one of them"
    assert refusal_of([flag, "pkg"], args=["--no-python"]) == message


@pytest.mark.parametrize(
    "args",
    [
        ["--tee", "3", "--nnodes=4", "t.py"],
        ["--log-dir=/tmp/x", "--rdzv-backend=static", "t.py"],
        ["--role=a", "--nnodes", "1:4", "--max-restarts=100", "t.py"],
        ["--master-addr=h", "t.py"],
        ["--node-rank=0", "t.py"],
        ["--local-addr=x", "t.py"],
    ],
)
def test_a_flag_in_second_place_does_not_pass_in_any_field(args):
    *flags, script = args
    assert BEGIN in refusal_of(args)
    with pytest.raises(SpecError, match=r"^spec\.torchrun\.args: .* cannot be used: "):
        read([script], args=flags)


# What is accepted


@pytest.mark.parametrize(
    "args",
    [
        ["train.py"],
        ["my train.py"],
        ["/mnt/my code/train.py", "--epochs", "3"],
        ["train"],
        ["python_job.py"],
        ["bash.py"],
        ["torchrun.py"],
        ["torchrun/train.py"],
        ["shell"],
        ["-m", "pkg.train", "--nnodes=2"],
        ["--module", "pkg"],
        # What follows the script is its own.
        ["train.py", "--nnodes=2", "--master-port", "1"],
        ["train.py", "python x.py", "bash"],
    ],
)
def test_a_script_or_a_module_is_accepted(args):
    assert list(read(args)) == args


@pytest.mark.parametrize("args", [["bash", "run.sh"], ["python", "x.py"], ["./run.sh"], ["a.out"]])
@pytest.mark.parametrize(
    "torchrun",
    [
        {"command": ["torchrun", "--no-python"]},
        {"command": ["python", "-m", "torch.distributed.run", "--no_python"]},
        {"args": ["--no-python"]},
        {"args": ["--role=a", "--no_python"]},
        {"command": ["my-launcher", "--no-python"]},
    ],
)
def test_any_program_is_accepted_if_torchrun_does_not_start_python(args, torchrun):
    assert list(read(args, **torchrun)) == args


@pytest.mark.parametrize(
    "args", [["--mixed_precision", "fp16", "x.py"], ["bash", "run.sh"], ["python x.py"], ["-m"]]
)
def test_another_launcher_may_take_other_words(args):
    assert list(read(args, command=["accelerate", "launch"])) == args


@pytest.mark.parametrize("flag", ["--nnodes=2", "--nn", "--rdzv_id=x", "--max-restarts", "--stand"])
def test_no_launcher_may_get_what_the_operator_sets(flag):
    assert BEGIN in refusal_of([flag, "x.py"], command=["my-launcher"])


def test_no_launcher_may_get_python_as_the_script():
    expected = f'{STARTER} "python"; {NO_PYTHON}'
    assert refusal_of(["python", "x.py"], command=["my-launcher"]) == expected
