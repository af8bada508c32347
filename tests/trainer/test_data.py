"""The data sets: digits, CIFAR-10 in three forms, MNIST, the cache, and errors of users."""

import errno
import gzip
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.errors import UserError
from ddp_trainer.workloads.datasets import cifar10, digits, images, mnist
from ddp_trainer.workloads.shared.augmentation import shift_and_flip

from .conftest import image_folders


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Keep the user's cache folder out of the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_binary(folder, train, test):
    """Write the binary form, with the training images in five files."""
    folder.mkdir(parents=True)
    parts = {"test_batch.bin": test}
    for number, rows in enumerate(np.array_split(np.arange(len(train)), 5), start=1):
        parts[f"data_batch_{number}.bin"] = images.Images(train.pixels[rows], train.labels[rows])
    for name, part in parts.items():
        records = np.concatenate(
            [part.labels.astype(np.uint8)[:, None], part.pixels.reshape(len(part), -1)], axis=1
        )
        (folder / name).write_bytes(records.tobytes())
    return folder


def write_python(folder, train, test, protocol=2):
    """Write the python form: pickled dictionaries with keys of type bytes."""
    folder.mkdir(parents=True)
    files = [("test_batch", test, slice(None))]
    for number, rows in enumerate(np.array_split(np.arange(len(train)), 5), start=1):
        files.append((f"data_batch_{number}", train, rows))
    for name, part, rows in files:
        batch = {
            b"data": np.array(part.pixels[rows]).reshape(-1, 3072),
            b"labels": part.labels[rows].tolist(),
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))
    return folder


def same(one, other):
    return all(
        np.array_equal(a.pixels, b.pixels) and np.array_equal(a.labels, b.labels)
        for a, b in zip(one, other, strict=True)
    )


def test_digits_have_the_documented_sizes_and_values():
    train, test = digits.load()
    assert train.pixels.shape == (1437, 1, 8, 8)
    assert test.pixels.shape == (360, 1, 8, 8)
    assert train.pixels.max() == test.pixels.max() == 16
    assert set(train.labels) == set(test.labels) == set(range(10))


def test_the_three_forms_of_cifar10_give_the_same_arrays(tmp_path, tiny_cifar10):
    folders = cifar10.load(tiny_cifar10)
    assert folders[0].pixels.shape == (100, 3, 32, 32)
    assert len(folders[1]) == 30
    assert folders[0].labels.tolist() == [label for label in range(10) for _ in range(10)]
    first = np.asarray(Image.open(tiny_cifar10 / "train/airplane/0000.png")).transpose(2, 0, 1)
    assert np.array_equal(folders[0].pixels[0], first)

    assert same(folders, cifar10.load(write_binary(tmp_path / "cifar-10-batches-bin", *folders)))
    for protocol in (2, 5):
        python = write_python(
            tmp_path / str(protocol) / "cifar-10-batches-py", *folders, protocol=protocol
        )
        assert same(folders, cifar10.load(python))


def test_data_are_found_below_the_named_folder(tmp_path, tiny_cifar10):
    folders = cifar10.load(tiny_cifar10)
    write_binary(tmp_path / "volume" / "downloads" / "cifar-10-batches-bin", *folders)
    (tmp_path / "volume" / "another").mkdir()
    assert same(folders, cifar10.load(tmp_path / "volume"))


def test_images_are_decoded_again_only_if_one_changes(tmp_path, monkeypatch):
    folder = image_folders(tmp_path / "images", {"train": 1, "test": 1})
    before = cifar10.load(folder)
    decode = cifar10._decode
    monkeypatch.setattr(
        cifar10, "_decode", lambda paths: pytest.fail("decoded in spite of the cache")
    )
    assert same(before, cifar10.load(folder))

    monkeypatch.setattr(cifar10, "_decode", decode)
    Image.new("RGB", (32, 32), (1, 2, 3)).save(folder / "train/cat/0000.png")
    assert cifar10.load(folder)[0].pixels[3].reshape(3, -1).max(1).tolist() == [1, 2, 3]


