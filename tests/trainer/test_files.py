"""Files are written as a whole or not at all."""

import errno

import pytest

from ddp_trainer.errors import UserError, path_error
from ddp_trainer.files import check_writable, write_atomically


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    write_atomically(path, lambda file: file.write(b"new"), durable=True)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_incomplete_file_is_in_the_given_folder(tmp_path):
    (tmp_path / "partial").mkdir()
    found = []

    def write(file):
        found.extend(path.parent.name for path in tmp_path.rglob("*.partial"))
        file.write(b"new")

    path = tmp_path / "file"
    write_atomically(path, write, durable=True, partial_folder=tmp_path / "partial")
    assert found == ["partial"]
    assert path.read_bytes() == b"new"
    assert list((tmp_path / "partial").iterdir()) == []


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing_else(tmp_path, durable):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail_in_the_middle(file):
        file.write(b"ne")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, fail_in_the_middle, durable=durable)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [
        (errno.ESTALE, 1),
        (errno.EIO, 1),
        (errno.ENOSPC, 1),
        (errno.ENOENT, 2),
        (errno.EACCES, 2),
        (errno.EROFS, 2),
    ],
)
def test_a_storage_that_fails_is_worth_a_restart_and_a_wrong_path_is_not(number, exit_code):
    assert path_error("cannot be read", OSError(number, "no")).exit_code == exit_code


def test_a_folder_that_is_a_file_is_wrong_use(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written") as caught:
        check_writable(tmp_path / "file")
    assert caught.value.exit_code == 2
