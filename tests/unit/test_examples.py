"""`ddpjob init` and the manifests in examples/: the same text, jobs that can run, flags that the trainer has."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ddp_trainer.cli import options
from ddpjob.cli.init import manifest, workloads
from ddpjob.cli.main import app
from ddpjob.local.manifest import read

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_workload_of_the_trainer_has_a_manifest_and_every_manifest_a_workload():
    assert {row["args"][0] for row in workloads().values()} == set(options.WORKLOADS)
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(workloads())


@pytest.mark.parametrize("name", workloads())
def test_an_example_is_what_init_prints(name):
    printed = CliRunner().invoke(app, ["init", name])
    assert printed.exit_code == 0
    assert printed.stdout == (EXAMPLES / f"{name}.yaml").read_text(), (
        f"ddpjob init {name} > examples/{name}.yaml"
    )


@pytest.mark.parametrize("name", workloads())
@pytest.mark.parametrize(
    ("accelerator", "nodes"), [("cpu", 3), ("gpu", 3), ("trn1.32xlarge", 3), ("trn1.2xlarge", 1)]
)
def test_a_manifest_is_a_job_and_the_trainer_knows_its_flags(name, accelerator, nodes, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(manifest(name, nodes=nodes, accelerator=accelerator, gpus=8))
    spec = read(file).spec
    assert (spec.nodes, spec.accelerator) == (nodes, accelerator)
    if accelerator.startswith("trn"):
        assert spec.processes == {"trn1.32xlarge": 32, "trn1.2xlarge": 2}[accelerator]
    program, module, *arguments = spec.args
    assert (program, module) == ("-m", "ddp_trainer")
    assert options.parse(arguments).workload == workloads()[name]["args"][0]
    assert all(len(line) <= 120 for line in file.read_text().splitlines())


@pytest.mark.parametrize(
    ("accelerator", "nodes"), [("cpu", 2), ("trn1.32xlarge", 2), ("trn1.2xlarge", 1)]
)
def test_without_a_number_there_are_two_nodes_where_they_can_reach_each_other(accelerator, nodes):
    printed = CliRunner().invoke(app, ["init", "digits", "--accelerator", accelerator]).stdout
    assert yaml.safe_load(printed)["spec"]["nodes"] == nodes


def test_a_process_with_two_gpus_is_started_half_as_often():
    job = yaml.safe_load(manifest("model-parallel", nodes=2, accelerator="gpu", gpus=8))
    assert job["spec"]["nprocPerNode"] == 4
    assert job["spec"]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    printed = CliRunner().invoke(app, ["init", "model_parallel", "--accelerator", "gpu"]).stdout
    assert yaml.safe_load(printed)["spec"]["resources"]["limits"] == {"nvidia.com/gpu": "2"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("nothing", "must be one of toy,"),
        ("digits --accelerator tpu", "must be one of cpu, gpu, "),
        ("digits --accelerator trn1.2xlarge --nodes 2", "must be 1 with accelerator trn1.2xlarge"),
        ("digits --gpus 4", "requires --accelerator gpu"),
        ("model-parallel --accelerator gpu --gpus 3", "must be a multiple of 2"),
        ("digits --nodes 0", "greater than or equal to 1"),
    ],
)
def test_wrong_use_of_init_is_refused_with_what_is_allowed(words, says):
    refused = CliRunner().invoke(app, ["init", *words.split()])
    assert refused.exit_code == 2
    assert says in refused.stderr


def test_init_alone_lists_the_workloads():
    listed = CliRunner().invoke(app, ["init"]).stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(workloads())
