"""Training on real images: short versions of bench/accuracy.py, each with a bar that a broken training misses."""

from statistics import fmean

import pytest

from .launch import TRAINER, alone, torchrun


def result_of(run):
    assert run.finish() == 0, run.stderr
    return run.of("end")[0]["result"]


def test_two_ranks_train_in_bf16_and_torch_has_nothing_to_warn_of(real_data, tmp_path):
    data = real_data("cifar10", tmp_path, "cifar10/train/*/00[0-3]?.jpg", "cifar10/test/*/000?.jpg")
    flags = "--recipe fast --epochs 3 --batch-size 16 --learning-rate 0.01 --log-every 4 --precision bf16"
    run = torchrun(*TRAINER, "cifar10", "--data", data, *flags.split())
    assert 0 <= result_of(run)["accuracy"] <= 1
    (start,) = run.of("start")
    assert (start["train_samples"], start["test_samples"], start["precision"]) == (400, 100, "bf16")
    losses = [entry["loss"] for entry in run.of("train")]
    assert losses[-1] < losses[0]
    assert "UserWarning" not in run.stderr


def test_both_arms_of_mnist_are_equally_accurate(real_data, tmp_path):
    """With two ranks and one bucket they add the same numbers in the same order; at most 0.5 points is what is asked for."""
    folder = real_data("mnist", tmp_path)
    accuracies = [
        result_of(torchrun(*TRAINER, "mnist", "--data", folder, "--epochs", 1, "--arm", arm))[
            "accuracy"
        ]
        for arm in ("ddp", "native")
    ]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.005)
    assert min(accuracies) >= 0.75


def test_what_a_cifar10_job_has_learnt_helps_with_other_photographs(real_data, tmp_path):
    """From a random start the network has learnt next to nothing from 244 photographs after so few epochs."""
    data = real_data("cifar10", tmp_path, "cifar10/train/*/0[0-4]??.jpg", "cifar10/test/*/00??.jpg")
    flags = ("--data", data, "--recipe", "fast", "--model-dir", tmp_path)
    assert (
        result_of(torchrun(*TRAINER, "cifar10", *flags, "--batch-size", 16))["accuracy"] >= 0.25
    )  # chance: 0.1

    insects = real_data("hymenoptera", tmp_path)
    flags = (
        "--data",
        insects,
        "--image-size",
        32,
        "--batch-size",
        16,
        "--learning-rate",
        0.01,
        "--epochs",
        4,
    )
    pretrained, random = [], []
    for seed in range(3):
        command = (*TRAINER, "hymenoptera", *flags, "--seed", seed)
        side_by_side = alone(*command, "--weights", tmp_path / "model.pth"), alone(*command)
        for run, accuracies in zip(side_by_side, (pretrained, random), strict=True):
            accuracies.append(result_of(run)["accuracy"])
    assert fmean(pretrained) > fmean(random), f"{pretrained} and {random}"
