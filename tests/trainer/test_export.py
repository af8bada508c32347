"""The commands to list checkpoints and to write their weights to other files."""

import os

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.checkpoint.listing import describe, listed
from ddp_trainer.checkpoint.weights import export
from ddp_trainer.cli import main as cli
from ddp_trainer.errors import UserError
from ddp_trainer.ranks.runtime import Runtime


class Tied(nn.Module):
    """A model with the weights of its first layer also in its last one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(2.0))


@pytest.fixture
def job(tmp_path):
    """Return a model, and its checkpoints: steps 1 to 4 are saved, and 2 is the best."""
    torch.manual_seed(1)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    parts = {"model": model, "optimizer": optimizer}
    checkpoints = Checkpoints(tmp_path / "c", Runtime(), parts)
    for step, score in ((1, 0.1), (2, 0.9), (3, None), (4, 0.5)):
        checkpoints.save(step, score=score)
    checkpoints.wait()
    return model, checkpoints


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["ddp-trainer", *map(str, words)])
    return cli.main()


def test_the_weights_are_exported_for_other_programs(job, tmp_path, monkeypatch):
    model, checkpoints = job
    for suffix, load in ((".safetensors", load_file), (".pt", torch.load), (".pth", torch.load)):
        out = tmp_path / f"model{suffix}"
        assert run(monkeypatch, "export", checkpoints.newest, out) == 0
        state = load(out)
        assert state.keys() == model.state_dict().keys()
        other = Tied()
        other.load_state_dict(state)
        assert torch.equal(other.last.weight, model.last.weight)
        assert other.first.weight is other.last.weight
    assert [path.name for path in tmp_path.glob(".*")] == []
    # The job was not disturbed.
    checkpoints.save(5)
    checkpoints.wait()


def test_another_part_is_exported(job, tmp_path, monkeypatch):
    path = job[1].newest
    assert run(monkeypatch, "export", path, tmp_path / "o.pt", "--part", "optimizer") == 0
    assert torch.load(tmp_path / "o.pt").keys() == {"state", "param_groups"}


def test_weights_that_share_memory_in_a_file_are_exported(job, tmp_path):
    path = job[1].newest
    state = torch.load(path)
    weights = state["parts"]["model"]
    weights["last.weight"] = weights["first.weight"].t()
    torch.save(state, path)
    export(path, tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert torch.equal(found["last.weight"], found["first.weight"].t())


def test_what_cannot_be_exported_is_explained(job, tmp_path, monkeypatch, capsys):
    path = job[1].newest
    (tmp_path / "text.pt").write_text("no checkpoint")
    for words, message in (
        ((path, tmp_path / "m.bin"), "m.bin: must end in .safetensors, .pt, .pth"),
        ((path.with_suffix(".sharded"), tmp_path / "m.pt"), "index.pt: file not found"),
        ((tmp_path / "text.pt", tmp_path / "m.pt"), "text.pt is no readable checkpoint"),
        ((path, tmp_path / "m.pt", "--part", "ema"), "has no part ema; it has model, optimizer"),
        ((path, tmp_path / "o.safetensors", "--part", "optimizer"), "which is no tensor"),
        ((path, tmp_path / "no" / "m.safetensors"), "cannot write"),
    ):
        assert run(monkeypatch, "export", *words) == 2
        assert message in capsys.readouterr().err


def test_checkpoints_are_listed(job, tmp_path, monkeypatch, capsys):
    job[1].newest.write_bytes(b"half a checkpoint")
    assert run(monkeypatch, "checkpoints", tmp_path / "c") == 0
    head, newest, third, best = capsys.readouterr().out.splitlines()
    assert head.split() == ["STEP", "SIZE", "AGE", "STATE", "FILE"]
    assert newest.split()[0] == "4"
    assert "unreadable" in newest
    assert newest.split()[1:3] == ["17", "B"]
    assert "complete" in third
    assert third.endswith("step-g0001-0000000003.pt")
    assert best.endswith("step-g0001-0000000002.pt  (best)")
    assert run(monkeypatch, "checkpoints", tmp_path / "none") == 2
    assert "none: folder not found" in capsys.readouterr().err


def test_ages_and_sizes_are_short_and_never_negative(job, tmp_path):
    path = job[1].newest
    now = 2_000_000_000.0
    for ahead, expected in ((3600, "0 s"), (-50, "50 s"), (-7200, "2 h"), (-300_000, "3 d")):
        os.utime(path, (now + ahead, now + ahead))
        line = list(describe(listed(tmp_path / "c", now)))[1]
        assert f"KiB  {expected:>6}  complete" in line


def test_a_folder_without_checkpoints_has_an_empty_list(tmp_path):
    assert listed(str(tmp_path)) == []
    with pytest.raises(UserError, match="folder not found"):
        listed(tmp_path / "none")
