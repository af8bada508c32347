"""torchrun on clusters of other people: what the environment says, in torchrun's words. Needs no torch."""

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
    told = [arguments(sagemaker(host)) for host in TWELVE]
    assert {said["--rdzv-endpoint"] for said in told} == {"algo-1:29400"}
    assert {said["--rdzv-id"] for said in told} == {"job-7"}
    assert {(said["--nnodes"], said["--nproc-per-node"]) for said in told} == {("12", "8")}
    assert ["is_host=true" in said["--rdzv-conf"] for said in told] == [True] + [False] * 11
    addresses = [said["--local-addr"] for said in told]
    assert addresses == sorted(addresses), "c10d ranks them by these as strings"
    assert addresses[0] == "algo-1", "the only one that is looked up"


def test_a_machine_without_gpus_has_one_process_and_the_port_may_be_chosen():
    said = arguments(sagemaker("algo-2", SM_NUM_GPUS="0", RDZV_PORT="7777"))
    assert said["--nproc-per-node"] == "1"
    assert said["--rdzv-endpoint"] == "algo-1:7777"


def test_neuron_cores_count_too_and_the_user_may_choose_how_many_processes_there_are():
    assert (
        arguments(sagemaker("algo-2", SM_NUM_GPUS="0", SM_NUM_NEURONS="32"))["--nproc-per-node"]
        == "32"
    )
    for environment in (sagemaker("algo-2"), slurm(SLURM_GPUS_ON_NODE="4")):
        said = arguments({**environment, "PET_NPROC_PER_NODE": "2"})
        assert "--nproc-per-node" not in said, "torchrun reads the variable"


def test_slurms_nodes_are_in_the_order_of_its_list():
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
        (sagemaker("algo-13"), "SM_CURRENT_HOST is 'algo-13', which is none of SM_HOSTS"),
        (sagemaker("algo-1", SM_HOSTS="algo-1"), "SM_HOSTS is 'algo-1', no JSON list"),
        (sagemaker("algo-1", SM_NUM_GPUS="many"), "SM_NUM_GPUS is 'many', which is no number"),
        (
            slurm(SLURM_NODEID=""),
            "SLURM_STEP_NODELIST has several nodes and SLURM_NODEID is not set",
        ),
        (slurm(SLURM_NODEID="5"), "SLURM_NODEID is 5, and SLURM_STEP_NODELIST has 5 nodes"),
        (slurm(SLURM_LOCALID="1"), "Slurm started several launchers on a node"),
        (slurm(SLURM_STEP_NODELIST="n[1-"), "Slurm's node list is 'n[1-', which is none"),
        (slurm(SLURM_STEP_NODELIST="n[a-c]"), "which are no numbers"),
        (slurm(SLURM_STEP_NODELIST=""), "which is none"),
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, "start it on each with srun --ntasks-per-node=1"),
        ({"TRAINING_JOB_NAME": "job"}, "a SageMaker job without SM_HOSTS"),
        (
            sagemaker("algo-1", RDZV_PORT="70000"),
            "RDZV_PORT is '70000', which is no number of a port",
        ),
    ],
)
def test_half_a_cluster_is_refused(environment, sentence):
    with pytest.raises(UserError, match=sentence.replace("[", r"\[")):
        clusters.find_cluster(environment)


def test_without_a_cluster_torchrun_stays_on_this_machine():
    assert clusters.find_cluster({"PATH": "/bin"}) is None
    assert clusters.find_cluster({"SLURM_JOB_NODELIST": "login"}) is None
    assert launch.torchrun_arguments(None) == ["--standalone"]


def test_a_single_node_takes_a_free_port():
    found = clusters.find_cluster(
        slurm(SLURM_STEP_NODELIST="gpu08", SLURM_NODEID="0", SLURM_GPUS_ON_NODE="4")
    )
    assert launch.torchrun_arguments(found) == ["--standalone", "--nproc-per-node=4"]


def test_a_node_waits_as_long_for_the_first_one_as_for_all():
    assert arguments(slurm())["--rdzv-conf"] == "is_host=false,join_timeout=1800,read_timeout=1800"


@pytest.mark.parametrize("named", [["--train-script", "train.py"], ["--train-script=train.py"]])
def test_all_but_the_script_is_passed_on_byte_for_byte(named):
    others = ["--learning_rate", "1e-3", "-x", "", "a b", "--flag=--train", "--", "--nnodes=3"]
    for at in range(len(others) + 1):
        assert launch.take_out_script([*others[:at], *named, *others[at:]]) == ("train.py", others)


@pytest.mark.parametrize(
    "words", [[], ["--train-script"], ["--train-script=a.py", "--train-script", "b.py"]]
)
def test_a_launch_without_its_script_is_refused(words):
    with pytest.raises(UserError, match="launch needs --train-script"):
        launch.take_out_script(words)
