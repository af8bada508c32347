"""`ddpjob convert`: manifests of other operators and scripts for Slurm as DDPJobs.

`manifests/` has a folder for each format, after the shapes in its documentation.
"""

import copy
import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from conversions import (
    MANIFESTS,
    a_pytorchjob,
    a_script,
    comments_of,
    convert,
    convert_file,
    converted,
    converted_script,
    spec_of,
)
from typer.testing import CliRunner

from ddpjob.cli.commands.convert import as_yaml, summary
from ddpjob.cli.first_attempt import problem_of
from ddpjob.cli.main import app
from ddpjob.convert.formats import convert_documents
from ddpjob.convert.shell import read_shell, split_words
from ddpjob.convert.slurm_options import job_name, seconds_of
from ddpjob.core.api.readers import SpecError
from ddpjob.core.api.yaml_text import load_all_yaml, load_yaml
from ddpjob.jobs.documents import read_documents
from ddpjob.show.advice import address_of

PYTORCHJOBS = sorted((MANIFESTS / "pytorchjob").iterdir())
TRAINJOBS = sorted((MANIFESTS / "trainjob").iterdir())
SCRIPTS = sorted((MANIFESTS / "sbatch").iterdir())

UNKNOWN = "fieldOfNobody"

# Objects of a user's own keys: such a key is a name and no field.
FREE = {"labels", "annotations", "nodeSelector", "limits", "requests", "matchLabels", "data"}


def short(path):
    return path.stem


# The manifests


@pytest.mark.parametrize("path", [*PYTORCHJOBS, *TRAINJOBS, *SCRIPTS], ids=short)
def test_a_manifest_becomes_a_valid_ddpjob(path):
    found = convert_file(path)
    assert problem_of(found.document) == ""
    (read,) = read_documents(found.comments() + as_yaml(found.document))
    assert read == found.document


def test_there_are_twenty_manifests_of_each_operator():
    assert (len(PYTORCHJOBS), len(TRAINJOBS)) == (20, 20)


def places(value, path=()):
    """Yield the paths of a document's objects with fields as keys."""
    if isinstance(value, dict):
        yield path
        for key, item in value.items():
            if key not in FREE:
                yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


def with_unknown_field(documents, path):
    changed = copy.deepcopy(documents)
    place = changed
    for step in path:
        place = place[step]
    known = dict(place)
    place.clear()
    place.update({UNKNOWN: {"why": 1}, **known})
    return changed


def printed(documents):
    """Return the comments of converted documents, or the error."""
    try:
        (found,) = convert_documents(documents)
    except SpecError as error:
        return str(error)
    return found.comments()


@pytest.mark.parametrize("path", [*PYTORCHJOBS, *TRAINJOBS], ids=short)
def test_an_unknown_field_is_never_lost_in_silence(path):
    # JSON has no aliases: one would be changed in all its places.
    documents = json.loads(json.dumps(read_documents(path.read_text())))
    trainings = [one for one in documents if one["kind"] != "ConfigMap"]
    for place in places(trainings):
        if place:
            assert UNKNOWN in printed(with_unknown_field(trainings, place)), place


def test_what_is_dropped_has_its_value_its_reason_and_what_to_do():
    comments = comments_of("pytorchjob", "volcano.yaml")
    assert (
        "# dropped: spec.runPolicy.schedulingPolicy.scheduleTimeoutSeconds: 600: because a gang "
        "waits for room without a limit; instead: startupDeadlineSeconds\n" in comments
    )


def test_a_text_of_several_lines_cannot_end_a_comment():
    metadata = (
        "{name: j, annotations: {kubectl.kubernetes.io/last-applied-configuration: 'a\n\n\nb'}}"
    )
    text = a_pytorchjob().replace("metadata:\n  name: j", f"metadata: {metadata}")
    assert all(line.startswith("# ") for line in convert(text).comments().splitlines())


def test_a_character_that_yaml_refuses_is_not_in_a_comment():
    text = a_pytorchjob(spec={"odd\x07\x85\u2028key": 1})
    found = convert(text)
    assert load_yaml(found.comments() + as_yaml(found.document)) == found.document


# PyTorchJob


def test_master_and_workers_become_nodes():
    spec = spec_of("pytorchjob", "torchrun-gpu.yaml")
    assert (spec["nodes"], spec["nprocPerNode"], spec["accelerator"]) == (4, 8, "gpu")
    assert spec["args"] == ["train.py", "--epochs", "90"]


def test_the_run_policy_becomes_fields_of_the_spec():
    spec = spec_of("pytorchjob", "torchrun-gpu.yaml")
    assert spec["failurePolicy"] == {"maxRestarts": 5}
    assert spec["ttlSecondsAfterFinished"] == 3600
    assert spec["activeDeadlineSeconds"] == 86400
    assert spec["cleanPodPolicy"] == "None"


