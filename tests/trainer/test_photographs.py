"""Fine-tuning: photographs of any size, crops that do not depend on the ranks, weights that fit or are refused."""

import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image

from ddp_trainer.errors import UserError
from ddp_trainer.sampler import GlobalBatchSampler
from ddp_trainer.workloads.datasets import photographs
from ddp_trainer.workloads.hymenoptera import load_weights
from ddp_trainer.workloads.shared.models import resnet18, resnet50

from .launch import TRAINER, alone, torchrun

SIZE = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes that a glance tells apart: red photographs and blue ones, of several sizes."""
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


def test_photographs_are_stored_small_in_the_order_of_their_names(sets):
    train, val = sets
    assert (len(train), len(val)) == (24, 10)
    assert train.classes == ("ants", "bees")
    assert train.labels.tolist() == [0] * 12 + [1] * 12
    assert {min(pixels.shape[1:]) for pixels in train.pixels} == {256}


def test_the_middle_is_what_is_tested_on(sets):
    _, val = sets
    batch = val.middles(np.array([0, 9]), SIZE)
    assert batch.shape == (2, 3, SIZE, SIZE)
    assert batch[0, 0].mean() > batch[0, 2].mean(), "red"
    assert batch[1, 2].mean() > batch[1, 0].mean(), "blue"
    assert val.middles(np.array([], np.int64), SIZE).shape == (0, 3, SIZE, SIZE)


def test_a_photograph_gets_the_same_crop_whichever_rank_holds_it(sets):
    train, _ = sets
    together = [train.random_crops(shard, SIZE, seed=4) for shard in GlobalBatchSampler(24, 8)]
    apart = [
        [train.random_crops(shard, SIZE, seed=4) for shard in GlobalBatchSampler(24, 8, rank, 3)]
        for rank in range(3)
    ]
    for number, batch in enumerate(together):
        assert torch.equal(batch, torch.cat([apart[rank][number] for rank in range(3)]))
    assert not torch.equal(
        together[0], next(train.random_crops(s, SIZE, seed=5) for s in GlobalBatchSampler(24, 8))
    )


@pytest.mark.parametrize("height", [256, 300, 2000])
def test_a_random_crop_lies_within_the_photograph(height):
    random = np.random.default_rng(1)
    for _ in range(300):
        top, left, tall, wide = photographs._random_box(height, 256, random)
        assert 0 <= top <= top + tall <= height + 1e-9
        assert 0 <= left <= left + wide <= 256 + 1e-9


def test_of_several_data_sets_none_is_chosen_silently(tmp_path):
    for data_set in ("birds", "insects"):
        for part in photographs.PARTS:
            (tmp_path / data_set / part / "ants").mkdir(parents=True)
    with pytest.raises(
        UserError,
        match=r"holds 2 data sets of that form: give one of .*birds, .*insects with --data",
    ):
        photographs.load(tmp_path)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda folder: (folder / "val").rename(folder / "test"),
            "no train/<class>/ and val/<class>/ in",
        ),
        (
            lambda folder: (folder / "val" / "wasps").mkdir(),
            "wasps is a class that train/ does not have",
        ),
        (
            lambda folder: (folder / "val" / "ants" / "0.jpg").write_bytes(b"none"),
            "cannot be read as an image",
        ),
        (
            lambda folder: (folder / "train" / "ants" / "0.jpg").unlink(),
            "train/ants shows no JPEG and no PNG file",
        ),
    ],
)
def test_wrong_photographs_get_a_sentence(tmp_path, damage, sentence):
    for part in photographs.PARTS:
        (tmp_path / part / "ants").mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / part / "ants" / "0.jpg")
    damage(tmp_path)
    with pytest.raises(UserError, match=sentence):
        photographs.load(tmp_path)


def test_all_but_the_last_layer_is_taken_over(tmp_path):
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
    """A folder, and the URL at which it is served; torch keeps what it gets from there in a folder of the test's."""
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


def test_weights_come_from_a_url_too(served):
    folder, url = served
    source, model = resnet18(classes=10), resnet18(classes=2)
    torch.save(source.state_dict(), folder / "weights.pth")
    load_weights(model, f"{url}/weights.pth")
    assert torch.equal(model.layer1[0].conv1.weight, source.layer1[0].conv1.weight)


def test_files_of_one_name_from_two_places_are_told_apart_and_stdout_is_left_alone(served, capsys):
    folder, url = served
    for place in ("a", "b"):
        (folder / place).mkdir()
        source, model = resnet18(classes=10), resnet18(classes=2)
        torch.save(source.state_dict(), folder / place / "model.pth")
        load_weights(model, f"{url}/{place}/model.pth")
        assert torch.equal(model.layer1[0].conv1.weight, source.layer1[0].conv1.weight)
    assert capsys.readouterr().out == ""


