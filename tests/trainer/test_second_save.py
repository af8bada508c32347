"""Saving again at one step, after an interrupted wait, and after errors of a device."""

import itertools
import threading

import pytest
import torch
from ddp_trainer.weights import export, read_part
from torch import nn

from ddp_trainer.checkpoint.across_ranks import _fingerprint
from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.checkpoint.claim import Claim, list_checkpoints
from ddp_trainer.checkpoint.file import find_fault
from ddp_trainer.checkpoint.folder import Best, CheckpointFolder
from ddp_trainer.checkpoint.listing import listed
from ddp_trainer.checkpoint.parts import PerRank
from ddp_trainer.errors import RetryableError, UserError
from ddp_trainer.ranks.runtime import Runtime


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


def test_a_checkpoint_that_replaces_the_best_has_its_own_score(tmp_path):
    _, checkpoints = a_job(tmp_path)
    checkpoints.save(5, score=0.9)
    checkpoints.save(5)
    checkpoints.wait()
    assert Best.read(tmp_path) is None
    checkpoints.save(5, score=0.1)
    checkpoints.wait()
    assert Best.read(tmp_path).score == 0.1


class Broken:
    """A part whose device has failed."""

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