def test_the_restart_policy_never_allows_no_restart():
    spec = spec_of("pytorchjob", "worker-only.yaml")
    assert spec["failurePolicy"] == {"maxRestarts": 0}


@pytest.mark.parametrize("policy", ["Always", "ExitCode", "OnFailure"])
def test_restarts_without_a_limit_are_noted(policy):
    text = a_pytorchjob().replace("replicas: 1", f"replicas: 1\n      restartPolicy: {policy}")
    assert f"restartPolicy: {policy} restarted pods without a limit" in convert(text).comments()
    limited = load_yaml(text)
    limited["spec"]["runPolicy"] = {"backoffLimit": 2}
    assert "without a limit" not in convert(yaml.safe_dump(limited)).comments()


def test_a_policy_of_one_role_that_is_not_kept_is_named():
    job = load_yaml(a_pytorchjob())
    roles = job["spec"]["pytorchReplicaSpecs"]
    roles["Master"]["restartPolicy"], roles["Worker"]["restartPolicy"] = "OnFailure", "Never"
    comments = convert(yaml.safe_dump(job)).comments()
    assert 'restartPolicy: "Never": because all pods of a DDPJob start again together' in comments


def test_torchruns_own_restarts_do_not_depend_on_the_restart_policy():
    never = {"runPolicy": {"backoffLimit": 5}}
    text = a_pytorchjob(["torchrun", "--max-restarts=3", "a.py"], spec=never)
    found = convert(text.replace("replicas: 1", "replicas: 1\n      restartPolicy: Never"))
    assert found.document["spec"]["failurePolicy"] == {"maxRestarts": 3}
    assert "backoffLimit: 5: because restartPolicy is Never" in found.comments()


def test_a_topology_of_kueue_becomes_that_of_the_job():
    annotation = {"kueue.x-k8s.io/podset-required-topology": "cloud.com/block"}
    manifest = load_yaml(a_pytorchjob())
    for role in manifest["spec"]["pytorchReplicaSpecs"].values():
        role["template"]["metadata"] = {"annotations": annotation}
    spec = convert(yaml.safe_dump(manifest)).document["spec"]
    assert spec["scheduling"] == {"topology": {"required": "cloud.com/block"}}
    assert "podTemplate" not in spec


def test_labels_of_a_queue_stay_with_the_job():
    found = convert_file(MANIFESTS / "pytorchjob/kueue.yaml")
    assert found.document["metadata"]["labels"] == {
        "kueue.x-k8s.io/queue-name": "team-a",
        "kueue.x-k8s.io/priority-class": "high",
    }
    assert found.document["spec"]["suspend"] is True
    assert found.dropped == 0


def test_the_rest_of_a_pod_is_its_template():
    pod = spec_of("pytorchjob", "placement.yaml")["podTemplate"]["spec"]
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["terminationGracePeriodSeconds"] == 120
    containers = spec_of("pytorchjob", "sidecar.yaml")["podTemplate"]["spec"]["containers"]
    assert [one["name"] for one in containers] == ["trainer", "metrics"]


def test_other_resources_of_two_roles_are_a_remark_and_another_program_is_an_error():
    _, comments = converted(worker={"resources": {"limits": {"memory": "4Gi"}}})
    assert "spec.resources" in comments
    assert "4Gi" in comments
    with pytest.raises(SpecError, match=r"different programs: args would be .*a\.py.*b\.py"):
        convert(a_pytorchjob(worker={"command": ["torchrun", "b.py"]}))


def test_ranks_by_hand_are_no_difference():
    spec = spec_of("pytorchjob", "different-templates.yaml")
    assert (spec["nodes"], spec["nprocPerNode"], spec["args"]) == (2, 2, ["train.py"])


def test_the_usual_volume_for_shared_memory_is_dropped_with_its_mount():
    spec = spec_of("pytorchjob", "shared-memory.yaml")
    assert [one["name"] for one in spec["volumes"]] == ["data"]
    assert [one["mountPath"] for one in spec["volumeMounts"]] == ["/data"]


