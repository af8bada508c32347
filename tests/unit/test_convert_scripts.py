"""`ddpjob convert`: the shell text of a manifest, and the lines of a script for Slurm."""

import subprocess

import pytest
from conversions import a_script, comments_of, convert, converted, converted_script, spec_of

from ddpjob.convert.bash import bash_syntax
from ddpjob.convert.here_documents import rewrite
from ddpjob.convert.sbatch import split_directive
from ddpjob.convert.shell import expand

# A command in a here-document, with quotes and a variable.
TEXT = ("torchrun --nproc-per-node 2 \\", '  train.py --lr $LR --name "a b" c\\"d')

# Options of Slurm


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "--image=nvcr.io#nvidia/pytorch:1 --time=1",
            ["--image=nvcr.io#nvidia/pytorch:1", "--time=1"],
        ),
        ("--comment=a#1 --mem=1G # why", ["--comment=a#1", "--mem=1G"]),
        ("--comment='a # b' --mem=1G", ["--comment=a # b", "--mem=1G"]),
        ('--comment="a \\" # b" -N 2#', ['--comment=a " # b', "-N", "2#"]),
        ("#--mem=1G", []),
        ("--mem=1G\t#x", ["--mem=1G"]),
    ],
)
def test_a_comment_of_a_directive_begins_with_a_word(line, words):
    assert split_directive(line) == words


def test_a_number_sign_in_an_option_hides_no_further_option():
    lines = (
        "#SBATCH --container-image=nvcr.io#nvidia/pytorch:24.05-py3 --time=1:00:00",
        "#SBATCH --comment=ticket#12 --mem=64G",
    )
    spec = convert(a_script(*lines, "srun torchrun a.py")).document["spec"]
    assert spec["image"] == "nvcr.io/nvidia/pytorch:24.05-py3"
    assert spec["activeDeadlineSeconds"] == 3600
    assert spec["resources"]["limits"] == {"memory": "64Gi"}


@pytest.mark.parametrize(
    "lines",
    [
        ("cd .", "#SBATCH --nodes=4", "srun torchrun a.py"),
        ("srun torchrun a.py", "#SBATCH --nodes=4"),
        ("  #SBATCH --nodes=4", "srun torchrun a.py"),
    ],
)
def test_a_directive_that_slurm_ignores_is_ignored_and_named(lines):
    spec, comments = converted_script("#SBATCH --mem=1G", "", "# text", *lines)
    assert spec["nodes"] == 1
    assert '#SBATCH: "--nodes=4": because Slurm ignores' in comments


def test_tasks_per_gpu_are_processes_and_have_their_cpus():
    size = "#SBATCH --gpus-per-node=4 --ntasks-per-gpu=1 --cpus-per-task=8"
    spec, _ = converted_script(size, "srun python a.py")
    assert spec["nprocPerNode"] == 4
    assert spec["resources"]["requests"] == {"cpu": "32"}


@pytest.mark.parametrize(
    ("size", "nodes", "gpus", "processes"),
    [
        ("--nodes=2 --gpus=8 --ntasks-per-gpu=2", 2, 4, 8),
        ("--nodes=2 --ntasks=8 --ntasks-per-gpu=2", 2, 2, 4),
        ("--nodes=2 --ntasks-per-node=4 --gpus-per-task=1", 2, 4, 4),
        ("--ntasks=8 --ntasks-per-node=4 --gres=gpu:4", 2, 4, 4),
        ("--gres=gpu:2,gpu:a100:2 --ntasks-per-gpu=1", 1, 4, 4),
    ],
)
def test_tasks_and_gpus_follow_from_each_other(size, nodes, gpus, processes):
    spec, _ = converted_script(f"#SBATCH {size}", "srun python a.py")
    assert (spec["nodes"], spec["nprocPerNode"]) == (nodes, processes)
    assert spec["resources"]["limits"] == {"nvidia.com/gpu": gpus}


@pytest.mark.parametrize(
    ("option", "gpus"),
    [
        ("--gres=gpu:2,gpu:a100:2", 4),
        ("--gres=gpu:a100:2(S:0-1),gpu:2(S:0,1)", 4),
        ("--gres=gpu,nvme:1", 1),
        ("--gpus-per-node=a100:1,h100:3", 4),
        ("--gres=gpu:2 --gres=gpu:3", 3),
    ],
)
def test_gpus_of_several_kinds_are_counted_together(option, gpus):
    spec, _ = converted_script(f"#SBATCH {option}", "srun torchrun a.py")
    assert spec["resources"]["limits"] == {"nvidia.com/gpu": gpus}


