"""`ddpjob convert`: the programs before torchrun, python or a script."""

import pytest
from conversions import a_script, convert, converted, converted_script

from ddpjob.convert.launchers import ACCELERATE_SWITCHES, DEEPSPEED_SWITCHES
from ddpjob.convert.programs import split_prefix
from ddpjob.core.api.readers import SpecError

GPU = "nvidia.com/gpu"


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


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ("--include localhost:0,1", 2),
        ("-i a:0,2,3@b:1,2,3", 3),
        ("--include a:0,1@a:2,3", 4),
        ("--include a:0,1@b:0", None),
        ("--include a@b", None),
        ("--elastic_training --min_elastic_nodes 1 --num_gpus 4", 4),
        ("--a-new-switch --num_gpus 4", 4),
        ("--num-gpus 4", 4),
    ],
)
def test_the_processes_of_deepspeed_are_its_slots_on_each_node(flags, processes):
    spec, _ = converted("deepspeed", *flags.split(), "a.py", resources={"limits": {GPU: 4}})
    assert spec.get("nprocPerNode") == processes


def test_the_module_of_deepspeed_is_deepspeed():
    spec, _ = converted("python", "-m", "deepspeed.launcher.runner", "--num_gpus", "4", "a.py")
    assert (spec["args"], spec["nprocPerNode"]) == (["a.py"], 4)


def test_accelerate_gives_flags_to_torchrun():
    conf = "rdzv_endpoint=a:1,timeout=9"
    flags = f"--max_restarts 3 --monitor-interval 5 --rdzv_backend c10d --tee 3 --rdzv_conf {conf}"
    spec, comments = converted("accelerate", "launch", *flags.split(), "a.py")
    assert spec["failurePolicy"] == {"maxRestarts": 3}
    args = ["--monitor-interval", "5"]
    assert spec["torchrun"] == {"args": args, "rdzvConf": {"timeout": 9}}
    assert '--rdzv-conf rdzv_endpoint: "a:1": because the operator sets' in comments
    assert '["--rdzv_backend c10d"]' in comments
    assert '--tee: "3"' in comments


def test_an_empty_value_of_a_flag_is_a_value():
    flags = ("--machine_rank", "", "--num_processes", "4")
    spec, _ = converted("accelerate", "launch", *flags, "a.py")
    assert (spec["args"], spec["nprocPerNode"]) == (["a.py"], 4)


def test_deepspeed_gave_each_process_an_argument():
    assert "the argument --local_rank" in converted("deepspeed", "a.py")[1]
    assert "the argument" not in converted("deepspeed", "--no_local_rank", "a.py")[1]


@pytest.mark.parametrize(
    ("command", "starts"),
    [
        ("deepspeed a.py", "started deepspeed once"),
        ("accelerate launch a.py", "started accelerate once"),
        ("torchrun a.py", "started torchrun once"),
        ("deepspeed --hostfile h --no_ssh a.py", "started deepspeed once"),
        ("deepspeed --hostfile h a.py", ""),
        ("deepspeed --num_nodes 2 a.py", ""),
        ("deepspeed --include a:0@b:1 a.py", ""),
        ("accelerate launch --num_machines 2 a.py", "started accelerate once"),
        ("accelerate launch --use_deepspeed --deepspeed_hostfile h a.py", ""),
    ],
)
def test_without_srun_a_launcher_starts_on_one_node_unless_it_knows_the_others(command, starts):
    _, comments = converted_script("#SBATCH --nodes=2", command)
    assert starts in comments
    assert ("once, on the first" in comments) == bool(starts)