@pytest.mark.parametrize(
    ("command", "args", "torchrun"),
    [
        (["torchrun", "--nproc_per_node", "2", "a.py"], ["a.py"], None),
        (["torchrun", "-m", "app.train", "-x"], ["-m", "app.train", "-x"], None),
        (["python3", "-m", "torch.distributed.run", "a.py"], ["a.py"], None),
        (["python", "a.py", "--lr", "1"], ["a.py", "--lr", "1"], None),
        (["env", "A=b", "python", "a.py"], ["a.py"], None),
        (["/opt/bin/torchrun", "a.py"], ["a.py"], {"command": ["/opt/bin/torchrun"]}),
        (
            ["/opt/python", "a.py"],
            ["a.py"],
            {"command": ["/opt/python", "-m", "torch.distributed.run"]},
        ),
        (["torchrun", "--no-python", "./a", "1"], ["./a", "1"], {"args": ["--no-python"]}),
        (
            ["torchrun", "--rdzv_conf", "join_timeout=9,timeout=8", "a.py"],
            ["a.py"],
            {"rdzvConf": {"join_timeout": 9, "timeout": 8}},
        ),
        (
            ["uv", "run", "python", "src/a.py"],
            ["src/a.py"],
            {"command": ["uv", "run", "torchrun"]},
        ),
        (["accelerate", "launch", "--multi_gpu", "-m", "a.b"], ["-m", "a.b"], None),
        (["bash", "-lc", "exec torchrun a.py --x 'a b'"], ["a.py", "--x", "a b"], None),
    ],
)
def test_the_words_that_start_the_processes_are_taken_apart(command, args, torchrun):
    spec, _ = converted(*command)
    assert (spec["args"], spec.get("torchrun")) == (args, torchrun)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["bash", "run.sh"], "runs a script of the image"),
        (["./run.sh"], "runs a shell script"),
        (["mpirun", "python", "a.py"], "starts processes by MPI"),
        (["python", "-c", "print()"], "write the text into a script"),
        (["fabric", "run", "x"], "cannot read a command that begins with"),
        (["tune", "run", "lora"], "torchrun with its flags and the file of the recipe"),
        (["podman", "run", "i:1", "torchrun"], "write the command after the image"),
        (["torchrun", "--nnodes=2"], "torchrun has no script"),
        (["bash", "-c", "for i in 1 2; do torchrun a.py; done"], "in a loop"),
        (["bash", "-c", "echo hello"], "no line that starts torchrun or python"),
    ],
)
def test_a_command_that_cannot_be_read_is_an_error_with_a_sentence(command, sentence):
    with pytest.raises(SpecError, match="PyTorchJob j: ") as error:
        convert(a_pytorchjob(command))
    assert sentence in str(error.value)


def test_a_container_without_a_command_is_an_error():
    text = a_pytorchjob(["--epochs", "1"]).replace("command:", "args:")
    with pytest.raises(SpecError, match="write the ENTRYPOINT of the image into command"):
        convert(text)


def test_flags_of_torchrun_are_named_if_they_are_dropped():
    command = ["torchrun", "--rdzv-id=7", "--tee", "3", "--max-restarts=2", "--odd", "x", "a.py"]
    spec, comments = converted(*command)
    assert spec["failurePolicy"] == {"maxRestarts": 2}
    for flag in ("--rdzv-id 7", "--tee", "--odd"):
        assert flag in comments


def test_another_number_of_nodes_in_a_flag_is_named():
    _, comments = converted("torchrun", "--nnodes=8", "a.py")
    assert (
        "the nodes in the flags of torchrun: 8: because their number in the manifest is 2"
        in comments
    )


def test_one_process_stays_one_process():
    gpus = {"resources": {"limits": {"nvidia.com/gpu": 4}}}
    spec, comments = converted("python", "a.py", **gpus)
    assert spec["nprocPerNode"] == 1
    assert "remove nprocPerNode for one process per device" in comments
    spec, _ = converted("torchrun", "a.py", **gpus)
    assert "nprocPerNode" not in spec


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["torchrun", "a.py"], 8),
        (["python", "a.py"], 1),
        (["torchrun", "--nproc_per_node=2", "a.py"], 2),
        (["torchrun", "--nproc_per_node=auto", "a.py"], 8),
    ],
)
def test_auto_is_less_than_what_the_pod_and_the_command_have(command, found):
    gpus = {"resources": {"limits": {"amd.com/gpu": 8}}}
    spec, comments = converted(*command, spec={"nprocPerNode": "auto"}, **gpus)
    assert spec["nprocPerNode"] == found
    assert f"nprocPerNode: {found}" not in comments
    assert 'is "auto"' not in comments


def test_flags_of_torchrun_override_the_fields_for_its_variables():
    fields = {"nprocPerNode": "4", "runPolicy": {"backoffLimit": 3}}
    command = ["torchrun", "--nproc_per_node=2", "--max-restarts=7", "a.py"]
    spec, comments = converted(*command, spec=fields)
    assert (spec["nprocPerNode"], spec["failurePolicy"]) == (2, {"maxRestarts": 7})
    lines = [line for line in comments.splitlines() if "overrides it" in line]
    assert [line.partition(" because ")[0] for line in lines] == [
        "# dropped: spec.nprocPerNode: 4:",
        "# dropped: spec.runPolicy.backoffLimit: 3:",
    ]