def damaged_weights(path):
    torch.save(resnet18(10).state_dict(), path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255  # within a tensor
    path.write_bytes(data)


def encrypted(path):
    """By a single bit, after which zipfile raises an error of its own kind."""
    torch.save(resnet18(10).state_dict(), path)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] ^= (
        1  # the flags of the first entry in the central directory
    )
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["none.pth", "my weights.pth", "[/none.pth"])
def test_a_url_without_weights_gets_a_sentence(served, name):
    _, url = served
    with pytest.raises(UserError, match=f"the weights {url}/{re.escape(name)} cannot be read: "):
        load_weights(resnet18(2), f"{url}/{name}")


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda path: None, "cannot be read"),
        (lambda path: path.write_bytes(b"no weights"), "cannot be read"),
        (lambda path: torch.save([1, 2], path), "holds a list, no state dict"),
        (
            lambda path: torch.save({"module.conv1.weight": torch.ones(1)}, path),
            "save ddp.module.state_dict",
        ),
        (
            lambda path: torch.save({"state_dict": resnet18(10).state_dict(), "epoch": 3}, path),
            r"holds more than weights .state_dict.: save model.state_dict.. alone",
        ),
        (
            lambda path: torch.save({"conv1.bias": torch.ones(1)}, path),
            "are not a ResNet-18's: conv1.weight is missing",
        ),
        (encrypted, "are damaged .*: remove the file and get it again"),
        (
            damaged_weights,
            "are damaged .the checksum of .* is wrong.: remove the file and get it again",
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
def test_weights_that_do_not_fit_get_a_sentence(tmp_path, write, sentence):
    path = tmp_path / "weights.pth"
    write(path)
    with pytest.raises(UserError, match=sentence):
        load_weights(resnet18(2), str(path))


def test_a_frozen_network_learns_to_tell_them_apart_and_its_best_epoch_is_kept(folder, tmp_path):
    torch.manual_seed(3)
    start = resnet18(10)
    torch.save(start.state_dict(), tmp_path / "weights.pth")
    flags = [
        "--image-size",
        SIZE,
        "--epochs",
        4,
        "--learning-rate",
        0.01,
        "--model-dir",
        tmp_path / "best",
    ]
    run = torchrun(
        *TRAINER,
        "hymenoptera",
        "--data",
        folder,
        "--weights",
        tmp_path / "weights.pth",
        "--frozen",
        *flags,
    )
    assert run.finish() == 0, run.stderr
    result = run.of("end")[0]["result"]
    scores = [entry["accuracy"] for entry in run.of("eval")]
    assert result["best_accuracy"] == max(scores) == 1.0
    assert result["best_epoch"] == 1 + scores.index(max(scores))
    kept = torch.load(tmp_path / "best" / "model.pth", weights_only=True)
    assert torch.equal(
        kept["layer1.0.conv1.weight"], start.state_dict()["layer1.0.conv1.weight"]
    ), "frozen"
    assert not torch.equal(kept["fc.weight"], start.fc.weight[:2])


def test_the_best_epochs_file_comes_back_on_another_machine(folder, tmp_path):
    """The checkpoints are on a volume, the model's folder is not; and the same weights lie elsewhere."""
    torch.manual_seed(3)
    weights = resnet18(10).state_dict()
    flags = [
        "--image-size",
        SIZE,
        "--epochs",
        2,
        "--checkpoint-dir",
        tmp_path / "checkpoints",
        "--frozen",
    ]
    kept = []
    for machine in ("one", "other"):
        torch.save(weights, tmp_path / f"{machine}.pth")
        files = ["--weights", tmp_path / f"{machine}.pth", "--model-dir", tmp_path / machine]
        run = alone(*TRAINER, "hymenoptera", "--data", folder, *flags, *files)
        assert run.finish() == 0, run.stderr
        kept.append(torch.load(tmp_path / machine / "model.pth", weights_only=True))
    assert run.of("start")[0]["resumed_step"] > 0
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in weights)

    torch.save(resnet18(10).state_dict(), tmp_path / "one.pth")
    run = alone(
        *TRAINER, "hymenoptera", "--data", folder, *flags, "--weights", tmp_path / "one.pth"
    )
    assert run.finish() == 2
    assert "was made with weights" in run.stderr


def test_after_every_seventh_epoch_the_rate_is_a_tenth(folder):
    flags = ["--image-size", SIZE, "--epochs", 15, "--batch-size", 12, "--log-every", 1]
    run = alone(*TRAINER, "hymenoptera", "--data", folder, *flags)
    assert run.finish() == 0, run.stderr
    rates = [entry["learning_rate"] for entry in run.of("train")]
    assert rates == pytest.approx([0.001] * 14 + [0.0001] * 14 + [0.00001] * 2)