def test_images_on_a_read_only_file_system_are_cached_in_the_users_folder(tmp_path, monkeypatch):
    # Such a file system refuses to create files, and to remove files even if they do not exist.
    folder = image_folders(tmp_path / "images", {"train": 1, "test": 1})
    for name in ("open", "unlink"):
        monkeypatch.setattr(Path, name, read_only_below(folder, getattr(Path, name)))
    cifar10.load(folder)
    assert not list(folder.glob(".ddp_trainer-*"))
    assert list((tmp_path / "cache").rglob("*.npy"))


def read_only_below(folder: Path, method):
    """Return a version of the Path method that fails for files written in `folder`."""

    def refuse(path: Path, *args, **kwargs):
        if path.parent == folder and "r" not in args:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return method(path, *args, **kwargs)

    return refuse


def test_images_are_decoded_if_no_cache_can_be_written(tmp_path, monkeypatch):
    folder = image_folders(tmp_path / "images", {"train": 1, "test": 1})
    monkeypatch.setattr(images, "_write_cache", lambda path, pixels: None)
    assert len(cifar10.load(folder)[0]) == 10


def test_a_damaged_cache_is_replaced(tmp_path):
    folder = image_folders(tmp_path / "images", {"train": 1, "test": 1})
    before = cifar10.load(folder)
    before = tuple(images.Images(part.pixels.copy(), part.labels) for part in before)
    (cache,) = folder.glob(".ddp_trainer-*.npy")
    content = cache.read_bytes()
    # The old file is still mapped into memory. Truncating it would make its pages invalid.
    cache.unlink()
    cache.write_bytes(content[:1000])
    assert same(before, cifar10.load(folder))


def test_a_limited_set_has_images_of_all_classes(tiny_cifar10):
    train, _ = cifar10.load(tiny_cifar10)
    assert sorted(train.some(20).labels.tolist()) == sorted(list(range(10)) * 2)
    assert len(train.some(None)) == len(train.some(1000)) == 100


def test_a_pickle_that_names_a_function_is_refused(tmp_path, tiny_cifar10):
    folder = write_python(tmp_path / "py", *cifar10.load(tiny_cifar10))
    (folder / "test_batch").write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(UserError, match=r"names posix\.getcwd"):
        cifar10.load(folder)


def broken(tmp_path, tiny_cifar10, what):
    """Return a folder of CIFAR-10 with the defect `what`."""
    folder = tmp_path / what
    if what == "missing":
        return folder
    if what == "empty":
        folder.mkdir()
        return folder
    if what == "truncated binary":
        write_binary(folder, *cifar10.load(tiny_cifar10))
        with (folder / "data_batch_2.bin").open("ab") as file:
            file.truncate(3073 + 5)
        return folder
    if what == "no test batch":
        (write_binary(folder, *cifar10.load(tiny_cifar10)) / "test_batch.bin").unlink()
        return folder
    if what == "no third batch":
        (write_python(folder, *cifar10.load(tiny_cifar10)) / "data_batch_3").unlink()
        return folder
    image_folders(folder, {"train": 1, "test": 1})
    if what == "other class":
        (folder / "train/ants").mkdir()
    if what == "no image":
        (folder / "train/cat/0000.png").write_bytes(b"not an image")
    if what == "large image":
        Image.new("RGB", (64, 48)).save(folder / "train/cat/0000.png")
    if what == "no test images":
        shutil.rmtree(folder / "test")
        (folder / "test/cat").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "missing",
            "--data: folder .* does not exist; get CIFAR-10 from https://www.cs.toronto.edu",
        ),
        ("empty", "no CIFAR-10 in .*get CIFAR-10 from https://www.cs.toronto.edu"),
        (
            "truncated binary",
            "data_batch_2.bin: .* multiple of 3,073 bytes, got 3078; unpack the archive again",
        ),
        ("no test batch", "test_batch.bin: cannot be read .*; unpack the archive again"),
        ("no third batch", "data_batch_3: cannot be read .*; unpack the archive again"),
        ("other class", "ants: not a class of CIFAR-10"),
        ("no image", r"0000.png: cannot be read as an image .*replace it or remove it"),
        ("large image", "0000.png: must have 32 x 32 pixels, got 64 x 48"),
        (
            "no test images",
            "test/cat: contains no JPEG or PNG file; put the images of this class there, or remove",
        ),
    ],
)
def test_the_error_for_broken_cifar10_says_what_to_do(tmp_path, tiny_cifar10, what, message):
    with pytest.raises(UserError, match=message):
        cifar10.load(broken(tmp_path, tiny_cifar10, what))