def test_flags_of_torchrun_override_the_fields_of_a_trainjob():
    job = load_yaml((MANIFESTS / "trainjob/no-runtime.yaml").read_text())
    job["spec"]["trainer"] |= {
        "numProcPerNode": 4,
        "command": ["torchrun", "--nproc-per-node=2", "a.py"],
        "args": [],
    }
    found = convert(yaml.safe_dump(job))
    assert found.document["spec"]["nprocPerNode"] == 2
    assert "spec.trainer.numProcPerNode: 4: because" in found.comments()


@pytest.mark.parametrize("flag", ["--use_env", "--use-env"])
def test_the_argument_for_the_local_rank_is_noted_only_without_use_env(flag):
    module = ("python", "-m", "torch.distributed.launch")
    assert "--local-rank" in converted(*module, "a.py")[1]
    assert "--local-rank" not in converted(*module, flag, "a.py")[1]


def test_two_dashes_end_the_flags_of_torchrun():
    spec, comments = converted("torchrun", "--nproc-per-node=2", "--", "a.py", "--", "x")
    assert spec["args"] == ["a.py", "--", "x"]
    assert "unknown flag" not in comments


def test_fields_of_the_job_stay_without_a_flag():
    elastic = {"maxRestarts": 5, "nProcPerNode": 2}
    fields = {"nprocPerNode": "4", "elasticPolicy": elastic, "runPolicy": {"backoffLimit": 3}}
    spec, comments = converted("torchrun", "a.py", spec=fields)
    assert (spec["nprocPerNode"], spec["failurePolicy"]) == (4, {"maxRestarts": 3})
    assert "spec.elasticPolicy.maxRestarts: 5: because spec.failurePolicy.maxRestarts" in comments


def test_variables_of_the_job_are_written_as_kubernetes_expands_them():
    env = [{"name": "DATA", "value": "/data"}, {"name": "OPTS", "value": "--a 1"}]
    spec, comments = converted("sh", "-c", "torchrun a.py $DATA ${OPTS} $RANK", env=env)
    assert spec["args"] == ["a.py", "$(DATA)", "--a", "1", "$RANK"]
    assert "RANK in args: nothing expands it; instead: write $(DDP_NODE_INDEX)" in comments


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("$(MASTER_ADDR)", 'read os.environ["MASTER_ADDR"] in the script'),
        ("--node=$(PET_NODE_RANK)", "write $(DDP_NODE_INDEX) for the number of the node"),
        ("$(OTHER)", "set OTHER in spec.env and write $(OTHER)"),
        ("$(date +%s)", "write its value"),
    ],
)
def test_a_variable_that_nothing_expands_is_noted(word, instead):
    _, comments = converted("python", "a.py", word)
    assert instead in comments


def test_variables_of_the_other_operator_are_noted_in_env_and_setup():
    env = [{"name": "URL", "value": "tcp://$(MASTER_ADDR):1"}]
    text = "if [ $RANK = 0 ]; then touch a; fi; torchrun a.py"
    spec, comments = converted("sh", "-c", text, env=env)
    assert spec["setup"] == "if [ $RANK = 0 ]; then touch a; fi"
    assert (
        "RANK in setup: the setup runs before torchrun; instead: write $DDP_NODE_INDEX" in comments
    )
    assert "the variable URL: nothing expands MASTER_ADDR" in comments


def test_variables_that_torchrun_sets_are_dropped():
    env = [{"name": "MASTER_ADDR", "value": "x"}, {"name": "A", "value": "b"}]
    spec, comments = converted(env=env)
    assert spec["env"] == [{"name": "A", "value": "b"}]
    assert "MASTER_ADDR" in comments


# Shell


def test_lines_before_the_training_become_the_setup():
    text = (
        "cd /app && pip install -e .\n"
        "if [ -f extra.txt ]; then\n  pip install -r extra.txt\nfi\n"
        "A=1 torchrun a.py\n"
        "touch done"
    )
    spec, comments = converted("bash", "-c", text)
    assert spec["setup"] == (
        "pip install -e .\nif [ -f extra.txt ]; then\n  pip install -r extra.txt\nfi"
    )
    (trainer,) = spec["podTemplate"]["spec"]["containers"]
    assert trainer == {"name": "trainer", "workingDir": "/app"}
    assert spec["env"] == [{"name": "A", "value": "1"}]
    assert '"touch done": because it ran after the training' in comments


def test_a_folder_that_the_setup_makes_is_a_part_of_the_script():
    text = "git clone https://example.com/r.git && cd r && python a.py"
    spec, comments = converted("bash", "-c", text)
    assert spec["args"] == ["r/a.py"]
    assert "the script is started by its path in this folder" in comments