def test_another_resource_whose_name_begins_with_gpu_is_no_gpu():
    spec, comments = converted_script("#SBATCH --gres=gpumem:40", "srun torchrun a.py")
    assert "resources" not in spec
    assert "gpumem:40" in comments


@pytest.mark.parametrize(
    "size", ["--ntasks-per-node=4", "--gres=gpu:4 --ntasks-per-gpu=1", "--ntasks=4"]
)
def test_several_torchruns_on_a_node_are_named(size):
    spec, comments = converted_script(f"#SBATCH --nodes=1 {size}", "srun torchrun a.py")
    assert "because torchrun starts the processes of a node" in comments
    assert "nprocPerNode" not in spec


# Folders


def test_a_folder_of_the_setup_is_entered_before_its_lines():
    text = (
        "git clone https://example.com/r.git repo && cd repo && pip install -r requirements.txt "
        "&& torchrun train.py"
    )
    spec, _ = converted("bash", "-c", text)
    assert spec["setup"].splitlines() == [
        "git clone https://example.com/r.git repo",
        "cd repo",
        "pip install -r requirements.txt",
    ]
    assert spec["args"] == ["repo/train.py"]


@pytest.mark.parametrize(
    ("text", "setup", "script"),
    [
        ("cd $X; pip install .; python a.py", "cd $X\npip install .", "$X/a.py"),
        (
            "make x; cd y; cd z; pip install .; python a.py",
            "make x\ncd y\ncd z\npip install .",
            "y/z/a.py",
        ),
        ("make x; cd y; python a.py", "make x", "y/a.py"),
        ("make x; cd y; make z; cd ..; python a.py", "make x\ncd y\nmake z", "a.py"),
        ("make x; cd /y; make z; python a.py", "make x\ncd /y\nmake z", "/y/a.py"),
        (
            "make x; pushd y; make z; popd; python a.py",
            "bash -ec 'make x\npushd y\nmake z'",
            "a.py",
        ),
        (
            "pushd /y; make z; popd; make x; python a.py",
            "bash -ec 'pushd /y\nmake z\npopd\nmake x'",
            "a.py",
        ),
        ("D=y; make x; cd $D && make z; python a.py", "make x\nD=y\ncd $D\nmake z", "y/a.py"),
        (
            "make x; cd y; make z; cd -; make a; python a.py",
            "make x\ncd y\nmake z\ncd -\nmake a",
            "a.py",
        ),
    ],
)
def test_the_setup_and_the_script_have_the_folder_of_the_shell(text, setup, script):
    spec, _ = converted("bash", "-c", text)
    assert spec["setup"] == setup
    assert spec["args"] == [script]


@pytest.mark.parametrize(
    ("text", "setup"),
    [
        ("V=$(cat v); pip install a==$V; torchrun a.py", "V=$(cat v)\npip install a==$V"),
        ("D=$(mktemp -d); cd $D; make x; torchrun /a.py", "D=$(mktemp -d)\ncd $D\nmake x"),
        (
            "export V=$(cat v); make $V; make $V; torchrun a.py",
            "export V=$(cat v)\nmake $V\nmake $V",
        ),
        ("V=$(cat v); make x; torchrun a.py", "make x"),
        ("V=1; make $V; V=2; make $V; torchrun a.py", "V=1\nmake $V\nV=2\nmake $V"),
        ("A=b; B=$A/c; make $B; torchrun a.py", "A=b\nB=$A/c\nmake $B"),
        (
            "i=0; while [ $i -lt 3 ]; do i=$((i+1)); done; torchrun a.py",
            "i=0\nwhile [ $i -lt 3 ]; do i=$((i+1)); done",
        ),
        ("make ${V:-1}; torchrun a.py", "make ${V:-1}"),
        ("A=(b c); make ${A[@]}; torchrun a.py", "bash -ec 'A=(b c)\nmake ${A[@]}'"),
    ],
)
def test_a_setup_has_the_variables_that_only_a_shell_knows(text, setup):
    spec, _ = converted("bash", "-c", text)
    assert spec["setup"] == setup


