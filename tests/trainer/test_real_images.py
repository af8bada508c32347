"""Training on real images: short versions of bench/accuracy.py with a minimum accuracy each."""

from statistics import fmean

import pytest

from .launch import TRAINER, alone, group


def result_of(run):
    assert run.finish() == 0, run.stderr
    return run.of("end")[0]["result"]


def test_two_ranks_train_in_bf16_without_warnings_from_torch(real_data, tmp_path):
    data = real_data(
        "cifar10", tmp_path, "cifar10/train/*/00[01]?.jpg", "cifar10/test/*/000[0-3].jpg"
    )
    flags = "--recipe fast --precision bf16 --epochs 2 --batch-size 16 --learning-rate 0.01"
    run = group(*TRAINER, "cifar10", "--data", data, "--log-every", 3, *flags.split())
    assert 0 <= result_of(run)["accuracy"] <= 1
    (start,) = run.of("start")
    assert (start["train_samples"], start["test_samples"], start["precision"]) == (200, 40, "bf16")
    losses = [entry["loss"] for entry in run.of("train")]
    assert losses[-1] < losses[0]
    assert "UserWarning" not in run.stderr


def test_both_arms_of_mnist_are_equally_accurate(real_data, tmp_path):
    # With two ranks and one bucket both arms add the same numbers in the same order. The
    # requirement is a difference of at most 0.5 points.
    folder = real_data("mnist", tmp_path)
    accuracies = []
    for arm in ("ddp", "native"):
        run = group(*TRAINER, "mnist", "--data", folder, "--epochs", 1, "--arm", arm)
        accuracies.append(result_of(run)["accuracy"])
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.005)
    assert min(accuracies) >= 0.75


@pytest.mark.slow
def test_weights_of_a_cifar10_run_help_with_other_photographs(real_data, tmp_path):
    # Without them, the network learns almost nothing from 244 photographs in so few epochs.
    images = ("cifar10/train/*/0[0-2]??.jpg", "cifar10/test/*/00[0-4]?.jpg")
    data = real_data("cifar10", tmp_path, *images)
    flags = ("--data", data, "--recipe", "fast", "--model-dir", tmp_path)
    run = alone(*TRAINER, "cifar10", *flags, "--batch-size", 32)
    # Chance is 0.1.
    assert result_of(run)["accuracy"] >= 0.25

    insects = real_data("hymenoptera", tmp_path)
    flags = "--image-size 32 --batch-size 16 --learning-rate 0.01 --epochs 4"
    pretrained = []
    random = []
    for seed in range(2):
        command = (*TRAINER, "hymenoptera", "--data", insects, *flags.split(), "--seed", seed)
        # Both runs at the same time.
        with_weights = alone(*command, "--weights", tmp_path / "model.pth")
        without = alone(*command)
        pretrained.append(result_of(with_weights)["accuracy"])
        (start,) = with_weights.of("start")
        assert (start["train_samples"], start["test_samples"]) == (244, 153)
        random.append(result_of(without)["accuracy"])
    assert fmean(pretrained) > fmean(random), f"{pretrained} with and {random} without"