@pytest.mark.parametrize(
    ("command", "trains_alone"),
    [
        ("accelerate launch a.py", "accelerate trained on each of the 2 nodes by itself"),
        ("accelerate launch --num_machines 2 a.py", ""),
        ("accelerate launch --num_machines $N a.py", ""),
        ("accelerate launch --config_file c.yaml a.py", ""),
        ("deepspeed a.py", "deepspeed trained on each of the 2 nodes by itself"),
        ("deepspeed --num_nodes 2 --no_ssh a.py", ""),
    ],
)
def test_a_launcher_of_one_node_under_srun_trains_on_each_by_itself(command, trains_alone):
    _, comments = converted_script("#SBATCH --nodes=2", f"srun {command}")
    assert trains_alone in comments
    assert ("by itself" in comments) == bool(trains_alone)


def test_variables_of_torchrun_are_read_as_its_flags():
    lines = ["export PET_NNODES=$SLURM_NNODES", "export PET_RDZV_ID=7", "PET_NPROC_PER_NODE=4"]
    command = "PET_MODULE=1 PET_NO_PYTHON=0 srun torchrun a"
    spec, comments = converted_script(
        "#SBATCH --nodes=2", *lines, "export PET_NPROC_PER_NODE", command
    )
    assert (spec["nodes"], spec["nprocPerNode"], spec["args"]) == (2, 4, ["-m", "a"])
    assert "torchrun" not in spec
    assert "by itself" not in comments
    assert "note: the script: line 3 PET_NNODES: torchrun took it for its flag --nnodes" in comments
    assert 'flags of torchrun: ["--rdzv-id 7"]' in comments


@pytest.mark.parametrize(
    ("lines", "remark"),
    [
        # torchrun does not get it.
        (["PET_NPROC_PER_NODE=$N"], ""),
        (["PET_NPROC_PER_NODE=4"], ""),
        (["export PET_NPROC_PER_NODE=4", "unset PET_NPROC_PER_NODE"], ""),
        (
            ["export PET_NPROC_PER_NODE=4", "export PET_NPROC_PER_NODE=$(nproc)"],
            'line 3 PET_NPROC_PER_NODE: "$(nproc)": because torchrun takes it for a flag, and the '
            "operator gives the flags; instead: set spec.nprocPerNode",
        ),
    ],
)
def test_a_variable_without_a_value_for_torchrun_is_no_flag(lines, remark):
    spec, comments = converted_script(*lines, "srun torchrun a.py")
    assert "nprocPerNode" not in spec
    assert remark in comments


@pytest.mark.parametrize(
    "command",
    [
        "srun env PET_NPROC_PER_NODE=2 PET_NNODES=2 torchrun a.py",
        "srun singularity exec --env PET_NPROC_PER_NODE=2,PET_NNODES=2 a.sif torchrun a.py",
        "PET_NPROC_PER_NODE=2 PET_NNODES=2 srun torchrun a.py",
    ],
)
def test_a_variable_of_torchrun_may_be_given_to_the_command(command):
    spec, comments = converted_script("#SBATCH --nodes=2", command)
    assert spec["nprocPerNode"] == 2
    assert "by itself" not in comments


def test_an_unknown_number_of_nodes_in_a_variable_is_a_number_of_nodes():
    lines = ("#SBATCH --nodes=2", "export PET_NNODES=$(wc -l)", "srun torchrun a.py")
    assert "by itself" not in converted_script(*lines)[1]


def test_a_flag_of_torchrun_comes_before_its_variable():
    spec, comments = converted_script(
        "export PET_NPROC_PER_NODE=4", "torchrun --nproc-per-node=2 a.py"
    )
    assert spec["nprocPerNode"] == 2
    assert 'dropped: the script: line 2 PET_NPROC_PER_NODE: "4"' in comments


def test_variables_of_torchrun_have_no_use_for_python():
    spec, comments = converted_script("export PET_NPROC_PER_NODE=4", "srun python a.py")
    assert spec["nprocPerNode"] == 1
    assert "dropped: the script: line 2 PET_NPROC_PER_NODE" in comments