def test_a_script_of_slurm_may_install_in_a_folder_below_its_own():
    lines = ("cd $SLURM_SUBMIT_DIR/code", "pip install -r r.txt", "srun torchrun a.py")
    spec, _ = converted_script(*lines)
    assert spec["setup"] == "cd ./code\npip install -r r.txt"
    assert spec["args"] == ["code/a.py"]


# Variables set in a block


BLOCKS = ("if x; then A=2; fi", "for A in 1 2; do x; done", "while read -r A; do x; done < f")


@pytest.mark.parametrize("block", BLOCKS)
def test_a_variable_set_in_a_block_has_no_known_value_after_it(block):
    spec, comments = converted_script("A=1", block, "srun torchrun a.py --a=$A")
    assert spec["args"] == ["a.py", "--a=$A"]
    assert "A in args: nothing expands it" in comments


@pytest.mark.parametrize("block", ["(A=2)", "cat > f << EOF\nA=2\nEOF", "if x; then B=--A=2; fi"])
def test_a_block_without_an_assignment_changes_no_variable(block):
    spec, _ = converted_script("A=1", block, "srun torchrun a.py --a=$A")
    assert spec["args"] == ["a.py", "--a=1"]


def test_a_variable_of_the_pods_set_in_a_block_is_named():
    block = "if x; then A=2; export B=3; fi"
    _, comments = converted_script("export A=1", block, "srun torchrun a.py")
    assert 'A: the block may change it; the pods have "1"' in comments
    assert "B: the block may export it; the pods do not have it" in comments


def test_a_setup_defines_a_variable_before_and_in_a_block():
    block = "if x; then A=2; fi"
    spec, _ = converted("bash", "-c", f"A=1; {block}; make $A; torchrun a.py")
    assert spec["setup"] == f"A=1\n{block}\nmake $A"
    spec, _ = converted_script("A=1", block, "pip install a==$A", "srun torchrun a.py")
    assert spec["setup"] == f"A=1\n{block}\npip install a==$A"


def test_a_working_directory_is_not_entered_again():
    spec, _ = converted("bash", "-c", "cd /app && pip install . && cd sub && python a.py")
    assert spec["setup"] == "pip install ."
    (trainer,) = spec["podTemplate"]["spec"]["containers"]
    assert trainer["workingDir"] == "/app"
    assert spec["args"] == ["sub/a.py"]


# Syntax of bash


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[[ -f a ]] && b", "[["),
        ("if [[ -f a ]]; then b; fi", "[["),
        ("cat <<< x", "<<<"),
        ("diff <(a) b", "<("),
        ("A=(1 2)", "A=("),
        ("echo ${A[@]}", "${A["),
        ("echo ${A//x/y}", "${A/"),
        ("a &> log", "&>"),
        ("a |& b", "|&"),
        ("function f { a; }", "function"),
        ("for ((i=0; i<2; i++)); do a; done", "(("),
        ("if a; then source b; fi", "source"),
        ("echo {1..3}", "{1..3}"),
        ("[ a == b ]", "=="),
        ("set -o pipefail", "pipefail"),
        # These are in every shell.
        ("sed 's/[[:space:]]//' a", ""),
        ("a=$((1 + (2)))", ""),
        ("echo ${A:-b} ${#A} ${A%/*} ${A##*/}", ""),
        ("cat > a <<EOF\nx = [[ 1 ]]\ny=(1)\nEOF", ""),
        ("a 2>&1 | b; (c; d)", ""),
        ("pip install 'a[b]==1' c==2", ""),
        ("[ a = b ] || c", ""),
    ],
)
def test_syntax_of_bash_is_found_outside_of_quotes(text, found):
    assert bash_syntax(text) == found


def test_a_setup_with_syntax_of_bash_is_run_by_bash(tmp_path):
    text = """
A=(it\\'s 'x y')
if [[ -d . ]]; then echo "${A[1]}" > out; fi
torchrun a.py"""
    spec, comments = converted("bash", "-c", text)
    assert 'setup: the setup has syntax of bash, "A=(", so it starts bash' in comments
    subprocess.run(["/bin/sh", "-ec", "--", spec["setup"]], cwd=tmp_path, check=True)
    assert (tmp_path / "out").read_text() == "x y\n"


