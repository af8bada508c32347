"""An older process, if it still runs, cannot replace, hide or remove a newer start's checkpoint."""

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from ddp_trainer.checkpoint import claim as claims
from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.checkpoint.claim import Claim, TakenOver, checkpoint_path
from ddp_trainer.errors import RetryableError
from ddp_trainer.ranks.runtime import Runtime

from .every_rank import on_every_rank
from .launch import alone, newest

# A training with a save at every step. From the third step on, it waits for SIGUSR1 after each.
TRAINING = """
import json, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
import torch
from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.ranks.runtime import Runtime

model = torch.nn.Linear(2, 1)
checkpoints = Checkpoints(sys.argv[1], Runtime(), {"model": model})
step = checkpoints.restore()
while True:
    step += 1
    torch.nn.init.constant_(model.weight, step)
    path = checkpoints.save(step)
    checkpoints.wait()
    print(json.dumps({"event": "checkpoint", "step": step, "path": str(path)}), flush=True)
    if step >= 3 and "--endless" not in sys.argv:
        signal.sigwait({signal.SIGUSR1})
"""


class Start:
    """One start of a job in this process. All weights are `fill`."""

    def __init__(self, folder, fill=0.0):
        self.model = nn.Linear(2, 1)
        nn.init.constant_(self.model.weight, fill)
        self.checkpoints = Checkpoints(folder, Runtime(), {"model": self.model})
        self.step = self.checkpoints.restore()

    def save(self, step):
        path = self.checkpoints.save(step)
        self.checkpoints.wait()
        return path

    @property
    def weight(self):
        return self.model.weight.unique().item()


def files_in(folder):
    return sorted(path.name for path in folder.glob("*.pt"))


def claims_in(folder):
    return sorted(path.name for path in folder.glob(".claim-*"))


@contextmanager
def claim_that_stays(folder):
    """Let an older process write, as on a file system that still shows it its directory."""
    (workspace,) = folder.glob(".claim-*/*")
    yield
    workspace.mkdir(parents=True)


def files_being_written(folder):
    return [path for path in folder.glob(".claim-*/**/*") if path.is_file()]


def damage(path):
    path.write_bytes(path.read_bytes()[:100])


# A second process


@pytest.fixture
def older(tmp_path):
    """Return a waiting process with three saved steps."""
    run = alone("-c", TRAINING, tmp_path)
    run.wait_for("checkpoint", step=3)
    return run


def test_an_older_process_stops_at_its_next_checkpoint(older, tmp_path):
    newer = Start(tmp_path)
    assert newer.step == 3
    older.signal(signal.SIGUSR1)
    assert older.finish() == 1
    assert "TakenOver" in older.stderr
    assert f"{tmp_path}: another start of this job has taken over this folder" in older.stderr
    assert files_in(tmp_path) == ["step-g0001-0000000002.pt", "step-g0001-0000000003.pt"]


def test_an_older_process_that_still_writes_does_not_replace_a_newer_checkpoint(older, tmp_path):
    with claim_that_stays(tmp_path):
        newer = Start(tmp_path)
    nn.init.constant_(newer.model.weight, 77)
    # These steps are behind those of the older process.
    saved = [newer.save(4), newer.save(5)]
    contents = [path.read_bytes() for path in saved]

    for step in (4, 5, 6, 7):
        older.signal(signal.SIGUSR1)
        written = older.wait_for("checkpoint", step)["path"]
    older.kill()

    assert written == str(tmp_path / "step-g0001-0000000007.pt")
    assert newest(tmp_path) == saved[-1]
    assert [path.read_bytes() for path in saved] == contents
    third = Start(tmp_path)
    assert (third.step, third.weight) == (5, 77)


def test_a_process_that_writes_all_the_time_is_stopped(tmp_path):
    older = alone("-c", TRAINING, tmp_path, "--endless")
    older.wait_for("checkpoint", step=3)
    newer = Start(tmp_path, fill=77)
    nn.init.constant_(newer.model.weight, 77)
    path = newer.save(newer.step + 1)
    content = path.read_bytes()
    assert older.finish() == 1
    assert "TakenOver" in older.stderr
    assert path.read_bytes() == content
    assert Start(tmp_path).weight == 77


# The newest checkpoint


def test_checkpoints_of_releases_without_claims_are_the_oldest(tmp_path):
    path = Start(tmp_path, fill=7).save(90)
    path.rename(tmp_path / "step-0000000090.pt")
    shutil.rmtree(tmp_path / ".claim-g0001")
    first = Start(tmp_path)
    assert (first.step, first.weight) == (90, 7)
    nn.init.constant_(first.model.weight, 8)
    first.save(80)
    assert files_in(tmp_path) == ["step-0000000090.pt", "step-g0001-0000000080.pt"]
    second = Start(tmp_path)
    assert (second.step, second.weight) == (80, 8)


def test_a_damaged_checkpoint_falls_back_to_that_of_an_older_start(tmp_path, capsys):
    Start(tmp_path, fill=7).save(9)
    second = Start(tmp_path)
    damage(second.save(5))
    third = Start(tmp_path)
    assert (third.step, third.weight) == (9, 7)
    assert "step-g0002-0000000005.pt" in capsys.readouterr().err