@pytest.mark.parametrize("value", [{"value": "8"}, {"valueFrom": {"fieldRef": {"fieldPath": "x"}}}])
def test_a_variable_of_torchrun_in_a_pod_is_that_of_the_other_operator(value):
    # The operator of a PyTorchJob adds its own ones after those of the user.
    env = [{"name": name, **value} for name in ("PET_NPROC_PER_NODE", "PET_MAX_RESTARTS")]
    spec, comments = converted("torchrun", "a.py", env=env, spec={"nprocPerNode": "4"})
    assert spec["nprocPerNode"] == 4
    assert comments.count("because torchrun takes it for a flag") == 2
    assert "instead: set spec.failurePolicy.maxRestarts" in comments


def test_options_of_a_container_also_come_before_exec():
    command = "singularity -q -c s.conf exec -c --nv a.sif torchrun a.py"
    spec, comments = converted_script(command)
    assert spec["args"] == ["a.py"]
    assert '["-q", "-c s.conf", "-c"]' in comments


@pytest.mark.parametrize(
    ("image", "taken"),
    [
        ("docker://pytorch/pytorch:2.9", "pytorch/pytorch:2.9"),
        ("oras://ghcr.io/org/img:1", None),
        ("$SIF", None),
        ("sandbox/pytorch", None),
        ("a.sif", None),
    ],
)
def test_an_image_of_a_container_is_one_of_a_registry(image, taken):
    script = a_script(f"srun singularity exec --nv {image} torchrun a.py")
    if taken:
        assert convert(script).document["spec"]["image"] == taken
        return
    with pytest.raises(SpecError, match="give --image IMAGE"):
        convert(script)
    assert "it is no image of a registry" in convert(script, image="i").comments()


@pytest.mark.parametrize(
    "image", ["docker://$oauthtoken@nvcr.io#nvidia/pytorch:24.01", "nvcr.io#nvidia/pytorch:24.01"]
)
def test_the_image_of_enroot_has_no_user(image):
    script = a_script(f"srun --container-image='{image}' torchrun a.py")
    assert convert(script).document["spec"]["image"] == "nvcr.io/nvidia/pytorch:24.01"


def test_gpus_of_amd_are_named():
    _, comments = converted_script("srun singularity exec --rocm docker://r:1 python a.py")
    assert "amd.com/gpu in resources" in comments


@pytest.mark.parametrize("path", ["$(which torchrun)", "`command -v torchrun`", "/opt/torchrun"])
def test_torchrun_may_be_a_script_of_python(path):
    spec, _ = converted_script(f"srun python -u {path} --nproc_per_node 8 a.py --x 1")
    assert (spec["args"], spec["nprocPerNode"]) == (["a.py", "--x", "1"], 8)


def test_a_job_without_requeueing_has_the_restarts_of_torchrun():
    lines = ("#SBATCH --no-requeue", "srun torchrun --max_restarts 3 a.py")
    spec, _ = converted_script(*lines)
    assert spec["failurePolicy"] == {"maxRestarts": 3, "maxDisruptions": 0}
    spec, _ = converted_script(lines[0], "srun torchrun a.py")
    assert spec["failurePolicy"] == {"maxRestarts": 0, "maxDisruptions": 0}


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


def test_shifter_runs_the_training_in_an_image():
    command = "srun shifter --image=docker:a/b:1 --module=gpu,nccl-plugin -V /x:/y"
    for start in ("torchrun --nnodes 2 a.py", 'bash -c "torchrun --nnodes 2 a.py"'):
        found = convert(a_script("#SBATCH --nodes=2", f"{command} {start}"))
        assert found.document["spec"]["args"] == ["a.py"]
        assert found.document["spec"]["image"] == "a/b:1"
        assert '["--module gpu,nccl-plugin", "-V /x:/y"]' in found.comments()


def test_a_step_with_an_unknown_program_is_an_error_with_its_line():
    with pytest.raises(SpecError, match="line 3: srun starts a program that ddpjob convert does"):
        converted_script("echo", "srun tune run --nnodes 2 recipe")
