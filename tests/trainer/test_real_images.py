"""Training on real images: short versions of bench/accuracy.py, each with a bar that a broken training misses."""

import os
import shutil
import subprocess
from pathlib import Path
from statistics import fmean

import pytest

from .launch import TRAINER, alone, torchrun

REAL_DATA = Path(os.environ.get("DDP_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


def unpacked(name: str, folder: Path, *members: str) -> Path:
    """These members of an archive, in the folder."""
    archive = REAL_DATA / f"{name}.tar.zst"
    if not archive.is_file() or not shutil.which("zstd"):
        pytest.skip(f"{archive} or zstd is not there; DDP_TEST_DATA names the folder with the archive")
    subprocess.run(["tar", "--zstd", "-xf", archive, "-C", folder, "--wildcards", *members], check=True, timeout=120)
    return folder


def result_of(run):
    assert run.finish() == 0, run.stderr
    return run.of("end")[0]["result"]


def test_two_ranks_train_in_bf16_and_torch_has_nothing_to_warn_of(tmp_path):
    data = unpacked("cifar10", tmp_path, "cifar10/train/*/00[0-3]?.jpg", "cifar10/test/*/000?.jpg")
    flags = "--recipe fast --epochs 3 --batch-size 16 --learning-rate 0.01 --log-every 4 --precision bf16"
    run = torchrun(*TRAINER, "cifar10", "--data", data, *flags.split())
    assert 0 <= result_of(run)["accuracy"] <= 1
    (start,) = run.of("start")
    assert (start["train_samples"], start["test_samples"], start["precision"]) == (400, 100, "bf16")
    losses = [entry["loss"] for entry in run.of("train")]
    assert losses[-1] < losses[0]
    assert "UserWarning" not in run.stderr


def test_both_arms_of_mnist_are_equally_accurate():
    """With two ranks and one bucket they add the same numbers in the same order; at most 0.5 points is what is asked for."""
    folder = REAL_DATA / "mnist"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; DDP_TEST_DATA names the folder that has it")
    accuracies = [
        result_of(torchrun(*TRAINER, "mnist", "--data", folder, "--epochs", 1, "--arm", arm))["accuracy"]
        for arm in ("ddp", "native")
    ]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.005)
    assert min(accuracies) >= 0.75


def test_what_a_cifar10_job_has_learnt_helps_with_other_photographs(tmp_path):
    """From a random start the network has learnt next to nothing from 244 photographs after so few epochs."""
    data = unpacked("cifar10", tmp_path, "cifar10/train/*/0[0-4]??.jpg", "cifar10/test/*/00??.jpg")
    flags = ("--data", data, "--recipe", "fast", "--model-dir", tmp_path)
    assert result_of(torchrun(*TRAINER, "cifar10", *flags, "--batch-size", 16))["accuracy"] >= 0.25  # chance: 0.1

    insects = unpacked("hymenoptera", tmp_path, "hymenoptera_data")
    flags = ("--data", insects, "--image-size", 32, "--batch-size", 16, "--learning-rate", 0.01, "--epochs", 4)
    pretrained, random = [], []
    for seed in range(3):
        command = (*TRAINER, "hymenoptera", *flags, "--seed", seed)
        side_by_side = alone(*command, "--weights", tmp_path / "model.pth"), alone(*command)
        for run, accuracies in zip(side_by_side, (pretrained, random), strict=True):
            accuracies.append(result_of(run)["accuracy"])
    assert fmean(pretrained) > fmean(random), f"{pretrained} and {random}"