def test_a_setup_of_bash_ends_at_the_first_failure(tmp_path):
    spec, _ = converted("bash", "-c", "make x <<< y; if [[ -d . ]]; then a; fi; torchrun a.py")
    done = subprocess.run(
        ["/bin/sh", "-ec", "--", spec["setup"].replace("make x", "false")], cwd=tmp_path
    )
    assert done.returncode == 1


def test_a_setup_that_every_shell_knows_stays_as_it_is():
    spec, comments = converted("bash", "-c", "if [ -f a ]; then b; fi; torchrun a.py")
    assert spec["setup"] == "if [ -f a ]; then b; fi"
    assert "bash" not in comments


# Several trainings


def test_several_commands_that_could_be_the_training_are_the_first_note():
    lines = ("#SBATCH --qos=high", "srun python main.py", "srun python eval.py")
    spec, comments = converted_script(*lines)
    assert spec["args"] == ["main.py"]
    assert comments.splitlines()[1] == (
        "# note: the script: 2 commands could be the training; that of line 3 was taken, "
        '"srun python main.py"; instead: remove the others, or convert each of them by itself'
    )


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("python download.py; python train.py", "train.py"),
        ("python -m app.train; python -m app.eval", "-m"),
        ("python one.py; python two.py", "two.py"),
        ("torchrun pretrain.py; torchrun finetune.py", "finetune.py"),
    ],
)
def test_a_command_with_the_name_of_a_training_is_taken_first(text, script):
    spec, comments = converted("sh", "-c", text)
    assert spec["args"][0] == script
    assert "2 commands could be the training" in comments.splitlines()[1]


def test_a_program_before_torchrun_is_no_other_training():
    _, comments = converted("sh", "-c", "python download.py; torchrun train.py")
    assert "could be the training" not in comments


def test_another_training_is_no_part_of_the_setup():
    spec, comments = converted("sh", "-c", "torchrun one.py; torchrun two.py")
    assert "setup" not in spec
    assert '"torchrun one.py": because it could be the training' in comments


# Values


def test_values_of_slurm_are_those_of_its_options():
    lines = (
        "#SBATCH -N 2 -c 8 --ntasks-per-node=1 --gres=gpu:4",
        "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK",
        "TOTAL=$((SLURM_NNODES * SLURM_GPUS_ON_NODE))",
        'export LAUNCHER="torchrun --nnodes $SLURM_NNODES --nproc-per-node=4"',
        "srun $LAUNCHER a.py --n $SLURM_NNODES --c ${SLURM_CPUS_PER_TASK} --all $TOTAL",
    )
    spec, comments = converted_script(*lines)
    env = {one["name"]: one["value"] for one in spec["env"]}
    assert env["OMP_NUM_THREADS"] == "8"
    assert spec["args"] == ["a.py", "--n", "2", "--c", "8", "--all", "8"]
    assert "nothing expands" not in comments


def test_the_nodes_of_slurm_follow_from_its_tasks():
    size = "#SBATCH --ntasks=8 --ntasks-per-node=4"
    spec, _ = converted_script(size, "srun python a.py $SLURM_NNODES $SLURM_NTASKS")
    assert spec["args"] == ["a.py", "2", "8"]


def test_a_value_in_the_text_of_a_shell_is_known_too():
    lines = ("#SBATCH -N 3", "A=b", "srun bash -c 'torchrun a.py $SLURM_NNODES $A'")
    spec, _ = converted_script(*lines)
    assert spec["args"] == ["a.py", "3", "b"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$((2 * 3))", "6"),
        ("$((A*B + 1))", "7"),
        ("$(($A / (B - 1)))", "1"),
        ("$((7 % 4 - 5))", "-2"),
        ("$((-7 / 2))", "-3"),
        ("x$((1))y", "x1y"),
        ("$((C + 1))", "$((C + 1))"),
        ("$((1 / 0))", "$((1 / 0))"),
        ("$((08))", "$((08))"),
        ("$((2 ** 9))", "$((2 ** 9))"),
        ("$((5-6/-4))", "6"),
        ("$((1 2))", "$((1 2))"),
        ("$(( (1 + 2) * -B ))", "-9"),
        ("$((1 +))", "$((1 +))"),
        ("$((a.b))", "$((a.b))"),
    ],
)
def test_a_calculation_of_known_numbers_is_its_result(text, value):
    assert expand(text, {"A": "2", "B": "3"}) == value


# Redirections and pipes


