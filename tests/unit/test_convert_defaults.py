"""`ddpjob convert`: variables that the command had from its surroundings, and those it lacks."""

import pytest
import yaml
from conversions import a_pytorchjob, convert, converted, converted_script

from ddpjob.cli.first_attempt import problem_of
from ddpjob.convert.expansions import without_defaults


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("${SET:-1} ${SET-1} ${SET:=1} ${OTHER:-1}", "${SET} ${SET} ${SET} ${OTHER:-1}"),
        ('"${SET:-"a b"}" \'${SET:-1}\' \\${SET:-1}', "\"${SET}\" '${SET:-1}' \\${SET:-1}"),
        ("${OTHER:-${SET:-1}}", "${OTHER:-${SET:-1}}"),
        ("${SET:-", "${SET:-"),
    ],
)
def test_a_default_of_a_variable_that_is_set_is_of_no_use(text, found):
    assert without_defaults(text, lambda name: name == "SET") == found


def test_a_default_counts_only_without_a_value_in_the_pods():
    env = [{"name": "N", "value": "8"}, {"name": "EMPTY", "value": ""}]
    env += [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
    text = "torchrun --nproc-per-node=${N:-1} a.py ${N:-1} ${EMPTY:-d} ${KEY:-d} ${OTHER:-d}"
    spec, _ = converted("bash", "-c", text, env=env)
    assert spec["nprocPerNode"] == 8
    assert spec["args"] == ["a.py", "$(N)", "d", "$(KEY)", "d"]


def test_a_default_does_not_hide_a_variable_of_another_operator():
    _, comments = converted("bash", "-c", "torchrun a.py ${WORLD_SIZE:-1} ${RANK:-0}")
    assert "WORLD_SIZE in args: nothing expands it" in comments
    assert "RANK in args: nothing expands it; instead: write $(DDP_NODE_INDEX)" in comments


def test_a_default_does_not_hide_a_variable_of_slurm_or_of_a_script():
    spec, comments = converted_script(
        "export SEED=42\nsrun torchrun a.py ${SEED:-0} ${SLURM_JOB_ID:-0} ${NAME:-d}"
    )
    assert spec["args"] == ["a.py", "$(SEED)", "${SLURM_JOB_ID}", "d"]
    assert "SLURM_JOB_ID in args" in comments


# Quotes in values


@pytest.mark.parametrize(
    ("lines", "args"),
    [
        ("A='--kw {\"x\":false}'; torchrun a.py $A", ["--kw", '{"x":false}']),
        ("A=\"--name 'my run'\"; torchrun a.py $A", ["--name", "'my", "run'"]),
        ("A='/data/my\\ data'; torchrun a.py $A", ["/data/my\\", "data"]),
        ('A="--name \'my run\'"; bash -c "torchrun a.py $A"', ["--name", "my run"]),
        ("A=\"--name 'my run'\"; eval torchrun a.py $A", ["--name", "my run"]),
    ],
)
def test_a_shell_only_splits_a_value_at_its_spaces(lines, args):
    spec, _ = converted("bash", "-c", lines)
    assert spec["args"] == ["a.py", *args]


# Variables that nothing sets


def test_a_variable_of_the_setup_that_nothing_sets_is_noted():
    text = (
        "D=x; pip install --target $SCRATCH/pk $D $HOME ${E:-f}; awk '$NF'; "
        'for F in a; do make "$F"; done; torchrun a.py'
    )
    _, comments = converted("bash", "-c", text)
    assert "SCRATCH in setup: nothing sets it; instead: set SCRATCH in spec.env" in comments
    assert comments.count("in setup: nothing sets it") == 1


def test_a_variable_of_the_setup_may_be_of_a_config_map():
    spec, comments = converted(
        "bash", "-c", "make $X; torchrun a.py", envFrom=[{"configMapRef": {"name": "c"}}]
    )
    assert spec["setup"] == "make $X"
    assert "in setup" not in comments


def test_a_command_that_is_not_known_is_dropped():
    spec, comments = converted("bash", "-c", "$WITH_CONDA; A=make; $A b; torchrun a.py")
    assert spec["setup"] == "A=make\n$A b"
    assert '"$WITH_CONDA": because its command is not known' in comments


@pytest.mark.parametrize(
    "text",
    [
        "cat > c <<'E'\nx\nE\nfor G in a; do make $G; done",
        "while IFS=, read -r A B; do make $B $RANDOM; done < f",
        "mapfile -t L < f; make $L",
        "bash -ec 'make a'\ncat > x <<'E'\nit's $X\nE",
    ],
)
def test_a_variable_that_the_setup_sets_is_not_noted(text):
    _, comments = converted("bash", "-c", f"{text}\ntorchrun a.py")
    assert "in setup: nothing sets it" not in comments


def test_a_command_in_a_variable_stays_if_the_setup_or_the_pods_have_it():
    lines = "PY=$(command -v python3); $PY -m pip install x; $SUDO apt-get update; $RUN"
    spec, _ = converted(
        "bash", "-c", f"{lines}; torchrun a.py", env=[{"name": "RUN", "value": "make b"}]
    )
    setup = spec["setup"].splitlines()
    assert setup[1:] == ["$PY -m pip install x", "$SUDO apt-get update", "$RUN"]


# Variables that Slurm and other operators may have set


def test_a_default_counts_for_a_variable_that_is_not_always_set():
    spec, _ = converted_script(
        "export N=${SLURM_CPUS_PER_TASK:-8}\n"
        "srun torchrun --nproc-per-node=${SLURM_GPUS_ON_NODE:-4} a.py ${SLURM_ARRAY_TASK_ID:-1}"
    )
    assert (spec["env"], spec["nprocPerNode"]) == ([{"name": "N", "value": "8"}], 4)
    assert spec["args"] == ["a.py", "1"]
    spec, _ = converted("bash", "-c", "torchrun --max-restarts=${PET_MAX_RESTARTS:-3} a.py")
    assert spec["failurePolicy"] == {"maxRestarts": 3}


def test_a_number_of_restarts_without_a_known_value_is_dropped():
    env = [{"name": "MR", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
    spec, comments = converted("bash", "-c", "torchrun --max-restarts=${MR:-3} a.py", env=env)
    assert "failurePolicy" not in spec
    assert "its value is not known; instead: failurePolicy.maxRestarts" in comments


def test_the_last_value_of_a_variable_decides_about_a_default():
    env = [{"name": "D", "value": "1"}, {"name": "D", "value": ""}, {"name": "N"}]
    spec, _ = converted("bash", "-c", "A=(${D:-x}); torchrun a.py ${A[@]} ${N:-y}", env=env)
    assert spec["args"] == ["a.py", "x", "y"]


# The GPU and the number of a task


@pytest.mark.parametrize(
    "line",
    [
        "export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID\nsrun python a.py",
        "srun --gpu-bind=map_gpu:0,1 python a.py",
    ],
)
def test_a_task_had_a_gpu_of_its_own(line):
    _, comments = converted_script(line)
    assert "choose the one of LOCAL_RANK in the script" in comments
    assert "in spec.env" not in comments


def test_the_number_of_a_task_is_that_of_a_node_if_each_has_one():
    _, comments = converted_script("srun torchrun --nnodes=2 a.py $SLURM_PROCID")
    assert "SLURM_PROCID in args: nothing expands it; instead: write $(DDP_NODE_INDEX)" in comments
    _, comments = converted_script("srun python a.py $SLURM_PROCID")
    assert 'read os.environ["RANK"] in the script' in comments
    assert "DDP_NODE_INDEX" not in comments


def test_a_block_sets_no_variable_of_torchrun():
    _, comments = converted_script(
        "if true; then export MASTER_ADDR=a; export B=1; fi\nsrun torchrun a.py"
    )
    assert "MASTER_ADDR: torchrun sets it for each process" in comments
    assert "set MASTER_ADDR in spec.env" not in comments
    assert "set B in spec.env" in comments


# The text of a shell


def test_a_build_before_the_training_does_not_hide_it():
    spec, _ = converted_script("srun bash -c 'python setup.py install && torchrun a.py'")
    assert spec["setup"] == "python setup.py install"
    assert spec["args"] == ["a.py"]


@pytest.mark.parametrize(
    "line",
    [
        "L='python -m torch.distributed.run'\nC='a.py'\nsrun bash -c '$L $C'",
        "srun bash -c 'export L=\"torchrun --nnodes=2\"; $L a.py'",
        "srun bash -c 'PY=python3; $PY -m pip install x; ${PY} a.py'",
        "srun -c 8 python a.py -c conf --launcher /usr/bin/bash",
    ],
)
def test_a_training_is_found_in_variables_and_behind_other_options(line):
    spec, _ = converted_script(line)
    assert spec["args"][0] == "a.py"


def test_a_step_within_the_text_of_a_shell_is_no_setup():
    spec, comments = converted_script('srun bash -c "srun hostname; torchrun a.py"')
    assert "setup" not in spec
    assert '"srun hostname": because it is a step beside the training' in comments


def test_a_binding_to_no_gpu_is_none():
    _, comments = converted_script("srun --gpu-bind=none python a.py")
    assert "cuda:0" not in comments


def test_a_file_of_variables_is_no_volume():
    _, comments = converted_script(
        "srun apptainer exec --env-file e.list docker://i:1 torchrun a.py"
    )
    assert '--env-file: "e.list": because its lines are not here; instead: spec.env' in comments


# Whole manifests


def test_an_annotation_that_only_a_jobset_has_is_dropped():
    job = yaml.safe_load(a_pytorchjob())
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    job["metadata"]["annotations"] = {key: "rack", "mine": "kept"}
    found = convert(yaml.safe_dump(job))
    assert found.document["metadata"]["annotations"] == {"mine": "kept"}
    assert "instead: scheduling.topology" in found.comments()


@pytest.mark.parametrize(
    ("scheduler", "is_noted"),
    [("volcano", False), ("scheduler-plugins-scheduler", True), ("", True)],
)
def test_a_queue_of_volcano_is_noted_unless_volcano_schedules_the_pods(scheduler, is_noted):
    job = yaml.safe_load(a_pytorchjob())
    job["spec"]["runPolicy"] = {"schedulingPolicy": {"queue": "q"}}
    for role in job["spec"]["pytorchReplicaSpecs"].values():
        role["template"]["spec"] |= {"schedulerName": scheduler} if scheduler else {}
    comments = convert(yaml.safe_dump(job)).comments()
    assert ("set scheduling: {gang: Volcano} too" in comments) is is_noted


def test_another_training_in_the_file_is_no_other_object():
    others = [{"apiVersion": "v2beta1", "kind": kind} for kind in ("MPIJob", "Service")]
    texts = [
        a_pytorchjob(),
        *(yaml.safe_dump({**one, "metadata": {"name": "b"}}) for one in others),
    ]
    comments = convert("---\n".join(texts)).comments()
    assert "MPIJob b: because it is a training of a kind that ddpjob convert does not" in comments
    assert "Service b: because it is no training and stays as it is" in comments


def test_a_mount_without_its_volume_is_dropped():
    mounts = [{"name": "claims", "mountPath": "/c"}, {"name": "own", "mountPath": "/o"}]
    job = yaml.safe_load(a_pytorchjob(volumeMounts=mounts))
    for role in job["spec"]["pytorchReplicaSpecs"].values():
        role["template"]["spec"]["volumes"] = [{"name": "own", "emptyDir": {}}]
    found = convert(yaml.safe_dump(job))
    assert problem_of(found.document) == ""
    assert found.document["spec"]["volumeMounts"] == [mounts[1]]
    assert "the mount at /c" in found.comments()
