"""The folder of a run: locked, cleared, and refused if it cannot be written."""

import fcntl
import threading

import pytest

from ddpjob.local.run_files import LOCK, RunFolderError, run_folder


def test_two_runs_at_once_have_folders_of_their_own(tmp_path):
    with run_folder(tmp_path, "j") as first, run_folder(tmp_path, "j") as second:
        assert (first.name, second.name) == ("j", "j.2")


def test_a_new_run_keeps_the_claims_and_clears_the_rest(tmp_path):
    (tmp_path / "j/claims/c").mkdir(parents=True)
    (tmp_path / "j/logs").mkdir()
    (tmp_path / "j/logs/old.log").touch()
    with run_folder(tmp_path, "j") as folder:
        assert (folder / "claims/c").is_dir()
        assert not (folder / "logs/old.log").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    refused = pytest.raises(RunFolderError, match="choose another folder with --runs")
    with refused, run_folder(tmp_path / "file", "j"):
        pass


def test_a_look_at_the_moment_of_a_start_does_not_take_the_folder(tmp_path):
    with run_folder(tmp_path, "j"):
        pass
    with (tmp_path / "j" / LOCK).open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        release = threading.Timer(0.03, fcntl.flock, (look, fcntl.LOCK_UN))
        release.start()
        with run_folder(tmp_path, "j") as folder:
            assert folder.name == "j"
        release.join()