def test_the_first_checkpoint_of_a_start_keeps_the_one_that_it_continued_from(tmp_path):
    first = Start(tmp_path)
    for step in (7, 8, 9):
        first.save(step)
    second = Start(tmp_path)
    second.save(10)
    assert files_in(tmp_path) == ["step-g0001-0000000009.pt", "step-g0002-0000000010.pt"]
    second.save(11)
    assert files_in(tmp_path) == ["step-g0002-0000000010.pt", "step-g0002-0000000011.pt"]


def test_an_outdated_process_removes_no_file_of_a_newer_one_and_keeps_its_newest(tmp_path):
    older = Start(tmp_path)
    for step in (7, 8):
        older.save(step)
    with claim_that_stays(tmp_path):
        newer = Start(tmp_path)
    older.save(9)
    assert files_in(tmp_path) == ["step-g0001-0000000008.pt", "step-g0001-0000000009.pt"]
    newer.save(1)
    older.save(10)
    # The newer one has kept the checkpoint from which it continued.
    assert files_in(tmp_path) == [
        "step-g0001-0000000008.pt",
        "step-g0001-0000000010.pt",
        "step-g0002-0000000001.pt",
    ]


def test_a_process_that_is_taken_over_while_it_writes_leaves_nothing(tmp_path, monkeypatch):
    older = Start(tmp_path)
    save = torch.save

    def take_over_and_save(state, file):
        save(state, file)
        Claim.take(tmp_path)

    monkeypatch.setattr(torch, "save", take_over_and_save)
    with pytest.raises(TakenOver):
        older.save(1)
    assert [path.name for path in tmp_path.glob("*")] == [".claim-g0002"]
    assert files_being_written(tmp_path) == []


def test_a_process_that_is_taken_over_after_it_wrote_removes_no_file(tmp_path, monkeypatch):
    older = Start(tmp_path)
    for step in (1, 2):
        older.save(step)
    monkeypatch.setattr(Claim, "write", write_and_lose(Claim.write))
    with pytest.raises(TakenOver):
        older.save(3)
    assert len(files_in(tmp_path)) == 3


def test_a_process_whose_file_a_newer_start_removed_says_that_it_is_outdated(tmp_path, monkeypatch):
    older = Start(tmp_path)
    monkeypatch.setattr(Claim, "write", write_and_lose(Claim.write, remove=True))
    with pytest.raises(TakenOver):
        older.save(1)


def write_and_lose(write, remove=False):
    """Return a `Claim.write` that then gives the folder to a newer start."""

    def write_then_lose(self, path, state):
        write(self, path, state)
        Claim.take(self.folder)
        if remove:
            path.unlink()

    return write_then_lose


def test_a_checkpoint_that_is_removed_before_it_is_read_is_skipped(tmp_path, monkeypatch):
    Start(tmp_path, fill=7).save(3)
    listed = [tmp_path / "step-g0001-0000000004.pt", tmp_path / "step-g0001-0000000003.pt"]
    monkeypatch.setattr(Claim, "list_files", lambda self: listed)
    assert Start(tmp_path).step == 3


def test_a_start_that_is_taken_over_while_it_reads_does_not_begin_at_step_0(tmp_path, monkeypatch):
    monkeypatch.setattr(Claim, "list_files", lambda self: Claim.take(tmp_path) and [])
    with pytest.raises(TakenOver):
        Start(tmp_path)


# Claims


def test_only_the_newest_claim_is_kept(tmp_path):
    for number in (1, 2, 3):
        Start(tmp_path)
        assert claims_in(tmp_path) == [f".claim-g{number:04d}"]


def test_the_number_is_above_those_of_all_files(tmp_path):
    for name in ("step-g0007-0000000001.pt", "step-g0012-0000000001.unreadable", "step-gx.pt"):
        (tmp_path / name).touch()
    assert Claim.take(tmp_path).number == 13


def test_starts_at_the_same_time_get_different_numbers(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: Claim.take(tmp_path), range(40)))
    numbers = [claim.number for claim in taken]
    assert len(set(numbers)) == 40
    assert claims_in(tmp_path) == [f".claim-g{max(numbers):04d}"]


def test_a_start_that_saw_an_outdated_folder_still_gets_the_highest_number(tmp_path, monkeypatch):
    for number in (6, 7):
        assert Claim.take(tmp_path, above=number - 1).number == number
    look = claims._highest_number
    outdated = iter([5])
    monkeypatch.setattr(
        claims, "_highest_number", lambda folder: next(outdated, None) or look(folder)
    )
    # The directory of number 6 was removed, so it could be made again.
    assert Claim.take(tmp_path).number == 8
    assert claims_in(tmp_path) == [".claim-g0008"]


def test_numbers_above_9999_are_compared_as_numbers(tmp_path):
    claim = Claim.take(tmp_path, above=9999)
    for number, step in ((9999, 5), (10000, 4)):
        checkpoint_path(tmp_path, number, step).touch()
    assert [path.name for path in claim.list_files()] == [
        "step-g10000-0000000004.pt",
        "step-g9999-0000000005.pt",
    ]


