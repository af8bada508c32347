"""Fine-tuning: photographs, their crops, pretrained weights, and the best epoch."""

import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image

from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.errors import UserError
from ddp_trainer.workloads.datasets import photographs
from ddp_trainer.workloads.hymenoptera import load_weights
from ddp_trainer.workloads.shared.models import resnet18, resnet50

from .launch import TRAINER, alone, group

SIZE = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write red and blue photographs of several sizes: two classes, easy to tell apart."""
    folder = tmp_path_factory.mktemp("insects") / "hymenoptera_data"
    random = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 5)):
        for colour, name in enumerate(("ants", "bees")):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 90, (300 + 10 * number, 420, 3), np.uint8)
                pixels[..., 2 * colour] += 150
                Image.fromarray(pixels).save(folder / part / name / f"{number:02}.jpg")
    return folder


@pytest.fixture(scope="module")
def sets(folder):
    return photographs.load(folder.parent)


def test_photographs_are_reduced_and_sorted_by_name(sets):
    train, val = sets
    assert (len(train), len(val)) == (24, 10)
    assert train.classes == ("ants", "bees")
    assert train.labels.tolist() == [0] * 12 + [1] * 12
    assert {min(pixels.shape[1:]) for pixels in train.pixels} == {256}


def test_center_crops_are_batches_also_without_photographs(sets):
    _, val = sets
    batch = val.center_crops(np.array([0, 9]), SIZE)
    assert batch.shape == (2, 3, SIZE, SIZE)
    assert batch[0, 0].mean() > batch[0, 2].mean()  # red
    assert batch[1, 2].mean() > batch[1, 0].mean()  # blue
    assert val.center_crops(np.array([], np.int64), SIZE).shape == (0, 3, SIZE, SIZE)


def test_a_random_crop_does_not_depend_on_the_rank(sets):
    train, _ = sets

    def crops(sampler, seed):
        return [train.random_crops(shard, SIZE, seed=seed) for shard in sampler]

    together = crops(GlobalBatchSampler(24, 8), seed=4)
    ranks = [crops(GlobalBatchSampler(24, 8, rank, 3), seed=4) for rank in range(3)]
    for batch, *shares in zip(together, *ranks, strict=True):
        assert torch.equal(batch, torch.cat(shares))
    assert not torch.equal(together[0], crops(GlobalBatchSampler(24, 8), seed=5)[0])


@pytest.mark.parametrize("height", [256, 300, 2000])
def test_a_random_box_lies_within_the_photograph(height):
    random = np.random.default_rng(1)
    for _ in range(300):
        top, left, tall, wide = photographs._random_box(height, 256, random)
        assert 0 <= top <= top + tall <= height + 1e-9
        assert 0 <= left <= left + wide <= 256 + 1e-9


def test_several_data_sets_in_one_folder_are_refused(tmp_path):
    for data_set in ("birds", "insects"):
        for part in photographs.PARTS:
            (tmp_path / data_set / part / "ants").mkdir(parents=True)
    with pytest.raises(
        UserError,
        match=r"contains 2 data sets of this form; use one of .*birds, .*insects",
    ):
        photographs.load(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "val").rename(folder / "test"),
            "no train/<class>/ and val/<class>/ in",
        ),
        (
            lambda folder: (folder / "val" / "wasps").mkdir(),
            "wasps: not a class in train/",
        ),
        (
            lambda folder: (folder / "val" / "ants" / "0.jpg").write_bytes(b"none"),
            ": cannot be read as an image",
        ),
        (
            lambda folder: (folder / "train" / "ants" / "0.jpg").unlink(),
            "train/ants: contains no JPEG or PNG file",
        ),
    ],
)
def test_broken_photographs_are_refused(tmp_path, damage, message):
    for part in photographs.PARTS:
        (tmp_path / part / "ants").mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / part / "ants" / "0.jpg")
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        photographs.load(tmp_path)


def test_weights_of_all_layers_but_the_last_are_loaded(tmp_path):
    torch.manual_seed(1)
    source = resnet18(classes=10)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    torch.manual_seed(2)
    model = resnet18(classes=2)
    last = model.fc.weight.clone()
    load_weights(model, str(tmp_path / "weights.pth"))
    assert torch.equal(model.fc.weight, last)
    taken, given = model.state_dict(), source.state_dict()
    assert all(
        torch.equal(taken[name], given[name]) for name in taken if not name.startswith("fc.")
    )


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Serve a folder over HTTP. Return the folder and its URL."""
    # torch keeps its downloads in this folder.
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_weights_are_loaded_from_a_url(served):
    folder, url = served
    source, model = resnet18(classes=10), resnet18(classes=2)
    torch.save(source.state_dict(), folder / "weights.pth")
    load_weights(model, f"{url}/weights.pth")
    assert torch.equal(model.layer1[0].conv1.weight, source.layer1[0].conv1.weight)


def test_downloads_with_the_same_name_are_kept_apart_and_print_nothing_to_stdout(served, capsys):
    folder, url = served
    for place in ("a", "b"):
        (folder / place).mkdir()
        source, model = resnet18(classes=10), resnet18(classes=2)
        torch.save(source.state_dict(), folder / place / "model.pth")
        load_weights(model, f"{url}/{place}/model.pth")
        assert torch.equal(model.layer1[0].conv1.weight, source.layer1[0].conv1.weight)
    assert capsys.readouterr().out == ""


