"""`ddpjob convert`: the programs before torchrun, python or a script."""

import pytest
from conversions import converted, converted_script

from ddpjob.convert.programs import ACCELERATE_SWITCHES, DEEPSPEED_SWITCHES, split_prefix


@pytest.mark.parametrize(
    ("flags", "dropped"),
    [
        ("--multi-gpu --main-process-port 8", '["--multi-gpu", "--main-process-port 8"]'),
        ("--enable_cpu_affinity --use_fsdp", '["--enable_cpu_affinity", "--use_fsdp"]'),
        ("--dynamo-use-fullgraph --rdzv_backend c10d", '"--rdzv_backend c10d"'),
        ("--a-new-switch", '["--a-new-switch"]'),
    ],
)
def test_a_switch_of_accelerate_takes_no_value(flags, dropped):
    spec, comments = converted("accelerate", "launch", *flags.split(), "train.py", "--x", "1")
    assert spec["args"] == ["train.py", "--x", "1"]
    assert dropped in comments


@pytest.mark.parametrize("switch", [*ACCELERATE_SWITCHES, *DEEPSPEED_SWITCHES])
def test_the_script_follows_each_switch(switch):
    program = ["deepspeed"] if switch in DEEPSPEED_SWITCHES else ["accelerate", "launch"]
    spec, _ = converted(*program, switch, "train", "1")
    assert [word for word in spec["args"] if word != "-m"] == ["train", "1"]


def test_a_value_of_deepspeed_is_not_the_script():
    flags = "--no-local-rank --autotuning tune --num_accelerators=4 --hostfile h"
    spec, _ = converted("deepspeed", *flags.split(), "train.py", "--deepspeed")
    assert spec["args"] == ["train.py", "--deepspeed"]
    assert spec["nprocPerNode"] == 4


def test_a_precision_with_hyphens_is_that_of_accelerate():
    spec, _ = converted("accelerate", "launch", "--mixed-precision", "bf16", "train.py")
    assert spec["env"] == [{"name": "ACCELERATE_MIXED_PRECISION", "value": "bf16"}]


# Prefixes


@pytest.mark.parametrize(
    "prefix",
    [
        "timeout 3600",
        "timeout -k 30 --signal=TERM 1h",
        "stdbuf -oL",
        "stdbuf -o L",
        "tini --",
        "/usr/bin/tini -s -g --",
        "nice -n 10",
        "ionice -c 3",
        "env -u X A=b",
        "setsid nohup",
        "time -p",
        "exec timeout 9 nice",
    ],
)
def test_a_prefix_is_read_through(prefix):
    spec, _ = converted("bash", "-c", f"{prefix} torchrun a.py --x 1")
    assert spec["args"] == ["a.py", "--x", "1"]
    spec, _ = converted(*prefix.split(), "torchrun", "a.py")
    assert spec["args"] == ["a.py"]
    spec, _ = converted_script(f"srun {prefix} torchrun a.py")
    assert spec["args"] == ["a.py"]


@pytest.mark.parametrize(
    ("limit", "seconds"), [("3600", "3600"), ("90m", "5400"), ("2d", "172800")]
)
def test_the_limit_of_timeout_is_a_field(limit, seconds):
    _, comments = converted("timeout", "-k", "5", limit, "torchrun", "a.py")
    assert f'timeout: "-k 5 {limit}"' in comments
    assert f"instead: spec.activeDeadlineSeconds: {seconds}" in comments


def test_the_options_of_a_prefix_are_not_the_command():
    assert split_prefix(["timeout", "-s", "9", "5", "a", "-x"]) == (["-s", "9", "5"], ["a", "-x"])
    assert split_prefix(["tini", "--", "-x"]) == ([], ["-x"])
