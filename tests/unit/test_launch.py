"""torchrun's arguments on SageMaker and Slurm. These tests need no torch."""

import json

import pytest

from ddp_trainer.cli import clusters, launch
from ddp_trainer.errors import UserError

TWELVE = [f"algo-{number}" for number in range(1, 13)]


def sagemaker(host: str, **more: str) -> dict[str, str]:
    hosts = json.dumps(sorted(TWELVE))  # as strings: algo-1, algo-10, algo-11, algo-12, algo-2, …
    return {
        "SM_HOSTS": hosts,
        "SM_CURRENT_HOST": host,
        "SM_NUM_GPUS": "8",
        "SAGEMAKER_JOB_NAME": "job-7",
        **more,
    }


def slurm(**more: str) -> dict[str, str]:
    step = {"SLURM_JOB_NODELIST": "gpu[01-99]", "SLURM_STEP_NODELIST": "gpu[08-10,12],login"}
    return {**step, "SLURM_NODEID": "3", "SLURM_JOB_ID": "77", **more}


def arguments(environment: dict[str, str]) -> dict[str, str]:
    return dict(
        word.split("=", 1) for word in launch.torchrun_arguments(clusters.find_cluster(environment))
    )


def test_twelve_sagemaker_hosts_are_ranked_by_their_numbers():
    found = [arguments(sagemaker(host)) for host in TWELVE]
    assert {one["--rdzv-endpoint"] for one in found} == {"algo-1:29400"}
    assert {one["--rdzv-id"] for one in found} == {"job-7"}
    assert {(one["--nnodes"], one["--nproc-per-node"]) for one in found} == {("12", "8")}
    assert ["is_host=true" in one["--rdzv-conf"] for one in found] == [True] + [False] * 11
    addresses = [one["--local-addr"] for one in found]
    assert addresses == sorted(addresses), "c10d sorts them as strings"
    assert addresses[0] == "algo-1", "only this one is looked up"


def test_a_machine_without_gpus_has_one_process_and_the_port_can_be_set():
    one = arguments(sagemaker("algo-2", SM_NUM_GPUS="0", RDZV_PORT="7777"))
    assert one["--nproc-per-node"] == "1"
    assert one["--rdzv-endpoint"] == "algo-1:7777"


def test_neuron_cores_count_and_the_user_can_set_the_number_of_processes():
    assert (
        arguments(sagemaker("algo-2", SM_NUM_GPUS="0", SM_NUM_NEURONS="32"))["--nproc-per-node"]
        == "32"
    )
    for environment in (sagemaker("algo-2"), slurm(SLURM_GPUS_ON_NODE="4")):
        one = arguments({**environment, "PET_NPROC_PER_NODE": "2"})
        assert "--nproc-per-node" not in one, "torchrun reads the variable"


def test_slurm_nodes_keep_the_order_of_the_list():
    found = clusters.find_cluster(slurm(SLURM_GPUS_ON_NODE="4", SLURM_RESTART_COUNT="2"))
    assert found == clusters.Cluster(
        ("gpu08", "gpu09", "gpu10", "gpu12", "login"), 3, 4, "77-2", 29477
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("one", "one"),
        ("a,b", "a b"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[1,3-4,7]x", "n1x n3x n4x n7x"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("a[1-2],b-[3].c,d", "a1 a2 b-3.c d"),
    ],
)
def test_node_lists_are_expanded_as_scontrol_does(text, names):
    assert clusters.expand_node_list(text) == tuple(names.split())


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (sagemaker("algo-13"), "SM_CURRENT_HOST: must be one of .*, got 'algo-13'"),
        (
            sagemaker("algo-1", SM_HOSTS="algo-1"),
            "SM_HOSTS: must be a JSON list of names, got 'algo-1'",
        ),
        (sagemaker("algo-1", SM_NUM_GPUS="many"), "SM_NUM_GPUS: must be an integer, got 'many'"),
        (
            slurm(SLURM_NODEID=""),
            "SLURM_NODEID is not set, although SLURM_STEP_NODELIST has several nodes",
        ),
        (
            slurm(SLURM_NODEID="5"),
            "SLURM_NODEID: must be less than 5, the number of nodes in SLURM_STEP_NODELIST, got 5",
        ),
        (
            slurm(SLURM_LOCALID="1"),
            "Slurm started several launchers on one node; start one per node",
        ),
        (slurm(SLURM_STEP_NODELIST="n[1-"), "cannot parse Slurm's node list 'n[1-'"),
        (slurm(SLURM_STEP_NODELIST="n[a-c]"), "must have numbers in brackets, got [a-c]"),
        (slurm(SLURM_STEP_NODELIST=""), "cannot parse Slurm's node list ''"),
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, "start it on each with srun --ntasks-per-node=1"),
        (
            {"TRAINING_JOB_NAME": "job"},
            "SM_HOSTS is not set in this SageMaker job, so every host would train alone",
        ),
        (
            sagemaker("algo-1", RDZV_PORT="70000"),
            "RDZV_PORT: must be at most 65535, got 70000",
        ),
    ],
)
def test_an_incomplete_cluster_is_refused(environment, sentence):
    with pytest.raises(UserError, match=sentence.replace("[", r"\[")):
        clusters.find_cluster(environment)


def test_without_a_cluster_torchrun_runs_on_this_machine():
    assert clusters.find_cluster({"PATH": "/bin"}) is None
    assert clusters.find_cluster({"SLURM_JOB_NODELIST": "login"}) is None
    assert launch.torchrun_arguments(None) == ["--standalone"]


def test_a_single_node_uses_a_free_port():
    found = clusters.find_cluster(
        slurm(SLURM_STEP_NODELIST="gpu08", SLURM_NODEID="0", SLURM_GPUS_ON_NODE="4")
    )
    assert launch.torchrun_arguments(found) == ["--standalone", "--nproc-per-node=4"]


def test_a_node_waits_equally_long_for_the_first_node_and_for_all():
    assert arguments(slurm())["--rdzv-conf"] == "is_host=false,join_timeout=1800,read_timeout=1800"


@pytest.mark.parametrize("named", [["--train-script", "train.py"], ["--train-script=train.py"]])
def test_all_arguments_but_the_script_are_passed_on_unchanged(named):
    others = ["--learning_rate", "1e-3", "-x", "", "a b", "--flag=--train", "--", "--nnodes=3"]
    for at in range(len(others) + 1):
        assert launch.take_out_script([*others[:at], *named, *others[at:]]) == ("train.py", others)


@pytest.mark.parametrize(
    "words", [[], ["--train-script"], ["--train-script=a.py", "--train-script", "b.py"]]
)
def test_a_launch_without_its_script_is_refused(words):
    with pytest.raises(
        UserError, match="launch: --train-script with a file or a module is required once"
    ):
        launch.take_out_script(words)