def damaged_weights(path):
    """Write weights with one wrong byte inside a tensor."""
    torch.save(resnet18(10).state_dict(), path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def encrypted(path):
    """Write weights in an archive marked as encrypted: zipfile has an error of its own for it."""
    torch.save(resnet18(10).state_dict(), path)
    data = bytearray(path.read_bytes())
    # The flags of the first entry in the central directory.
    data[data.index(b"PK\x01\x02") + 8] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["none.pth", "my weights.pth", "[/none.pth"])
def test_a_url_without_weights_is_refused(served, name):
    _, url = served
    with pytest.raises(UserError, match=f"weights {url}/{re.escape(name)}: cannot be read: "):
        load_weights(resnet18(2), f"{url}/{name}")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "cannot be read"),
        (lambda path: path.write_bytes(b"no weights"), "cannot be read"),
        (
            lambda path: torch.save([1, 2], path),
            "expected a state dict, got a list; save model.state_dict",
        ),
        (
            lambda path: torch.save({"module.conv1.weight": torch.ones(1)}, path),
            "save ddp.module.state_dict",
        ),
        (
            lambda path: torch.save({"state_dict": resnet18(10).state_dict(), "epoch": 3}, path),
            r"contain more than weights .state_dict.; save only model.state_dict",
        ),
        (
            lambda path: torch.save({"conv1.bias": torch.ones(1)}, path),
            "not those of a ResNet-18, conv1.weight is missing",
        ),
        (encrypted, "damaged .*; remove the file and get it again"),
        (
            damaged_weights,
            "damaged .the checksum of .* is wrong.; remove the file and get it again",
        ),
        (
            lambda path: torch.save(resnet18(10, "3x3").state_dict(), path),
            "do not fit a ResNet-18 with torchvision's stem",
        ),
        (lambda path: torch.save(resnet50(10).state_dict(), path), "do not fit a ResNet-18"),
    ],
    ids=[
        "no file",
        "no weights",
        "a list",
        "DDP's own keys",
        "a checkpoint",
        "other keys",
        "one bit",
        "damaged",
        "another stem",
        "another network",
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, write, message):
    path = tmp_path / "weights.pth"
    write(path)
    with pytest.raises(UserError, match=message):
        load_weights(resnet18(2), str(path))


def test_a_frozen_network_learns_and_the_weights_of_its_best_epoch_are_written(folder, tmp_path):
    torch.manual_seed(3)
    start = resnet18(10)
    torch.save(start.state_dict(), tmp_path / "weights.pth")
    flags = f"--image-size {SIZE} --epochs 4 --learning-rate 0.01 --frozen".split()
    files = ["--weights", tmp_path / "weights.pth", "--model-dir", tmp_path / "best"]
    run = group(*TRAINER, "hymenoptera", "--data", folder, *flags, *files)
    assert run.finish() == 0, run.stderr
    result = run.of("end")[0]["result"]
    scores = [entry["accuracy"] for entry in run.of("eval")]
    assert result["best_accuracy"] == max(scores) == 1.0
    assert result["best_epoch"] == 1 + scores.index(max(scores))
    kept = torch.load(tmp_path / "best" / "model.pth", weights_only=True)
    # All layers but the last are frozen.
    assert torch.equal(kept["layer1.0.conv1.weight"], start.layer1[0].conv1.weight)
    assert not torch.equal(kept["fc.weight"], start.fc.weight[:2])


def test_a_resumed_run_writes_the_best_epochs_weights_to_another_machine(folder, tmp_path):
    # The checkpoints are on a shared volume. The model's folder is not, and the same pretrained
    # weights are in another file.
    torch.manual_seed(3)
    weights = resnet18(10).state_dict()
    flags = f"--image-size {SIZE} --epochs 2 --frozen".split()
    flags += ["--checkpoint-dir", tmp_path / "checkpoints"]
    kept = []
    for machine in ("one", "other"):
        torch.save(weights, tmp_path / f"{machine}.pth")
        files = ["--weights", tmp_path / f"{machine}.pth", "--model-dir", tmp_path / machine]
        run = alone(*TRAINER, "hymenoptera", "--data", folder, *flags, *files)
        assert run.finish() == 0, run.stderr
        kept.append(torch.load(tmp_path / machine / "model.pth", weights_only=True))
    assert run.of("start")[0]["resumed_step"] > 0
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in weights)

    # Other pretrained weights are refused.
    torch.save(resnet18(10).state_dict(), tmp_path / "one.pth")
    run = alone(
        *TRAINER, "hymenoptera", "--data", folder, *flags, "--weights", tmp_path / "one.pth"
    )
    assert run.finish() == 2
    assert "was made with weights" in run.stderr


def test_the_learning_rate_is_divided_by_ten_every_seven_epochs(folder):
    flags = ["--image-size", SIZE, "--epochs", 15, "--batch-size", 12, "--log-every", 1]
    run = alone(*TRAINER, "hymenoptera", "--data", folder, *flags)
    assert run.finish() == 0, run.stderr
    rates = [entry["learning_rate"] for entry in run.of("train")]
    assert rates == pytest.approx([0.001] * 14 + [0.0001] * 14 + [0.00001] * 2)