def test_steps_of_more_than_ten_digits_are_compared_as_numbers(tmp_path):
    start = Start(tmp_path)
    for step in (9_995_000_000, 10_000_000_000, 10_005_000_000):
        start.save(step)
    assert len(files_in(tmp_path)) == 2
    assert Start(tmp_path).step == 10_005_000_000


def test_a_renewed_claim_does_not_evict_a_newer_start(tmp_path):
    claim = Claim.take(tmp_path)
    renewed = claim.renew()
    assert (renewed.number, claims_in(tmp_path)) == (2, [".claim-g0002"])
    newer = Claim.take(tmp_path)
    # The older process was paused after it had looked at its claim.
    renewed.workspace.mkdir(parents=True)
    with pytest.raises(TakenOver):
        renewed.renew()
    newer.check()


def test_a_process_that_cannot_be_evicted_is_outdated_by_its_number(tmp_path, monkeypatch):
    older = Start(tmp_path)

    def refuse(*_):
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.rename", refuse)
        newer = Start(tmp_path)
    path = newer.save(1)
    older.save(2)
    assert newest(tmp_path) == path


def test_partial_files_of_other_jobs_are_kept(tmp_path):
    partial = tmp_path / ".model.pth.other-1.partial"
    partial.touch()
    Claim.take(tmp_path)
    assert partial.exists()


# A removed folder


def empty(folder):
    for path in folder.iterdir():
        path.unlink() if path.is_file() else shutil.rmtree(path)


@pytest.mark.parametrize("remove", [shutil.rmtree, empty])
def test_a_folder_that_vanishes_during_a_run_is_not_made_again(tmp_path, remove):
    # The volume may be gone. The rest of the run would be written to the disk below it.
    start = Start(tmp_path / "c")
    start.save(1)
    remove(start.checkpoints.folder)
    calls = [
        lambda: start.save(2),
        lambda: start.checkpoints.write_beside(tmp_path / "c" / "model.pth", {}),
        start.checkpoints.restore,
    ]
    for call in calls:
        with pytest.raises(RetryableError, match="was removed or emptied during the run") as caught:
            call()
        assert not isinstance(caught.value, TakenOver)
    assert list(tmp_path.glob("c/*")) == []
    # The next start may make it.
    assert Start(tmp_path / "c").step == 0


def test_an_older_process_cannot_write_to_a_folder_that_was_removed_and_made_again(tmp_path):
    folder = tmp_path / "c"
    older = Start(folder)
    shutil.rmtree(folder)
    # The numbers begin again, so this start has the same number.
    newer = Start(folder)
    assert claims_in(folder) == [".claim-g0001"]
    with pytest.raises(TakenOver):
        older.save(1)
    assert newer.save(1).name == "step-g0001-0000000001.pt"


# Other files, and other ranks


def test_an_older_process_does_not_replace_a_file_beside_the_checkpoints(tmp_path):
    older = Start(tmp_path, fill=1)
    path = tmp_path / "model.pth"
    older.checkpoints.write_beside(path, older.model.state_dict())
    newer = Start(tmp_path, fill=2)
    newer.checkpoints.write_beside(path, newer.model.state_dict())
    with pytest.raises(TakenOver):
        older.checkpoints.write_beside(path, older.model.state_dict())
    assert torch.load(path)["weight"].unique().tolist() == [2]


def test_a_file_in_another_folder_needs_no_claim(tmp_path):
    older = Start(tmp_path / "c")
    Start(tmp_path / "c")
    path = tmp_path / "models" / "model.pth"
    older.checkpoints.write_beside(path, older.model.state_dict())
    assert path.exists()


@on_every_rank
def newest_after_each_call(runtime):
    parts = {"model": nn.Linear(2, 1)}
    checkpoints = Checkpoints("claimed", runtime, parts)
    names = [checkpoints.newest]
    checkpoints.save(1)
    checkpoints.wait()
    names.append(checkpoints.newest.name)
    checkpoints = Checkpoints("claimed", runtime, parts)
    checkpoints.restore()
    names.append(checkpoints.newest.name)
    checkpoints.save(2)
    return [*names, checkpoints.newest.name]


def test_all_ranks_know_the_newest_file(ranks):
    for names in ranks.values(newest_after_each_call):
        assert names == [
            None,
            "step-g0001-0000000001.pt",
            "step-g0001-0000000001.pt",
            "step-g0002-0000000002.pt",
        ]


@on_every_rank
def error_of_a_start_that_is_taken_over(runtime):
    checkpoints = Checkpoints("contested", runtime, {"model": nn.Linear(2, 1)})
    if runtime.is_main:
        checkpoints._files.candidates = lambda _: Claim.take(checkpoints.folder) and []
    try:
        checkpoints.restore()
    except TakenOver:
        return "taken over"


def test_a_start_that_is_taken_over_while_it_restores_ends_on_all_ranks(ranks):
    assert ranks.values(error_of_a_start_that_is_taken_over) == ["taken over"] * ranks.count
