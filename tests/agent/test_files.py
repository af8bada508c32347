"""What the agent removes, and what it leaves."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpjob.agent.files import empty_folder, paths_below

OPERATOR = Path(__file__).parents[2] / "operator"

# Mount a file system in a namespace of mounts. The namespace ends with this shell.
MOUNT = """
cd "$1"
mount -t tmpfs none mounted && touch mounted/kept && mkdir mounted/folder || exit 77
PYTHONPATH="$2" "$3" -c "from ddpjob.agent.files import empty_folder; empty_folder('.')"
echo * mounted/*
"""


def test_a_folder_is_emptied_but_for_one_file(tmp_path):
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    for name in ("a", "kept", "deep/deeper/b"):
        (tmp_path / name).touch()
    empty_folder(tmp_path, tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_what_a_link_leads_to_stays(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "to a folder").symlink_to(outside)
    (folder / "to a file").symlink_to(outside / "file")
    empty_folder(folder)
    assert list(folder.iterdir()) == []
    assert (outside / "file").exists()


def test_the_paths_of_a_folder_are_listed_without_the_right_to_look_into_it(tmp_path, monkeypatch):
    (tmp_path / "closed" / "inner").mkdir(parents=True)
    (tmp_path / "file").touch()

    def denied(path, **_):
        raise PermissionError(errno.EACCES, "denied", path)

    # Root has every right, so the call fails by itself.
    monkeypatch.setattr(os, "lstat", denied)
    monkeypatch.setattr(Path, "is_symlink", denied)
    assert paths_below(tmp_path) == {"file", "closed/inner"}


def test_a_folder_that_does_not_exist_is_no_error(tmp_path):
    empty_folder(tmp_path / "absent")


def test_what_is_mounted_below_a_folder_stays(tmp_path):
    (tmp_path / "mounted").mkdir()
    (tmp_path / "file").touch()
    command = ["unshare", "--mount", "sh", "-c", MOUNT, "sh", tmp_path, OPERATOR, sys.executable]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("this user may not mount")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["mounted", "mounted/folder", "mounted/kept"]