def write_mnist(
    folder: Path, part: str, count: int, pack: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Write IDX files of random images with labels 0 to 9 in turn. Return (pixels, labels)."""
    pixels = np.random.default_rng(count).integers(0, 256, (count, 28, 28), np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)
    for name, numbers in (
        (f"{part}-images-idx3-ubyte", pixels),
        (f"{part}-labels-idx1-ubyte", labels),
    ):
        raw = (
            bytes([0, 0, 8, numbers.ndim])
            + np.array(numbers.shape, ">i4").tobytes()
            + numbers.tobytes()
        )
        if pack:
            (folder / f"{name}.gz").write_bytes(gzip.compress(raw))
        else:
            (folder / name).write_bytes(raw)
    return pixels, labels


@pytest.mark.parametrize("pack", [True, False])
def test_mnist_is_read_from_its_four_files(tmp_path, pack):
    folder = tmp_path / "mnist" / "raw"
    folder.mkdir(parents=True)
    pixels, labels = write_mnist(folder, "train", 30, pack)
    write_mnist(folder, "t10k", 10, pack)
    train, test, is_split = mnist.load(tmp_path)
    assert (len(train), len(test), is_split) == (30, 10, False)
    assert np.array_equal(train.pixels, pixels[:, None])
    assert np.array_equal(train.labels, labels)


def test_mnists_folder_may_have_each_file_with_and_without_gzip(tmp_path):
    for pack in (True, False):
        write_mnist(tmp_path, "train", 30, pack)
        write_mnist(tmp_path, "t10k", 10, pack)
    assert [len(part) for part in mnist.load(tmp_path)[:2]] == [30, 10]


def test_mnists_test_set_alone_is_split_by_class(tmp_path):
    pixels, _ = write_mnist(tmp_path, "t10k", 100)
    train, test, is_split = mnist.load(tmp_path)
    assert is_split
    assert np.bincount(train.labels).tolist() == [8] * 10
    assert np.bincount(test.labels).tolist() == [2] * 10
    both = np.concatenate([train.pixels, test.pixels]).reshape(100, -1)
    # Each image is in one of the two sets.
    assert sorted(map(bytes, both)) == sorted(map(bytes, pixels.reshape(100, -1)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "t10k-images-idx3-ubyte.gz").write_bytes(b"no gzip"),
            "not a complete IDX file",
        ),
        (
            lambda folder: (folder / "t10k-images-idx3-ubyte.gz").write_bytes(
                gzip.compress(b"PK34")
            ),
            "not a complete IDX file",
        ),
        (
            lambda folder: (folder / "t10k-labels-idx1-ubyte.gz").unlink(),
            ": has t10k-images-idx3-ubyte.gz, not t10k-images",
        ),
        (
            lambda folder: write_mnist(folder, "train", 0),
            "images and labels of train do not belong together",
        ),
        (lambda folder: write_mnist_labels(folder, 9), "do not belong together"),
        (lambda folder: shutil.rmtree(folder), "--data: folder .* does not exist"),
    ],
)
def test_the_error_for_broken_mnist_says_what_to_do(tmp_path, damage, message):
    folder = tmp_path / "mnist"
    folder.mkdir()
    write_mnist(folder, "t10k", 10)
    damage(folder)
    with pytest.raises(UserError, match=f"{message}.*and give their folder with --data"):
        mnist.load(folder)


@pytest.mark.parametrize("equal_shares", [False, True])
def test_augmentation_of_an_image_and_of_its_repeat_does_not_depend_on_the_rank(equal_shares):
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (10, 1, 6, 6), np.uint8))
    (whole,) = GlobalBatchSampler(10, 10)
    together = shift_and_flip(pixels[whole.indices], whole, seed=1)
    assert not torch.equal(together, pixels[whole.indices])
    for rank in range(3):
        (shard,) = GlobalBatchSampler(10, 10, rank, 3, equal_shares=equal_shares)
        assert torch.equal(
            shift_and_flip(pixels[shard.indices], shard, seed=1), together[shard.positions]
        )


def write_mnist_labels(folder: Path, count: int) -> None:
    raw = bytes([0, 0, 8, 1]) + np.array([count], ">i4").tobytes() + bytes(count)
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(raw))
