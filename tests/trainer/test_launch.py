"""The launcher with the real torchrun: exit codes, signals, several hosts on one machine."""

import json
import signal

import pytest

from ddpjob.local.ports import free_port

from .launch import Run, alone, finish

SCRIPT = """
import json, os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
names = "RANK WORLD_SIZE GROUP_RANK LOCAL_RANK".split()
here = {name: int(os.environ[name]) for name in names}
print(json.dumps({"event": "here", **here, "arguments": sys.argv[1:]}), flush=True)
if "exit" in sys.argv:
    sys.exit(17 if dist.get_rank() == 0 else 0)
if "wait" in sys.argv:
    time.sleep(600)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def launched(script, *arguments, **variables) -> Run:
    return alone("-m", "ddp_trainer", "launch", "--train-script", script, *arguments, **variables)


def test_three_hosts_get_their_numbers_as_group_ranks_and_every_argument(script):
    """Three agents stand for three hosts of SageMaker. Only the name of the first is looked up."""
    hosts, port = ["localhost", "localhost-10", "localhost-2"], free_port()
    runs = [
        launched(
            script,
            "--",
            "--lr",
            "0.1",
            "a b",
            SM_HOSTS=json.dumps(hosts),
            SM_CURRENT_HOST=host,
            SM_NUM_GPUS=0,
            SAGEMAKER_JOB_NAME="job",
            RDZV_PORT=port,
        )
        for host in ("localhost-10", "localhost-2", "localhost")
    ]
    assert finish(runs) == [0, 0, 0], "\n".join(run.stderr for run in runs)
    here = [run.of("here")[0] for run in runs]
    assert [entry["GROUP_RANK"] for entry in here] == [2, 1, 0]
    assert [entry["RANK"] for entry in here] == [2, 1, 0]
    assert {entry["WORLD_SIZE"] for entry in here} == {3}
    assert all(entry["arguments"] == ["--", "--lr", "0.1", "a b"] for entry in here)


def test_the_scripts_exit_code_passes_through(script):
    run = launched(script, "exit", PET_NPROC_PER_NODE=1)
    assert run.finish() == 17
    assert "exitcode  : 17" in run.stderr


def test_sigterm_reaches_the_script_and_is_the_exit_code(script):
    run = launched(script, "wait", PET_NPROC_PER_NODE=1)
    run.wait_for("here")
    run.signal(signal.SIGTERM)
    assert run.finish() == 143


def test_under_torchrun_already_the_script_runs_as_it_is(script):
    variables = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
    }
    run = launched(script, MASTER_PORT=free_port(), **variables)
    assert run.finish() == 0, run.stderr
    assert run.of("here")[0]["WORLD_SIZE"] == 1


def test_a_module_may_be_named_instead_of_a_file():
    run = alone(
        "-m",
        "ddp_trainer",
        "launch",
        "--train-script",
        "ddp_trainer",
        "toy",
        "--steps",
        3,
        PET_NPROC_PER_NODE=2,
    )
    assert run.finish() == 0, run.stderr
    assert run.of("start")[0]["world_size"] == 2


def test_wrong_use_gets_a_sentence():
    run = alone("-m", "ddp_trainer", "launch", "train.py")
    assert run.finish() == 2
    assert "launch: --train-script with a file or a module is required" in run.stderr