def test_a_function_of_the_sdk_is_written_by_the_setup():
    text = (
        "\nread -r -d '' SCRIPT << EOM\n\nimport torch\nprint(1)\n\nEOM\n"
        'printf "%s" "$SCRIPT" > "train.py"\ntorchrun "train.py"'
    )
    spec, _ = converted("bash", "-c", text)
    assert spec["setup"].startswith('cat > "train.py" << EOM\n\nimport torch')
    assert spec["args"] == ["train.py"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a && b; c | d\ne &", ["a", "b", "c | d", "e"]),
        ("a 'x; y' \"z && w\" # no; b", ["a 'x; y' \"z && w\""]),
        ("a \\\n  b", ["a    b"]),
        ("a > f 2>&1; b &> g", ["a > f 2>&1", "b &> g"]),
        ("a $(b | c; d) e", ["a $(b | c; d) e"]),
        ("for i in 1; do\na\ndone; b", ["for i in 1; do\na\ndone", "b"]),
        ("f() { a; b; }\nc", ["f() { a; b; }", "c"]),
        ("cat <<EOF\na && b\nEOF\nc", ["cat <<EOF\na && b\nEOF", "c"]),
        ("a || b", ["a", "b"]),
        ("echo $#; a", ["echo $#", "a"]),
        ("", []),
    ],
)
def test_a_script_is_split_into_its_statements(text, found):
    assert [one.text for one in read_shell(text)] == found


def test_a_statement_knows_its_line():
    assert [one.line for one in read_shell("# x\na\n\nb \\\n c; d\ne")] == [2, 4, 5, 6]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a 'b c' $(d e) f", ["a", "b c", "$(d e)", "f"]),
        ("a --x=$(d (e)):1", ["a", "--x=$(d (e)):1"]),
        ("a `b c`", ["a", "`b c`"]),
        ("a 'b", []),
    ],
)
def test_a_substitution_is_one_word(text, words):
    assert split_words(text) == words


# TrainJob


def test_a_runtime_is_merged_with_its_job():
    spec = spec_of("trainjob", "fsdp-efa.yaml")
    assert (spec["nodes"], spec["nprocPerNode"]) == (2, 8)
    assert spec["args"] == ["/fsdp/train.py", "--model", "llama"]
    env = {one["name"]: one["value"] for one in spec["env"]}
    assert env == {"FI_PROVIDER": "tcp", "LOGLEVEL": "INFO"}


def test_a_runtime_may_be_in_another_file():
    job, runtime = (MANIFESTS / "trainjob/volcano.yaml").read_text().split("---\n")
    found = convert(job, runtime=runtime)
    assert found.document["spec"]["scheduling"] == {"gang": "Volcano"}


def test_what_a_job_overrides_in_its_runtime_is_named():
    job, runtime = map(load_yaml, (MANIFESTS / "trainjob/volcano.yaml").read_text().split("---\n"))
    job["spec"]["trainer"] = {"image": "own:1", "numNodes": 7, "numProcPerNode": 6}
    comments = convert(yaml.safe_dump(job), runtime=yaml.safe_dump(runtime)).comments()
    for field, value in (("numNodes", 7), ("numProcPerNode", 6)):
        assert f"because spec.trainer.{field} is {value}, and overrides it" in comments
    assert "because spec.trainer.image is set" in comments


def test_a_job_without_its_runtime_is_an_error_if_only_that_has_the_command():
    job, runtime = (MANIFESTS / "trainjob/volcano.yaml").read_text().split("---\n")
    with pytest.raises(SpecError, match=r"spec\.trainer\.command: .*--runtime FILE"):
        convert(job)
    with pytest.raises(SpecError, match="the runtime is ClusterTrainingRuntime volcano, and"):
        convert(job, runtime=runtime.replace("name: volcano", "name: other"))


def test_remarks_and_errors_name_the_fields_of_the_trainjob():
    job, runtime = map(load_yaml, (MANIFESTS / "trainjob/volcano.yaml").read_text().split("---\n"))
    env = [{"name": "RANK", "value": "1"}, {"name": "A", "valueFrom": {"foo": {}}}]
    trainer = {"image": "own:1", "command": ["torchrun", "a.py", "$B"], "env": env}
    job["spec"]["trainer"] = trainer
    for files in ([job], [job, runtime]):
        comments = convert(yaml.safe_dump_all(files)).comments()
        assert 'spec.trainer.env[0]: {"name": "RANK"' in comments
        assert "spec.trainer.env[1].valueFrom.foo: {}: because" in comments
        assert "spec.trainer.command: B in args" in comments
        assert 'dropped: spec.trainer.image: "' not in comments
    trainer["resourcesPerNode"] = {"limits": {"cpu": "many"}}
    for files in ([job], [job, runtime]):
        with pytest.raises(SpecError, match=r": spec\.trainer\.resourcesPerNode\.limits\.cpu: "):
            convert(yaml.safe_dump_all(files))


