"""`ddpjob convert`: options of sbatch and srun, and what the script gets from them."""

import pytest
from conversions import a_script, convert, converted_script

from ddpjob.convert.slurm_options import OPTIONS
from ddpjob.core.api.readers import SpecError


@pytest.mark.parametrize("number", ["$N", "two", "{{ n }}", "gpu:2"])
@pytest.mark.parametrize("option", ["nodes", "ntasks", "cpus-per-task", "ntasks-per-node"])
def test_a_number_that_is_not_one_is_an_error(option, number):
    with pytest.raises(SpecError, match=f"line 2: #SBATCH --{option}: must be a number, got"):
        convert(a_script(f"#SBATCH --{option}={number}", "srun python a.py"), image="i")


@pytest.mark.parametrize("option", ["--gpus-per-node=$G", "--gres=gpu:$G", "--gpus={{ g }}"])
def test_a_variable_is_no_number_of_gpus(option):
    with pytest.raises(SpecError, match="must be a number"):
        convert(a_script(f"#SBATCH {option}", "srun python a.py"), image="i")


def test_an_unknown_number_of_a_step_is_a_remark():
    spec, comments = converted_script("#SBATCH -N 2", "srun -N $X -n$(x y) torchrun a.py")
    assert spec["nodes"] == 2
    assert 'srun --nodes: "$X": because only a shell knows the value' in comments
    assert 'srun --ntasks: "$(x y)": because only a shell knows the value' in comments


@pytest.mark.parametrize(
    ("options", "memory"),
    [
        ("--mem-per-cpu=4G", "4Gi"),
        ("--mem-per-cpu=4G --ntasks-per-node=2", "8Gi"),
        ("--mem-per-cpu=4G -c 8", "32Gi"),
        ("--mem-per-cpu=4G --ntasks-per-node=2 -c 8", "64Gi"),
    ],
)
def test_a_task_has_one_cpu_by_default(options, memory):
    spec, _ = converted_script(f"#SBATCH {options}", "srun torchrun a.py")
    assert spec["resources"]["limits"] == {"memory": memory}


def test_the_memory_of_no_gpu_is_named():
    _, comments = converted_script("#SBATCH --mem-per-gpu=4G", "srun torchrun a.py")
    assert "--mem-per-gpu" in comments


@pytest.mark.parametrize(
    "options",
    ["-v", "-vv", "-Q", "--no-kill", "-lu", "-K0", "-k", "--quiet -E", "--exact", "-c 4 -Q", "-Z"],
)
@pytest.mark.parametrize("start", ["uv run python", "numactl -N 0 python", "timeout 9 python"])
def test_a_switch_of_srun_takes_no_value(options, start):
    spec, comments = converted_script(f"srun {options} {start} a.py --x 1")
    assert spec["args"] == ["a.py", "--x", "1"]
    assert "unknown option" not in comments


def test_an_option_takes_no_other_option_as_its_value():
    spec, _ = converted_script("#SBATCH -W --mem=1G", "srun torchrun a.py")
    assert spec["resources"]["limits"] == {"memory": "1Gi"}


@pytest.mark.parametrize("command", ["python a.py", "torchrun a.py"])
def test_a_command_without_srun_is_on_the_first_node(command):
    _, comments = converted_script("#SBATCH -N 2 --gpus-per-node=4", command)
    assert "on the first of 2 nodes" in comments
    _, comments = converted_script("#SBATCH -N 1 --gpus-per-node=4", command)
    assert "on the first of" not in comments
    _, comments = converted_script("#SBATCH -N 2 --gpus-per-node=4", f"srun {command}")
    assert "on the first of" not in comments


def test_the_script_gets_the_name_as_written():
    lines = (
        "#SBATCH -J GPT_Run",
        "export RUN=$SLURM_JOB_NAME",
        "srun torchrun a.py $SLURM_JOB_NAME",
    )
    found = convert(a_script(*lines), image="i")
    assert found.document["metadata"]["name"] == "gpt-run"
    assert found.document["spec"]["args"] == ["a.py", "GPT_Run"]
    assert found.document["spec"]["env"] == [{"name": "RUN", "value": "GPT_Run"}]