@pytest.mark.parametrize(
    "line",
    [
        'srun bash -c "torchrun train.py --lr 1" 2>&1 | tee x',
        'srun bash -c "torchrun train.py --lr 1" > log 2>&1',
        'srun bash -c "torchrun train.py --lr 1" name &> log',
        'bash -lc "torchrun train.py --lr 1" |& tee x',
        'srun bash -c "torchrun train.py --lr 1 2>&1 | tee x"',
    ],
)
def test_the_text_of_a_shell_may_have_its_output_elsewhere(line):
    spec, comments = converted_script(line)
    assert spec["args"] == ["train.py", "--lr", "1"]
    assert "ddpjob logs prints it" in comments


# Commands in variables


@pytest.mark.parametrize("export", ["", "export "])
@pytest.mark.parametrize("unknown", ["$HOST:1", "$(hostname):1", "`hostname`:1"])
def test_a_command_in_a_variable_may_have_unknown_values(export, unknown):
    lines = (
        f'{export}LAUNCHER="torchrun --rdzv-endpoint {unknown}"',
        f'{export}ARGS="--url {unknown} --x 1"',
        "srun $LAUNCHER a.py $ARGS",
    )
    spec, comments = converted_script(*lines)
    assert spec["args"] == ["a.py", "--url", unknown, "--x", "1"]
    assert "env" not in spec
    assert "in args: no" in comments


def test_a_later_export_replaces_an_earlier_value():
    spec, _ = converted_script("A=x", "export A=y", "srun torchrun a.py $A")
    assert spec["args"] == ["a.py", "$(A)"]


def test_the_current_folder_is_that_of_the_pod():
    lines = ("SCRIPT=`pwd`/a.py", "srun torchrun $SCRIPT $(pwd)/b $PWD/c $SLURM_SUBMIT_DIR/d")
    spec, _ = converted_script(*lines)
    assert spec["args"] == ["./a.py", "./b", "./c", "./d"]


def test_quotes_in_a_variable_stay_in_the_text_of_a_shell():
    lines = (r'CMD="a.py --title \"a b\""', 'srun bash -c "torchrun $CMD"')
    spec, _ = converted_script(*lines)
    assert spec["args"] == ["a.py", "--title", "a b"]


def test_exports_of_accelerate_are_joined():
    spec = spec_of("sbatch", "accelerate-exports.sbatch")
    assert (spec["nodes"], spec["nprocPerNode"], spec["accelerator"]) == (2, 4, "gpu")
    assert spec["args"] == [
        *("/opt/examples/finetune_nlp.py", "--mixed_precision", "bf16", "--workers", "32"),
        *("--save_to", "/opt/examples/saved"),
    ]
    comments = comments_of("sbatch", "accelerate-exports.sbatch")
    assert '["--multi_gpu", "--main_process_ip $first_host"' in comments
    assert "scontrol show hostnames" in comments


def test_a_launcher_and_a_command_are_joined_in_the_text_of_a_shell():
    spec = spec_of("sbatch", "megatron-launcher.sbatch")
    assert (spec["nodes"], spec["nprocPerNode"]) == (4, 8)
    assert spec["failurePolicy"] == {"maxRestarts": 0}
    assert spec["args"] == [
        *("./pretrain_lm.py", "--tensor-parallel", "2", "--pipeline-parallel", "2"),
        *("--global-batch", "8", "--optimizer", "adam", "--lr", "3e-4"),
        *("--data-path", "/data/text_document", "--save", "$SCRATCH/lm-350m/checkpoints"),
        *("--title", "a small model", "--ds-config", "./ds.$SLURM_JOBID.json"),
    ]
    comments = comments_of("sbatch", "megatron-launcher.sbatch")
    assert "SLURM_JOBID in args: nothing expands it" in comments
    assert "zero_optimization" in comments


# Here-documents for variables


@pytest.mark.parametrize(
    "lines",
    [
        ("read -r -d '' CMD <<EOF || true", *TEXT, "EOF"),
        ("read -rd '' CMD <<-EOF", *TEXT, "\tEOF"),
        ('export CMD="$(cat <<EOF', *TEXT, "EOF", ')"'),
    ],
)
def test_the_training_can_be_in_a_here_document(lines):
    spec, comments = converted_script("LR=3", *lines, 'srun bash -c "$CMD"', "nvidia-smi")
    assert spec["args"] == ["train.py", "--lr", "3", "--name", "a b", 'c"d']
    assert "here-document" not in comments
    assert f'line {4 + len(lines)}: "nvidia-smi"' in comments