def test_variables_of_a_trainjob_and_its_runtime_have_their_own_paths():
    job, runtime = map(load_yaml, (MANIFESTS / "trainjob/volcano.yaml").read_text().split("---\n"))
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    container["env"] = [{"name": "RANK", "value": "0"}, {"name": "B", "value": "0"}]
    job["spec"]["trainer"] = {"env": [{"name": "RANK", "value": "1"}, {"name": "C", "foo": 1}]}
    comments = convert(yaml.safe_dump_all([job, runtime])).comments()
    assert 'containers[0].env[0]: {"name": "RANK", "value": "0"}: because spec.trainer' in comments
    assert 'spec.trainer.env[0]: {"name": "RANK", "value": "1"}: because torchrun' in comments
    assert "spec.trainer.env[1].foo: 1: because" in comments


def test_a_variable_of_a_trainjob_stays_before_those_that_use_it():
    job, runtime = map(load_yaml, (MANIFESTS / "trainjob/volcano.yaml").read_text().split("---\n"))
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    container["env"] = [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)"}]
    job["spec"]["trainer"] = {"env": [{"name": "A", "value": "2"}]}
    spec = convert(yaml.safe_dump_all([job, runtime])).document["spec"]
    assert [one["value"] for one in spec["env"]] == ["2", "$(A)"]


def test_python_of_a_trainjob_was_started_once_in_each_pod():
    job = load_yaml((MANIFESTS / "trainjob/no-runtime.yaml").read_text())
    trainer = {"image": "i", "command": ["python", "a.py"], "numProcPerNode": 4}
    job["spec"]["trainer"] = trainer
    found = convert(yaml.safe_dump(job))
    assert found.document["spec"]["nprocPerNode"] == 4
    assert "the Trainer started python once in each pod" in found.comments()


def test_without_a_command_the_training_is_in_the_args():
    job = load_yaml((MANIFESTS / "trainjob/no-runtime.yaml").read_text())
    job["spec"]["trainer"] = {"image": "i", "args": ["torchrun", "a.py", "$B"]}
    assert "spec.trainer.args: B in args" in convert(yaml.safe_dump(job)).comments()


def test_ports_keep_their_places_in_remarks():
    ports = [{"containerPort": 29500, "name": "pytorchjob-port"}, {"containerPort": 80, "foo": 1}]
    _, comments = converted("torchrun", "a.py", ports=ports)
    assert "ports[1].foo: 1: because" in comments


def test_a_runtime_of_mpi_is_an_error():
    text = (MANIFESTS / "trainjob/volcano.yaml").read_text()
    text = text.replace("torch: {numProcPerNode: 2}", "mpi: {numProcPerNode: 2}")
    with pytest.raises(SpecError, match="is a runtime of mpi"):
        convert(text)


