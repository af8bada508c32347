"""Fine-tuning: photographs of any size, crops that do not depend on the ranks, weights that fit or are refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from ddp_trainer.data import photographs
from ddp_trainer.errors import UserError
from ddp_trainer.models import resnet18, resnet50
from ddp_trainer.sampler import GlobalBatchSampler
from ddp_trainer.workloads.hymenoptera import load_weights

from .launch import TRAINER, torchrun

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
        [train.random_crops(shard, SIZE, seed=4) for shard in GlobalBatchSampler(24, 8, rank, 3)] for rank in range(3)
    ]
    for number, batch in enumerate(together):
        assert torch.equal(batch, torch.cat([apart[rank][number] for rank in range(3)]))
    assert not torch.equal(together[0], next(train.random_crops(s, SIZE, seed=5) for s in GlobalBatchSampler(24, 8)))


@pytest.mark.parametrize("height", [256, 300, 2000])
def test_a_random_crop_lies_within_the_photograph(height):
    random = np.random.default_rng(1)
    for _ in range(300):
        top, left, tall, wide = photographs._random_box(height, 256, random)
        assert 0 <= top <= top + tall <= height + 1e-9
        assert 0 <= left <= left + wide <= 256 + 1e-9


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "val").rename(folder / "test"), "no train/<class>/ and val/<class>/ in"),
        (lambda folder: (folder / "val" / "wasps").mkdir(), "wasps is a class that train/ does not have"),
        (lambda folder: (folder / "val" / "ants" / "0.jpg").write_bytes(b"none"), "cannot be read as an image"),
        (lambda folder: (folder / "train" / "ants" / "0.jpg").unlink(), "train holds no photographs"),
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
    assert all(torch.equal(taken[name], given[name]) for name in taken if not name.startswith("fc."))


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda path: None, "cannot be read"),
        (lambda path: path.write_bytes(b"no weights"), "cannot be read"),
        (lambda path: torch.save([1, 2], path), "holds a list, no state dict"),
        (
            lambda path: torch.save({"module.conv1.weight": torch.ones(1)}, path),
            "are not a ResNet-18's: conv1.weight is mi",
        ),
        (
            lambda path: torch.save(resnet18(10, "3x3").state_dict(), path),
            "do not fit a ResNet-18 with torchvision's stem",
        ),
        (lambda path: torch.save(resnet50(10).state_dict(), path), "do not fit a ResNet-18"),
    ],
    ids=["no file", "no weights", "a list", "DDP's own keys", "another stem", "another network"],
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
    flags = ["--image-size", SIZE, "--epochs", 4, "--learning-rate", 0.01, "--model-dir", tmp_path / "best"]
    run = torchrun(*TRAINER, "hymenoptera", "--data", folder, "--weights", tmp_path / "weights.pth", "--frozen", *flags)
    assert run.finish() == 0, run.stderr
    result = run.of("end")[0]["result"]
    scores = [entry["accuracy"] for entry in run.of("eval")]
    assert result["best_accuracy"] == max(scores) == 1.0
    assert result["best_epoch"] == 1 + scores.index(max(scores))
    kept = torch.load(tmp_path / "best" / "model.pth", weights_only=True)
    assert torch.equal(kept["layer1.0.conv1.weight"], start.state_dict()["layer1.0.conv1.weight"]), "frozen"
    assert not torch.equal(kept["fc.weight"], start.fc.weight[:2])