def test_a_here_document_with_a_quoted_delimiter_has_no_variables():
    lines = ("CMD=$(cat <<'EOF'", "torchrun a.py --n 'x y'", "EOF", ")", 'srun bash -c "$CMD"')
    spec, _ = converted_script(*lines)
    assert spec["args"] == ["a.py", "--n", "x y"]


@pytest.mark.parametrize(
    "block",
    [
        "cat > a.sh <<EOF && chmod +x a.sh\nexport FOO=1\nEOF",
        "cat <<'EOF' > a.sh ; chmod +x a.sh\nexport FOO=1\nEOF",
        "cat > a.sh <<\\EOF\nexport FOO=1\nEOF",
        "case $A in\n  1) if true; then pip install x; fi ;;\n  *) pip install y ;;\nesac",
        "case $A in 1) if true; then export FOO=1; fi ;; esac",
        "case $A in\n  (a|b) pip install x ;;\n  c | d)\n    pip install y\n    ;;\nesac",
    ],
)
def test_a_block_is_kept_whole(block):
    spec, _ = converted("bash", "-c", f"{block}\npip install z\ntorchrun a.py")
    assert f"{block}\npip install z" in spec["setup"]
    assert "env" not in spec
    spec, comments = converted_script(*block.splitlines(), "export B=2", "srun torchrun a.py")
    assert spec["env"] == [{"name": "B", "value": "2"}]
    assert comments.count("dropped: ") == 1


def test_a_command_follows_a_here_document():
    lines = ("X=$(cat <<EOF", "a", "EOF", ") srun torchrun a.py", "nvidia-smi")
    spec, comments = converted_script(*lines)
    assert spec["env"] == [{"name": "X", "value": "a"}]
    assert 'line 6: "nvidia-smi"' in comments


@pytest.mark.parametrize(
    "text",
    [
        # A quote within an expansion.
        'A=$(cat <<EOF\n$(date "+%F %T") ${X:-"a b"}\nEOF\n)',
        # Another document, a comment, and a `read` that takes one line.
        "cat > ask.sh <<'OUTER'\nread -r -d '' name <<END\nhello\nEND\nOUTER",
        "#A=$(cat <<EOF\n#a\n#EOF\n#)",
        "read -r A <<EOF\na\nb\nEOF",
        "cat <<< EOF",
    ],
)
def test_other_here_documents_stay_as_they_are(text):
    assert rewrite(text) == text