def test_the_controller_of_a_trainjob_is_not_that_of_a_ddpjob():
    job = load_yaml((MANIFESTS / "trainjob/no-runtime.yaml").read_text())
    job["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    found = convert(yaml.safe_dump(job))
    assert "managedBy" not in found.document["spec"]
    assert "spec.managedBy" in found.comments()
    page = (Path(__file__).parents[2] / "docs/users/migrate.md").read_text()
    (row,) = re.findall(r"^\| `managedBy` .*", page, re.MULTILINE)
    assert "| none" in row


def test_initializers_are_named():
    comments = comments_of("trainjob", "initializers.yaml")
    assert "hf://tatsu-lab/alpaca" in comments
    assert "instead: an init container" in comments


def test_patches_of_the_runtime_concern_the_nodes():
    spec = spec_of("trainjob", "patches.yaml")
    assert spec["serviceAccountName"] == "trainer"
    assert spec["volumeMounts"] == [{"name": "data", "mountPath": "/data"}]
    assert "dataset-initializer" in comments_of("trainjob", "template-overrides.yaml")


# sbatch


def test_options_of_slurm_become_the_size_and_the_resources():
    spec = spec_of("sbatch", "torchrun.sbatch")
    assert (spec["nodes"], spec["nprocPerNode"], spec["accelerator"]) == (4, 8, "gpu")
    assert spec["activeDeadlineSeconds"] == 60 * 3600
    assert spec["resources"] == {
        "limits": {"nvidia.com/gpu": 8, "memory": "1000Gi"},
        "requests": {"cpu": "96", "memory": "1000Gi"},
    }
    assert spec["args"] == ["train.py", "--epochs", "90", "--name", "a b"]


def test_tasks_of_srun_become_processes():
    spec = spec_of("sbatch", "srun-python.sbatch")
    assert (spec["nodes"], spec["nprocPerNode"]) == (2, 4)
    assert spec_of("sbatch", "cpu.sbatch")["nprocPerNode"] == 4
    assert "read RANK, LOCAL_RANK and WORLD_SIZE" in comments_of("sbatch", "cpu.sbatch")


def test_arrays_of_bash_are_the_words_of_the_command():
    spec = spec_of("sbatch", "arrays.sbatch")
    assert (spec["nodes"], spec["nprocPerNode"]) == (2, 8)
    assert spec["args"] == ["./train.py", "--epochs", "3", "--name", "a  b", "--lr", "0.1"]
    comments = comments_of("sbatch", "arrays.sbatch")
    # What a condition sets, and what another program makes, is only known to a shell.
    assert '"${CONTAINER[@]}": because only a shell knows the value' in comments
    assert "scontrol show hostnames" in comments
    assert "declare -a CONTAINER" in comments


@pytest.mark.parametrize("start", ["", "srun "])
def test_a_command_in_an_array_is_the_training(start):
    lines = ("CMD=( torchrun train.py", "  --epochs 3 )", f'{start}"${{CMD[@]}}"')
    spec, _ = converted_script(*lines)
    assert spec["args"] == ["train.py", "--epochs", "3"]


def test_the_image_of_the_containers_is_taken():
    text = (MANIFESTS / "sbatch/pyxis.sbatch").read_text()
    assert convert(text).document["spec"]["image"] == "nvcr.io/nvidia/pytorch:25.01-py3"
    text = (MANIFESTS / "sbatch/apptainer.sbatch").read_text()
    assert convert(text).document["spec"]["image"] == "pytorch/pytorch:2.9.1"


def test_a_script_without_an_image_needs_one():
    with pytest.raises(SpecError, match="give --image IMAGE"):
        convert(a_script("srun torchrun a.py"))


@pytest.mark.parametrize(
    "line",
    [
        "module load cuda",
        "source venv/bin/activate",
        "conda activate x",
        "mkdir -p out",
        "cd /work",
        "export A=$(hostname)",
        "export MASTER_ADDR=x",
        "while true; do sleep 1; done",
        "./prepare",
        "scontrol show job",
        "#SBATCH --partition=p",
        "#SBATCH --odd=1",
        "#SBATCH stray",
    ],
)
def test_a_line_that_no_pod_can_run_is_named(line):
    spec, comments = converted_script(line, "srun torchrun a.py")
    what = line.removeprefix("#SBATCH ").removeprefix("export ")
    assert what.partition("=")[0] in comments
    assert "setup" not in spec


def test_exported_variables_become_those_of_the_pods():
    spec, _ = converted_script("export A=b C='d e'", "F=g", "srun torchrun a.py $A $F")
    assert spec["env"] == [{"name": "A", "value": "b"}, {"name": "C", "value": "d e"}]
    assert spec["args"] == ["a.py", "$(A)", "g"]


def test_an_open_quote_is_named():
    with pytest.raises(SpecError, match="has an open quote"):
        convert(a_script("#SBATCH --comment='a", "torchrun a.py"), image="i")
    _, comments = converted_script("srun torchrun a.py", "echo 'a")
    assert "echo 'a" in comments


def test_the_signal_before_the_end_is_the_grace_period():
    spec, comments = converted_script("#SBATCH --signal=USR1@60", "torchrun a.py")
    assert spec["podTemplate"]["spec"]["terminationGracePeriodSeconds"] == 75
    assert "handle SIGTERM" in comments
    _, comments = converted_script("#SBATCH --signal=TERM@60", "torchrun a.py")
    assert "SIGTERM" not in comments


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("30", 1800), ("1:30", 90), ("2:00:00", 7200), ("1-0", 86400), ("1-2:30", 95400)],
)
def test_a_time_of_slurm_has_days_hours_or_minutes(time, seconds):
    assert seconds_of(time, "") == seconds


def test_a_name_of_slurm_becomes_that_of_a_job():
    assert job_name("My_Job.2") == "my-job-2"
    assert job_name("2x") == "job-2x"


# The command


def run(*words, stdin=""):
    return CliRunner().invoke(app, ["convert", *words], input=stdin)


def test_the_command_prints_only_the_manifest_and_one_line_about_it():
    done = run(str(MANIFESTS / "pytorchjob/volcano.yaml"))
    assert done.exit_code == 0
    assert load_yaml(done.stdout)["kind"] == "DDPJob"
    assert done.stderr == ("converted PyTorchJob gang: 3 things were dropped, see the comments\n")


