"""Saving again at one step, after an interrupted wait, and after errors of a device."""

import itertools
import threading

import pytest
import torch
from ddp_trainer.weights import export, read_part
from torch import nn

from ddp_trainer.checkpoint.across_ranks import _fingerprint
from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.checkpoint.claim import Claim, TakenOver, list_checkpoints
from ddp_trainer.checkpoint.file import find_fault
from ddp_trainer.checkpoint.folder import Best, CheckpointFolder
from ddp_trainer.checkpoint.listing import listed
from ddp_trainer.checkpoint.parts import PerRank
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.errors import RetryableError, UserError
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.progress import Progress

from .launch import alone


def a_job(folder, **parts):
    model = nn.Linear(2, 2, bias=False)
    return model, Checkpoints(folder, Runtime(), {"model": model, **parts})


def test_a_save_after_an_interrupted_wait_does_not_change_what_is_written(tmp_path, monkeypatch):
    may_write = threading.Event()
    write = CheckpointFolder.write

    def slow(self, path, state):
        assert may_write.wait(10)
        write(self, path, state)

    monkeypatch.setattr(CheckpointFolder, "write", slow)
    model, checkpoints = a_job(tmp_path)
    nn.init.constant_(model.weight, 1.0)
    path = checkpoints.save(1)
    result = checkpoints._write.result
    with monkeypatch.context() as interrupted:
        interrupted.setattr(checkpoints._write, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.wait()
    nn.init.constant_(model.weight, 2.0)
    threading.Timer(0.1, may_write.set).start()
    checkpoints.save(2)
    checkpoints.wait()
    assert result() is None
    assert float(read_part(path)["weight"][0, 0]) == 1.0


def interrupt():
    raise KeyboardInterrupt


def test_each_directory_of_a_step_has_a_higher_number(tmp_path):
    claim = Claim.take(tmp_path)
    for removed in (None, "step-g0001-0000000005.sharded", "step-g0001-0000000005-2.sharded"):
        path, draft = claim.make_draft(5)
        claim.commit(draft, path)
        assert list_checkpoints(tmp_path)[0] == path
        if removed:
            (tmp_path / removed).rmdir()


def weight_in(path):
    return read_part(path)["weight"].unique().item()


def test_a_second_save_at_a_step_is_refused_and_the_first_is_kept(tmp_path):
    model, checkpoints = a_job(tmp_path)
    nn.init.constant_(model.weight, 1.0)
    path = checkpoints.save(4, score=0.9)
    nn.init.constant_(model.weight, 3.0)
    with pytest.raises(UserError, match=r"save: step 4 is not above 4, .* save_once"):
        checkpoints.save(4)
    assert weight_in(path) == 1.0
    assert Best.read(tmp_path).score == 0.9
    checkpoints.save(5)
    checkpoints.wait()


def test_a_step_that_is_saved_already_is_not_saved_once_more(tmp_path):
    model, checkpoints = a_job(tmp_path)
    nn.init.constant_(model.weight, 1.0)
    written = []
    first = checkpoints.save_once(4, on_written=lambda step, *_: written.append(step))
    nn.init.constant_(model.weight, 3.0)
    again = checkpoints.save_once(4, on_written=lambda step, *_: written.append(step))
    assert (first, weight_in(again), written) == (again, 1.0, [4])
    later = checkpoints.save_once(5)
    checkpoints.wait()
    assert weight_in(later) == 3.0
    with pytest.raises(UserError, match="save: step 4 is not above 5"):
        checkpoints.save_once(4)


def test_a_score_is_noted_for_the_checkpoint_that_is_there(tmp_path):
    _, checkpoints = a_job(tmp_path)
    best = checkpoints.save(1, score=0.5)
    for step in (2, 3, 4):
        checkpoints.save(step)
    path = checkpoints.save_once(4, score=0.7)
    assert Best.read(tmp_path) == checkpoints.best == Best(4, path.name, 0.7)
    # What was the best is superfluous now.
    assert not best.exists()
    # The highest of several scores counts, and none takes it away.
    checkpoints.save_once(4, score=0.6)
    checkpoints.save_once(4)
    assert Best.read(tmp_path).score == 0.7


def test_a_step_whose_write_failed_can_be_saved_again(tmp_path, monkeypatch):
    _, checkpoints = a_job(tmp_path)
    checkpoints.save(1)
    checkpoints.wait()

    def fail(*_):
        raise OSError(28, "No space left on device")

    for save in (checkpoints.save, checkpoints.save_once):
        step = checkpoints.restore() + 1
        with monkeypatch.context() as patch:
            patch.setattr(Claim, "write", fail)
            checkpoints.save(step)
            with pytest.raises(RetryableError, match="No space left"):
                checkpoints.wait()
        assert save(step).name.endswith(f"{step}.pt")
        checkpoints.wait()
        assert checkpoints.restore() == step


def test_an_older_start_learns_of_the_newer_one_also_if_its_step_is_saved(tmp_path):
    _, checkpoints = a_job(tmp_path)
    checkpoints.save(1)
    checkpoints.wait()
    Claim.take(tmp_path)
    with pytest.raises(TakenOver):
        checkpoints.save_once(1)


def test_a_start_saves_the_step_that_it_continues_from_once_more(tmp_path):
    _, earlier = a_job(tmp_path)
    earlier.save(3)
    earlier.wait()
    _, checkpoints = a_job(tmp_path)
    assert checkpoints.restore() == 3
    assert checkpoints.save_once(3).name == "step-g0002-0000000003.pt"


def test_nothing_is_saved_once_without_a_folder():
    assert a_job(None)[1].save_once(3) is None


def test_the_end_of_an_epoch_needs_no_second_checkpoint_of_its_last_step(tmp_path):
    """Stop between the saved last step of an epoch and the evaluation after it."""

    def a_start():
        sampler = GlobalBatchSampler(4, 2)
        return sampler, a_job(tmp_path, sampler=sampler)[1], Progress(Runtime())

    def train(sampler, checkpoints, progress, *, until_evaluation):
        step = checkpoints.restore()
        evaluated = []
        while sampler.epoch < 2:
            for _ in sampler:
                step += 1
                progress.save(checkpoints, step)
            if step == until_evaluation:
                break
            evaluated.append(step)
            progress.save(checkpoints, step, score=step)
        progress.wait_for_checkpoint()
        return evaluated

    assert train(*a_start(), until_evaluation=4) == [2]
    assert Best.read(tmp_path).step == 2
    # The checkpoint is from before the evaluation, so the evaluation follows.
    assert train(*a_start(), until_evaluation=None) == [4]
    assert (Best.read(tmp_path).step, Best.read(tmp_path).score) == (4, 4.0)


@pytest.mark.parametrize("has_progress", [False, True])
def test_a_stop_at_a_step_that_is_saved_writes_nothing_more(tmp_path, has_progress):
    script = f"""
import os, signal, sys
from ddp_trainer import Checkpoints, Progress, Runtime, StopVote
runtime = Runtime()
checkpoints = Checkpoints(sys.argv[1], runtime, {{}})
progress = Progress(runtime) if {has_progress} else None
stop = StopVote(runtime, checkpoints, progress)
checkpoints.save(7)
os.kill(os.getpid(), signal.SIGTERM)
stop.after_step(7)
"""
    run = alone("-c", script, tmp_path)
    assert run.finish() == 143, run.stderr
    path = run.of("interrupted")[0]["path"] if has_progress else run.stderr
    assert "step-g0001-0000000007.pt" in path
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-g0001-0000000007.pt"]


class Broken:
    """A part on a failed device."""

    def state_dict(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def load_state_dict(self, state):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_an_error_of_a_device_is_no_wrong_use(tmp_path):
    _, checkpoints = a_job(tmp_path, broken=Broken())
    with pytest.raises(RetryableError, match="broken cannot be read: CUDA out of memory"):
        checkpoints.save(1)


def test_a_rank_may_get_a_part_of_its_own_that_the_checkpoint_does_not_have(tmp_path):
    _, checkpoints = a_job(tmp_path)
    checkpoints.save(1)
    checkpoints.wait()
    stream = nn.Linear(1, 1)
    parts = {"stream": PerRank(stream)}
    assert a_job(tmp_path, **parts)[1].restore(new_parts=["stream"]) == 1
    with pytest.raises(UserError, match="has no state of this stream"):
        a_job(tmp_path, **parts)[1].restore()


def test_an_export_does_not_replace_a_checkpoint(tmp_path):
    _, checkpoints = a_job(tmp_path)
    path = checkpoints.save(1)
    checkpoints.wait()
    for out in (path, tmp_path / "other" / path.name):
        with pytest.raises(UserError, match="is the name of a checkpoint"):
            export(path, out)
    assert find_fault(path) is None
    out = tmp_path / "model.safetensors"
    export(path, out)
    assert out.stat().st_mode == path.stat().st_mode


def test_a_file_of_one_byte_is_not_complete(tmp_path):
    (tmp_path / "step-g0001-0000000001.pt").write_bytes(b"x")
    (found,) = listed(tmp_path)
    assert found.fault


def test_a_fingerprint_depends_on_each_bit_and_its_place():
    matrix = torch.randn(128, 128)
    others = {
        "equal": matrix.clone(),
        "negative": -matrix,
        "rows": matrix.flip(0),
        "columns": matrix.flip(1),
        "transposed": matrix.t(),
        "one number": matrix.clone(),
        "zero": torch.zeros(128, 128),
        "two": torch.full((128, 128), 2.0),
        "one": torch.ones(128, 128),
        "short": matrix[:, 1:],
    }
    others["one number"][7, 7] += 1e-6
    found = {name: _fingerprint(tensor) for name, tensor in {"own": matrix, **others}.items()}
    pairs = itertools.combinations(found, 2)
    assert [pair for pair in pairs if found[pair[0]] == found[pair[1]]] == [("own", "equal")]
    for odd in (torch.tensor(1.0), torch.empty(0), torch.ones(9, dtype=torch.uint8)[1:]):
        assert _fingerprint(odd) == _fingerprint(odd.clone())
