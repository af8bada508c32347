"""Wrong use ends with exit code 2 and a message with advice, without a traceback."""

from contextlib import nullcontext

import pytest

from ddp_trainer.cli import command_line, main
from ddp_trainer.cli.flags import LARGEST_INTEGER
from ddp_trainer.cli.options import WORKLOADS
from ddp_trainer.errors import RetryableError, UserError
from ddp_trainer.ranks import group
from ddp_trainer.ranks.group import read_launch
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.interrupt import StopVote

from .launch import TRAINER, alone, torchrun

LAUNCHED = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "the following arguments are required: WORKLOAD"),
        ("imagenet", "invalid choice: 'imagenet'"),
        ("digts", "(did you mean digits?)"),
        ("digits --epoch 3", "unrecognized arguments: --epoch 3 (did you mean --epochs?)"),
        ("cifar10 --data . --recipe fats", "invalid choice: 'fats'"),
        ("cifar10 --data . --recipe fats", "(did you mean fast?)"),
        (
            "digits --epochs 0",
            "argument --epochs/--num-epochs: '0' is not an integer >= 1",
        ),
        (
            "digits --batch-size many",
            "argument --batch-size: 'many' is not an integer >= 1",
        ),
        ("digits --learning-rate -1", "argument --learning-rate"),
        ("digits --seed -1", "argument --seed/--random-seed"),
        (
            "digits --seed 9223372036854775808",
            "9223372036854775808 is greater than 9,223,372,036,854,775,807",
        ),
        ("digits --timeout 1e15", "'1e15' is not a number > 0 and < 1,000,000,000"),
        (
            "mnist --fake --data . --num_epochs 3",
            "--epochs, --data: no effect with --fake, which only measures the speed; remove it",
        ),
        ("mnist --data . --rounds 3", "--rounds: no effect without --fake; remove it"),
        ("skewed --uneven --skew 2", "--skew: no effect with --uneven; remove it"),
        ("cifar10", "the following arguments are required: --data"),
        ("cifar10 --data . --stem 5x5", "argument --stem: invalid choice: '5x5'"),
        ("toy --epochs 3", "unrecognized arguments: --epochs 3"),
    ],
)
def test_a_wrong_flag_is_named(arguments, sentence, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        command_line.parse(arguments.split())
    assert sentence in capsys.readouterr().err


def test_flags_may_have_underscores():
    parsed = command_line.parse(
        [
            "cifar10",
            "--data",
            "a_b",
            "--num_epochs=3",
            "--batch_size",
            "256",
            "--random_seed",
            "5",
            "--local_rank",
            "1",
        ]
    )
    assert parsed.workload == "cifar10"
    given = parsed.options
    assert (str(given.data), given.epochs, given.batch_size, given.seed, given.local_rank) == (
        "a_b",
        3,
        256,
        5,
        1,
    )


@pytest.mark.parametrize(
    "before", [["--local-rank=1"], ["--local_rank=1"], ["--local-rank", "1"], ["--local_rank", "1"]]
)
def test_the_local_rank_may_stand_before_the_workload(before):
    parsed = command_line.parse([*before, "toy", "--steps", "3"])
    assert (parsed.workload, parsed.options.steps, parsed.options.local_rank) == ("toy", 3, 1)


def test_a_switch_takes_a_value_as_sagemaker_passes_it():
    def resume(*words):
        return command_line.parse(["cifar10", "--data", "x", *words]).options.resume

    assert [
        resume(),
        resume("--resume"),
        resume("--resume", "True"),
        resume("--resume", "false"),
    ] == [
        False,
        True,
        True,
        False,
    ]


def test_only_rank_0_reports_a_wrong_flag(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        command_line.parse(["digits", "--epochs", "0"])
    assert capsys.readouterr().err == ""


def test_the_checkpoint_folder_defaults_to_the_environment(monkeypatch):
    monkeypatch.setenv("DDP_CHECKPOINT_DIR", "/checkpoints/job")
    assert str(command_line.parse(["digits"]).options.checkpoint_dir) == "/checkpoints/job"
    assert (
        str(command_line.parse(["digits", "--checkpoint-dir", "here"]).options.checkpoint_dir)
        == "here"
    )
    monkeypatch.setenv("DDP_CHECKPOINT_DIR", "")
    assert command_line.parse(["digits"]).options.checkpoint_dir is None


def test_a_checkpoint_folder_in_the_environment_is_never_a_useless_flag(monkeypatch):
    monkeypatch.setenv("DDP_CHECKPOINT_DIR", "./checkpoints//job/")
    assert command_line.parse(["mnist", "--fake", "--rounds", "2"]).options.fake


def test_the_largest_numbers_can_be_used(monkeypatch):
    # pytest handles the signals itself.
    monkeypatch.setattr(StopVote, "_listen", lambda vote: None)
    found = command_line.parse(["toy", "--seed", str(LARGEST_INTEGER), "--timeout", "999999999"])
    assert main.run(found) == 0


def test_sagemakers_channel_and_model_folder_are_defaults(monkeypatch):
    monkeypatch.setenv("SM_CHANNEL_TRAINING", "/opt/ml/input/data/training")
    monkeypatch.setenv("SM_MODEL_DIR", "/opt/ml/model")
    found = command_line.parse(["cifar10"]).options
    assert (str(found.data), str(found.model_dir)) == (
        "/opt/ml/input/data/training",
        "/opt/ml/model",
    )
    assert str(command_line.parse(["cifar10", "--data", "here"]).options.data) == "here"


@pytest.mark.parametrize(
    ("channels", "data"),
    [
        ({"TRAIN": "/data/train", "VAL": "/data/val"}, "/data"),
        ({"TRAIN": "/data/train/", "VAL": "/data/val"}, "/data"),
        ({"PHOTOGRAPHS": "/data/photographs"}, "/data/photographs"),
        ({"TRAINING": "/data/training", "VAL": "/elsewhere/val"}, "/data/training"),
    ],
)
def test_sagemakers_channels_may_have_any_names(channels, data, monkeypatch):
    for name, folder in channels.items():
        monkeypatch.setenv(f"SM_CHANNEL_{name}", folder)
    assert str(command_line.parse(["hymenoptera"]).options.data) == data


def test_channels_without_a_common_folder_do_not_name_the_data(capsys, monkeypatch):
    monkeypatch.setenv("SM_CHANNEL_TRAIN", "/one/train")
    monkeypatch.setenv("SM_CHANNEL_VAL", "/two/val")
    with pytest.raises(SystemExit, match="2"):
        command_line.parse(["hymenoptera"])
    assert "the following arguments are required: --data" in capsys.readouterr().err


def test_every_workload_explains_itself(capsys):
    for arguments in (["--help"], *([name, "--help"] for name in WORKLOADS)):
        with pytest.raises(SystemExit, match="0"):
            command_line.parse(arguments)
        assert len(capsys.readouterr().out.splitlines()) > 10


def test_without_variables_there_is_no_launch():
    assert read_launch({}) is None
    assert read_launch(LAUNCHED).world_size == 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"MASTER_ADDR": ""},
            "MASTER_ADDR not set, although RANK or WORLD_SIZE is; start the script with torchrun",
        ),
        ({"MASTER_ADDR": "", "RANK": ""}, "RANK and MASTER_ADDR not set"),
        ({"RANK": "two"}, "RANK: must be an integer, got 'two'"),
        ({"RANK": "2"}, "RANK: must be less than WORLD_SIZE=2, got 2"),
    ],
)
def test_an_incomplete_launch_is_refused(change, sentence):
    with pytest.raises(UserError, match=sentence):
        read_launch(LAUNCHED | change)


