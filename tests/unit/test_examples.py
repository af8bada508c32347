"""`ddpjob init` and the manifests in examples/: equal, valid, with flags of the trainer."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddp_trainer.cli import command_line
from ddp_trainer.cli.options import WORKLOADS
from ddpjob.cli.commands.init import manifest, workloads
from ddpjob.cli.main import app
from ddpjob.core.api.profiles import catalog
from ddpjob.core.api.yaml_text import load_yaml
from ddpjob.local.manifest import read

EXAMPLES = Path(__file__).parents[2] / "examples"


def init(*words):
    return CliRunner().invoke(app, ["init", *words])


def test_every_workload_of_the_trainer_has_a_manifest():
    assert {row["args"][0] for row in workloads().values()} == set(WORKLOADS)
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(workloads())


@pytest.mark.parametrize("name", workloads())
def test_an_example_is_the_output_of_init(name):
    printed = init(name)
    example = (EXAMPLES / f"{name}.yaml").read_text()
    assert printed.exit_code == 0
    assert printed.stdout == example, f"run ddpjob init {name} > examples/{name}.yaml"


@pytest.mark.parametrize("name", workloads())
@pytest.mark.parametrize("profile", catalog().values(), ids=catalog())
def test_a_manifest_is_a_valid_job_whose_flags_the_trainer_has(name, profile, tmp_path):
    nodes = 1 if profile.one_node else 3
    file = tmp_path / "job.yaml"
    file.write_text(manifest(name, nodes=nodes, accelerator=profile.name, gpus=8))
    spec = read(file).spec
    assert (spec.nodes, spec.accelerator, spec.image) == (
        nodes,
        profile.name,
        profile.trainer_image,
    )
    if profile.process_per:
        assert spec.devices[profile.process_per] == 8
    elif profile.devices:
        assert spec.nproc_per_node == profile.processes
    program, module, *arguments = spec.args
    assert (program, module) == ("-m", "ddp_trainer")
    assert command_line.parse(arguments).workload == workloads()[name]["args"][0]
    assert all(len(line) <= 120 for line in file.read_text().splitlines())


@pytest.mark.parametrize("file", EXAMPLES.glob("*/job.yaml"), ids=lambda file: file.parent.name)
def test_the_job_of_a_script_is_valid_and_names_its_config_map(file):
    spec = read(file).spec
    assert spec.nodes == 2
    assert spec.args[0] == "/script/train.py"
    assert (file.parent / "train.py").is_file()
    assert f"configmap {file.parent.name} --from-file train.py" in file.read_text()


@pytest.mark.parametrize("profile", catalog().values(), ids=catalog())
def test_the_default_is_two_nodes_if_they_have_a_network(profile):
    printed = init("digits", "--accelerator", profile.name).stdout
    assert load_yaml(printed)["spec"]["nodes"] == (1 if profile.one_node else 2)


def test_a_workload_with_two_gpus_per_process_has_half_as_many_processes():
    job = load_yaml(manifest("model-parallel", nodes=2, accelerator="gpu", gpus=8))
    assert job["spec"]["nprocPerNode"] == 4
    assert job["spec"]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    printed = init("model_parallel", "--accelerator", "gpu").stdout
    assert load_yaml(printed)["spec"]["resources"]["limits"] == {"nvidia.com/gpu": "2"}


def words_of(stderr):
    """Return the words of an error, without rich's box and line breaks."""
    return " ".join(stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nothing", "WORKLOAD: must be one of toy, skewed, messages, model-parallel, elastic, "),
        ("nothing", 'mnist-fake, resnet50, got "nothing"'),
        ("digts", "got \"digts\" (did you mean 'digits'?)"),
        (
            "digits --accelerator tpu",
            f'--accelerator: must be one of {", ".join(catalog())}, got "tpu" '
            "(did you mean 'gpu'?)",
        ),
        (
            "digits --accelerator trn1.2xlarge --nodes 2",
            "--nodes: must be 1 with accelerator trn1.2xlarge, which has no EFA to reach another "
            "node, got 2",
        ),
        ("digits --gpus 4", "--gpus: requires --accelerator gpu"),
        (
            "model-parallel --accelerator gpu --gpus 3",
            "--gpus: must be a multiple of 2, the GPUs of one process, got 3",
        ),
        ("digits --nodes 0", "greater than or equal to 1"),
    ],
)
def test_wrong_arguments_of_init_are_refused_with_a_message(arguments, message):
    refused = init(*arguments.split())
    assert refused.exit_code == 2
    assert message in words_of(refused.stderr)


def test_init_without_arguments_lists_the_workloads():
    listed = init().stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(workloads())