@pytest.mark.parametrize(
    "document",
    [
        "IFS= read -r -d '' A <<'EOF'\nx 'y' \"z\" $B\n\nEOF\n",
        'A=$(cat <<EOF\nx \\"y\\" "z" $B \\$B\nEOF\n)\n',
        'A="$(cat <<EOF\nEOF\n)"\n',
    ],
)
def test_a_here_document_for_a_variable_is_an_assignment_of_equal_value(document):
    def value(text):
        done = subprocess.run(
            ["bash", "-c", f'B=b\n{text}printf "%s" "$A"'],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.rstrip("\n")

    written = rewrite(document)
    assert "<<" not in written
    assert value(written) == value(document)
    assert written.count("\n") == document.count("\n")


# Folders


@pytest.mark.parametrize("command", ["python /x/a.py", "torchrun -m a"])
def test_the_folder_of_a_script_with_its_own_path_is_noted(command):
    _, comments = converted("sh", "-c", f"pip install b && cd /opt/x && {command}")
    assert "cd /opt/x: the working directory stays that of the image" in comments


def test_a_folder_of_an_inner_text_is_not_below_that_of_the_script():
    spec, _ = converted_script("cd src", "srun bash -c 'cd /work && torchrun a.py'")
    assert spec["args"] == ["a.py"]
    assert spec["podTemplate"]["spec"]["containers"][0]["workingDir"] == "/work"


def test_lines_of_an_inner_text_are_told_from_those_of_the_script():
    _, comments = converted_script("srun bash -c 'nvidia-smi", "torchrun a.py'")
    assert 'the script: the text of bash -c: line 1: "nvidia-smi"' in comments


# What has no use


def test_an_export_without_a_value_is_named():
    lines = ("export KEY", "export -f f", "export A", "A=1", "srun torchrun a.py")
    spec, comments = converted_script(*lines)
    assert spec["env"] == [{"name": "A", "value": "1"}]
    assert 'line 2: "export KEY": because pods have nothing of the user\'s shell' in comments
    assert 'line 3: "export -f f": because it exports a function' in comments
    assert '"export A"' not in comments


def test_the_elements_of_an_array_are_known_in_a_variable():
    lines = ("A=(--nproc_per_node 8)", 'CMD="torchrun ${A[*]} a.py"', 'srun bash -c "$CMD"')
    spec, comments = converted_script(*lines)
    assert spec["nprocPerNode"] == 8
    assert "A=(" not in comments


def test_an_array_without_a_use_is_named():
    lines = ("A=(1 2)", "B=($A)", "declare -a C", "D=(--x 1)", 'srun torchrun a.py "${D[@]}"')
    spec, comments = converted_script(*lines)
    assert spec["args"] == ["a.py", "--x", "1"]
    for dropped in ('2: "A=(1 2)"', '3: "B=($A)"', '4: "declare -a C"'):
        assert f"dropped: the script: line {dropped}: because" in comments
    assert "D=(" not in comments


def test_only_the_unknown_variable_of_a_command_is_named():
    spec, comments = converted_script("A=1 B=$(date) srun torchrun a.py")
    assert spec["env"] == [{"name": "A", "value": "1"}]
    assert 'dropped: the script: line 2 B: "$(date)": because only a shell knows' in comments


@pytest.mark.parametrize(
    ("lines", "kept", "dropped"),
    [
        (["A=$(mktemp -d)", "B=$(mktemp -d)"], [2], [3]),
        (["A=$(mktemp -d)", "A=$(mktemp -u)"], [3], [2]),
        (["A=$(mktemp -d)", "A=/tmp/x"], [], [2]),
        (["A=$(mktemp -d)", "A+=/$(date)"], [2, 3], []),
    ],
)
def test_an_assignment_kept_in_the_setup_is_not_called_dropped(lines, kept, dropped):
    spec, comments = converted_script(*lines, "pip install --target $A x", "srun torchrun a.py")
    for number in kept:
        assert lines[number - 2] in spec["setup"]
        line = f'note: the script: line {number}: "{lines[number - 2]}": the setup has it'
        assert line in comments
    for number in dropped:
        assert lines[number - 2] not in spec["setup"]
        assert f'dropped: the script: line {number}: "{lines[number - 2]}": because' in comments


def test_two_assignments_of_a_line_are_kept_together():
    _, comments = converted_script(
        "A=$(mktemp -d) B=$(mktemp -d)", "pip install --target $A x", "srun torchrun a.py"
    )
    assert "note: the script: line 2 A:" in comments
    assert "note: the script: line 2 B:" in comments


@pytest.mark.parametrize("line", ["export A=2", "A=2", "export A=$(date)", "B=(1 2)"])
def test_an_assignment_after_the_training_changes_nothing_before_it(line):
    spec, comments = converted_script("export A=1", "srun torchrun a.py --a $A", line, "echo $A")
    assert spec["env"] == [{"name": "A", "value": "1"}]
    assert f'line 4: "{line}": because it ran after the training' in comments


def test_a_variable_changed_after_a_line_of_the_setup_is_noted():
    spec, comments = converted_script(
        "export A=1", "pip install x", "export A=2", "srun torchrun a.py"
    )
    assert spec["env"] == [{"name": "A", "value": "2"}]
    assert 'line 4 A: lines of the setup had "1"' in comments


@pytest.mark.parametrize("prefix", ["SINGULARITYENV_", "APPTAINERENV_"])
def test_a_variable_for_a_container_has_no_prefix_in_it(prefix):
    spec, _ = converted_script(f"export {prefix}A=1", "srun singularity exec x torchrun a.py")
    assert spec["env"] == [{"name": "A", "value": "1"}]


def test_a_declaration_exports_only_with_its_option():
    spec, _ = converted_script(
        "declare A=1", "declare -x B=2", "readonly C=3", "srun torchrun a.py"
    )
    assert spec["env"] == [{"name": "B", "value": "2"}]


def test_the_arguments_of_the_script_are_no_words():
    spec, comments = converted_script('srun torchrun a.py --x "$@"')
    assert spec["args"] == ["a.py", "--x"]
    assert 'dropped: the script: "$@": because the arguments of the script are not here' in comments