def test_wrong_use_ends_with_a_message_and_exit_code_2():
    run = alone(*TRAINER, "digits", RANK=0, WORLD_SIZE=2)
    assert run.finish() == 2
    assert run.stderr.count("\n") == 1
    assert "MASTER_ADDR and MASTER_PORT not set" in run.stderr


def test_a_rank_prints_the_error_that_it_has_alone():
    run = alone(
        *TRAINER,
        "toy",
        "--device",
        "cuda",
        **LAUNCHED | {"RANK": 1, "LOCAL_RANK": 1, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.finish() == 1
    assert run.stderr == (
        "ddp-trainer: rank 1: device cuda: PyTorch finds no GPU; check nvidia-smi, or choose "
        "the device cpu\n"
    )


def fail(error):
    raise error


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("kind", [UserError, RetryableError])
@pytest.mark.parametrize("failed", [0, 1])
def test_an_error_of_all_ranks_is_printed_once_per_node(rank, kind, failed, capsys, monkeypatch):
    # Each node has two ranks.
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
    monkeypatch.setenv("WORLD_SIZE", "4")
    errors = [None] * 4
    errors[failed] = kind("no data")
    monkeypatch.setattr(Runtime, "gather", lambda runtime, item: errors)
    monkeypatch.setattr(main, "_train", lambda *_: Runtime(rank, 4).run_on_all(lambda: None))
    assert main.run(command_line.parse(["toy"])) == kind.exit_code
    whose = "rank 1: " if failed else ""
    printed = "" if rank == 1 else f"ddp-trainer: {whose}no data\n"
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_the_first_rank_is_one_of_all(rank):
    runtime = Runtime(rank, 2)
    outcome = None, UserError("no folder")
    object.__setattr__(runtime, "broadcast", lambda item: outcome)
    with pytest.raises(UserError, match="no folder") as caught:
        runtime.on_main(lambda: fail(UserError("no folder")))
    assert caught.value.is_common


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "arguments", ["mnist", "hymenoptera --data . --frozen", "model_parallel --micro-batches 30"]
)
def test_options_that_all_ranks_have_are_refused_once(arguments, rank, capsys, monkeypatch):
    command = command_line.parse(arguments.split())
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(group, "process_group", lambda **_: nullcontext(Runtime(rank, 2)))
    assert main.run(command) == 2
    assert capsys.readouterr().err.count("ddp-trainer: ") == (rank == 0)


def test_two_ranks_print_one_message_and_torchrun_repeats_it_in_its_summary(tmp_path):
    run = torchrun(*TRAINER, "cifar10", "--data", tmp_path)
    assert run.finish() == 1
    assert run.stderr.count("ddp-trainer: no CIFAR-10 in") == 1
    assert "UserError: no CIFAR-10 in" in run.stderr
    assert run.events == run.stray == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("mnist", "mnist needs real images (--data FOLDER) or random ones (--fake)"),
        ("hymenoptera --data . --frozen", "--frozen: pretrained weights are required"),
        (
            "model_parallel --micro-batches 30",
            "--micro-batches 30 is more than the batch of 20 samples",
        ),
        (
            "model-parallel --micro-batches 30",
            "--micro-batches 30 is more than the batch of 20 samples",
        ),
        ("resnet50", "at least two processes are required"),
        ("digits --resume", "--resume: --checkpoint-dir is required; omit --resume"),
        ("digits --checkpoint-dir /proc/none", "/proc/none: cannot be written"),
    ],
)
def test_wrong_use_is_refused_before_training(arguments, sentence, capfd):
    assert main.run(command_line.parse(arguments.split())) == 2
    assert f"ddp-trainer: {sentence}" in capfd.readouterr().err