def test_a_variable_of_an_option_is_set():
    spec, comments = converted_script(
        "#SBATCH --export=ALL,A=1", "B=2", "srun --export=ALL,B=$B,C,D=$E,RANK=1 torchrun a.py"
    )
    assert spec["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    assert 'srun --export: "ALL,C,D=$E": because pods have only the variables' in comments
    assert 'srun --export RANK: "1": because torchrun sets it' in comments


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_an_option_leaves_a_field_or_a_remark(name):
    option = f"{name}=5" if OPTIONS[name].takes_value else name
    lines = ("#SBATCH -N 2 --gpus-per-node=2", "srun torchrun a.py")
    with_it = convert(a_script(f"#SBATCH {option}", *lines), image="i")
    without = convert(a_script("#SBATCH", *lines), image="i")
    assert (with_it.document, with_it.comments()) != (without.document, without.comments())


@pytest.mark.parametrize("option", ["-M a", "--tmp=1G", "--threads-per-core=1", "--mincpus 4"])
def test_a_rare_option_of_slurm_is_known(option):
    _, comments = converted_script(f"#SBATCH {option}", "srun torchrun a.py")
    assert "dropped: line 2: #SBATCH --" in comments
    assert "unknown option" not in comments


def test_the_last_of_equal_options_counts():
    spec, comments = converted_script("#SBATCH -N 2", "#SBATCH --nodes=4", "srun torchrun a.py")
    assert spec["nodes"] == 4
    assert (
        'line 2: #SBATCH --nodes: "2": because line 3: #SBATCH --nodes is "4", and counts'
        in comments
    )


def test_numbers_of_gpus_that_do_not_agree_are_named():
    _, comments = converted_script("#SBATCH -N 2 --gpus-per-node=4 -G 6", "srun torchrun a.py")
    assert "the GPUs per job: 6: because the other options give each node 4 GPUs" in comments
    _, comments = converted_script("#SBATCH -N 2 --gpus-per-node=4 -G 8", "srun torchrun a.py")
    assert "GPUs per" not in comments


@pytest.mark.parametrize("command", ["-l torchrun a.py", "torchrun a.py", "-l $RUN a.py"])
def test_an_unknown_variable_among_the_options_of_srun_is_dropped(command):
    lines = ("RUN=torchrun", 'A=""', "if x; then", "A=--auto-resume=1", "fi")
    spec, comments = converted_script(*lines, f"srun ${{A}} {command}")
    assert spec["args"] == ["a.py"]
    assert 'dropped: the script: srun: "${A}": because its value is not known' in comments


def test_the_folder_of_the_call_is_no_working_directory():
    spec, comments = converted_script("srun --container-workdir=$PWD torchrun a.py")
    assert "podTemplate" not in spec
    assert "srun --container-workdir" in comments
    spec, _ = converted_script("srun --container-workdir=/app torchrun a.py")
    assert spec["podTemplate"]["spec"]["containers"][0]["workingDir"] == "/app"


def test_the_beginning_of_one_option_is_its_name():
    lines = ("#SBATCH --out=a --err b --ntasks-per-n 2 --mem-p 1G", "srun python a.py")
    spec, comments = converted_script(*lines)
    assert spec["nprocPerNode"] == 2
    assert '#SBATCH --output: "a"' in comments
    assert '#SBATCH --error: "b"' in comments
    # It could be --mem-per-cpu or --mem-per-gpu.
    assert '#SBATCH --mem-p: "1G": because it is an unknown option' in comments


@pytest.mark.parametrize("option", ["--bcast", "--nice", "--exclusive", "--pty", "--immediate"])
def test_a_value_that_may_be_left_out_is_not_the_next_word(option):
    spec, _ = converted_script(f"srun {option} torchrun a.py")
    assert spec["args"] == ["a.py"]
    spec, comments = converted_script(f"srun {option}=user torchrun a.py")
    assert spec["args"] == ["a.py"]
    assert '"user": because' in comments


def test_an_option_of_srun_counts_before_that_of_sbatch():
    lines = (
        "#SBATCH -J big --ntasks-per-node=8 -N 4",
        "srun -J step --ntasks-per-node=2 python a.py",
    )
    found = convert(a_script(*lines), image="i")
    comments = found.comments()
    assert found.document["metadata"]["name"] == "big"
    assert found.document["spec"]["nprocPerNode"] == 2
    assert 'srun --job-name: "step": because it is the name of a step' in comments
    assert '"big"' not in comments
    assert 'line 2: #SBATCH --ntasks-per-node: "8": because the script: srun' in comments


def test_one_option_for_the_memory_counts():
    spec, comments = converted_script(
        "#SBATCH --mem=100G -c 4", "srun --mem-per-cpu=2G torchrun a.py"
    )
    assert spec["resources"]["limits"] == {"memory": "8Gi"}
    assert 'line 2: #SBATCH --mem: "100G": because the script: srun --mem-per-cpu' in comments


@pytest.mark.parametrize("word", ["hetjob", "packjob"])
def test_a_job_of_several_parts_is_an_error(word):
    with pytest.raises(SpecError, match=f"line 3: #SBATCH {word}: the job has parts of different"):
        convert(a_script("#SBATCH -N 1", f"#SBATCH {word}", "srun torchrun a.py"), image="i")


def test_letters_of_options_stand_together():
    spec, _ = converted_script("srun -lN2 torchrun a.py")
    assert spec["nodes"] == 2


def test_wait_has_another_meaning_for_sbatch_and_srun():
    _, comments = converted_script("#SBATCH --wait", "srun --wait=60 torchrun a.py")
    assert "instead: ddpjob wait" in comments
    assert 'srun --wait: "60": because the ranks of a DDPJob end together' in comments


@pytest.mark.parametrize(
    ("options", "step", "processes"),
    [
        ("--nodes=1 --ntasks-per-node=4", "-n 1", 1),
        ("--nodes=2 --ntasks=2 --ntasks-per-node=8", "", 1),
        ("--nodes=2 --ntasks=8 --ntasks-per-node=4", "", 4),
    ],
)
def test_the_tasks_of_the_job_come_before_those_of_a_node(options, step, processes):
    spec, _ = converted_script(f"#SBATCH {options}", f"srun {step} python a.py")
    assert spec["nprocPerNode"] == processes


def test_tasks_that_are_not_equal_on_the_nodes_are_named():
    _, comments = converted_script("#SBATCH --nodes=2", "srun -n 3 python a.py")
    assert "Slurm started 3 tasks; 2 nodes with 2 processes each start 4" in comments


def test_gpus_of_amd_are_named():
    _, comments = converted_script("#SBATCH --gpus-per-node=mi250:8", "srun python a.py")
    assert "amd.com/gpu" in comments


@pytest.mark.parametrize("line", ["singularity exec --nv x.sif", "env CUDA_VISIBLE_DEVICES=0"])
def test_a_use_of_gpus_without_a_request_is_named(line):
    training = f"srun {line} torchrun --nproc-per-node 2 a.py"
    _, comments = converted_script(training)
    assert "none of them requests GPUs" in comments.splitlines()[1]
    _, comments = converted_script("#SBATCH --gres=gpu:2", training)
    assert "none of them" not in comments
    assert "--nv" not in comments


def test_a_gpu_of_each_task_is_noted():
    _, comments = converted_script("#SBATCH -n 2 --gpus-per-task=1", "srun python a.py")
    assert "a task had only its own GPU" in comments


def test_options_of_a_container_are_read():
    container = "singularity exec --nv --overlay o.ext3:ro --env A=1,B=2 --pwd /w x.sif"
    spec, comments = converted_script(f"srun {container} torchrun a.py")
    assert spec["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    assert spec["podTemplate"]["spec"]["containers"][0]["workingDir"] == "/w"
    assert "--overlay o.ext3:ro" in comments


def converted_accelerate(flags, nodes):
    options = f"#SBATCH --nodes={nodes} --gres=gpu:8"
    return converted_script(options, f"srun accelerate launch {flags} a.py")


@pytest.mark.parametrize(
    ("flags", "nodes"),
    [
        ("--num_processes 4", 1),
        ("--num_processes $((4 * SLURM_NNODES)) --num_machines $SLURM_NNODES", 2),
    ],
)
def test_the_processes_of_accelerate_are_those_of_all_machines(flags, nodes):
    spec, comments = converted_accelerate(flags, nodes)
    assert (spec["nodes"], spec["nprocPerNode"]) == (nodes, 4)
    assert "--num_processes" not in comments


@pytest.mark.parametrize("processes", ["3", "$N"])
def test_processes_of_accelerate_without_a_number_for_each_node_are_named(processes):
    spec, comments = converted_accelerate(f"--num_processes {processes} --num_machines 2", 2)
    assert "nprocPerNode" not in spec
    assert f'--num_processes: "{processes}": because' in comments


@pytest.mark.parametrize("flags", ["", "--standalone", "--nnodes=1"])
def test_a_training_of_each_node_is_named(flags):
    training = f"srun torchrun {flags} a.py"
    _, comments = converted_script("#SBATCH --nodes=2", training)
    assert "torchrun trained on each of the 2 nodes by itself" in comments.splitlines()[1]
    _, comments = converted_script("#SBATCH --nodes=2", "srun torchrun --nnodes=2 a.py")
    assert "by itself" not in comments