def test_the_command_reads_stdin_and_several_jobs():
    text = (MANIFESTS / "pytorchjob/mnist.yaml").read_text()
    done = run("-", stdin=f"{text}---\n{text.replace('name: mnist', 'name: other')}")
    assert done.exit_code == 0
    names = [one["metadata"]["name"] for one in load_all_yaml(done.stdout)]
    assert names == ["mnist", "other"]
    assert "nothing was dropped" in done.stderr


def test_the_command_takes_the_runtime_of_a_trainjob(tmp_path):
    job, runtime = (MANIFESTS / "trainjob/coscheduling.yaml").read_text().split("---\n")
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "runtime.yaml").write_text(runtime)
    done = run(str(tmp_path / "job.yaml"), "--runtime", str(tmp_path / "runtime.yaml"))
    assert load_yaml(done.stdout)["spec"]["scheduling"] == {"gang": "Coscheduling"}


def test_the_command_takes_the_image_of_a_script():
    done = run(str(MANIFESTS / "sbatch/single.sbatch"), "--image", "i:1")
    manifest = load_yaml(done.stdout)
    assert (manifest["metadata"]["name"], manifest["spec"]["image"]) == ("single", "i:1")
    assert done.stderr.startswith("converted sbatch script single: ")


def test_a_line_that_writes_a_file_is_not_only_printing():
    spec, comments = converted("sh", "-c", "echo hello; echo 1 > a; date | tee b\ntorchrun a.py")
    assert spec["setup"] == "echo 1 > a\ndate | tee b"
    assert '"echo hello": because it only prints' in comments


def test_a_job_that_would_not_be_valid_is_not_printed():
    done = run("-", stdin=a_pytorchjob().replace("name: j\n", "name: Upper\n"))
    assert (done.exit_code, done.stdout) == (1, "")
    assert "the DDPJob would not be valid: metadata.name: must be" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{apiVersion: ddpjob.dev/v1alpha1, kind: DDPJob}", "a DDPJob needs no conversion"),
        ("{apiVersion: kubeflow.org/v2beta1, kind: MPIJob}", "got MPIJob"),
        ("{apiVersion: v1, kind: Pod}", address_of("users/migrate.md")),
        ("a: [", "is not YAML"),
        ("", "got nothing"),
    ],
)
def test_another_file_is_an_error_with_a_sentence(text, sentence):
    done = run("-", stdin=text)
    assert (done.exit_code, done.stdout) == (2, "")
    assert sentence in " ".join(done.stderr.replace("│", " ").split())


def test_a_template_that_is_not_filled_is_named():
    job = a_pytorchjob(resources={"limits": {"nvidia.com/gpu": "${GPUS}"}})
    done = run("-", stdin=job)
    sentence = " ".join(done.stderr.replace("│", " ").split())
    assert 'got "${GPUS}"; the manifest is a template: fill it first' in sentence


def test_the_image_can_be_given_for_a_manifest_too():
    done = run("-", "--image", "other:2", stdin=a_pytorchjob())
    assert load_yaml(done.stdout)["spec"]["image"] == "other:2"
    assert 'image: "i": because spec.image is "other:2", from --image' in done.stdout
    job = (MANIFESTS / "trainjob/no-runtime.yaml").read_text().replace("image: train:1", "")
    found = convert(job, image="other:2")
    assert found.document["spec"]["image"] == "other:2"


def test_one_thing_that_was_dropped_is_one_thing():
    found = convert(a_pytorchjob(spec={"elasticPolicy": {"standalone": True}}))
    assert summary(found) == (
        "converted PyTorchJob j: 1 thing was dropped, 1 to look at, see the comments"
    )


@pytest.mark.parametrize("value", [5, "x", [], {}, [{}], {"a": 1}, True, 1.5, "${X:-$(y)}"])
@pytest.mark.parametrize("name", ["pytorchjob/shell-command", "trainjob/fsdp-efa"])
def test_a_value_of_another_type_is_no_traceback(name, value):
    documents = json.loads(json.dumps(read_documents((MANIFESTS / f"{name}.yaml").read_text())))
    for *parents, last in fields(documents):
        changed = copy.deepcopy(documents)
        place = changed
        for step in parents:
            place = place[step]
        place[last] = value
        with suppress(SpecError):
            for one in convert_documents(changed):
                problem_of(one.document)


def fields(value, path=()):
    """Yield the paths of all fields below the documents."""
    if len(path) > 1:
        yield path
    inner = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else inner:
        yield from fields(item, (*path, key))


def test_the_comments_in_the_documentation_are_those_of_the_command():
    page = (Path(__file__).parents[2] / "docs/users/migrate.md").read_text()
    shown = re.findall(r"^# (?:Converted|dropped|note).*\n", page, re.MULTILINE)
    assert shown
    assert not set(shown) - set(comments_of("pytorchjob", "volcano.yaml").splitlines(keepends=True))
