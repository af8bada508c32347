"""Restoring: a certain checkpoint, some of the parts, and what is refused before it does harm."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ddp_trainer.checkpoint import file as checkpoint_file
from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.checkpoint.claim import Claim
from ddp_trainer.checkpoint.folder import Best, Retention
from ddp_trainer.checkpoint.parts import PerRank
from ddp_trainer.checkpoint.weights import read_part
from ddp_trainer.errors import RetryableError, UserError
from ddp_trainer.ranks.runtime import Runtime

from .parts import Numbers


def a_model(fill=1.0, width=2):
    model = nn.Linear(width, 2)
    nn.init.constant_(model.weight, fill)
    return model


class Start:
    """One start of a job. The weights are the last trained step."""

    def __init__(self, folder, **options):
        self.model = a_model(0.0)
        self.scheduler = Numbers(epoch=0)
        parts = {"model": self.model, "scheduler": self.scheduler}
        retention = Retention(newest=3)
        self.checkpoints = Checkpoints(folder, Runtime(), parts, retention=retention, **options)

    def save(self, *steps, **options):
        for step in steps:
            nn.init.constant_(self.model.weight, step)
            self.scheduler.state["epoch"] = step
            self.checkpoints.save(step, **options)
        self.checkpoints.wait()

    def restore(self, *arguments, **options):
        return self.checkpoints.restore(*arguments, **options), self.weight

    @property
    def weight(self):
        return self.model.weight.unique().item()


def names_in(folder):
    return sorted(path.name for path in folder.glob("step-*"))


def error_of(call, kind=UserError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[data.index(np.float32(path.stem[-10:]).tobytes())] ^= 1
    path.write_bytes(data)


# A write under way


def test_a_restore_waits_for_the_checkpoint_that_is_being_written(tmp_path):
    start = Start(tmp_path)
    for step in (1, 2):
        nn.init.constant_(start.model.weight, step)
        start.checkpoints.save(step)
        nn.init.constant_(start.model.weight, 77.0)
        assert start.restore() == (step, step)


# Steps


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None, torch.tensor(0.5)])
def test_a_step_that_is_no_step_is_refused_in_save(tmp_path, step):
    start = Start(tmp_path)
    message = error_of(lambda: start.checkpoints.save(step))
    assert message.startswith("step: must be an integer >= 0, got ")
    assert list(tmp_path.iterdir()) == []


def test_integers_of_other_types_are_steps(tmp_path):
    start = Start(tmp_path)
    for step in (np.int64(4), torch.tensor(5)):
        start.checkpoints.save(step)
    start.checkpoints.wait()
    assert Start(tmp_path).checkpoints.restore() == 5


def test_a_step_that_is_not_above_the_last_one_is_refused(tmp_path):
    start = Start(tmp_path)
    start.save(1000, 2000)
    for step in (100, 2000):
        message = error_of(lambda step=step: start.checkpoints.save(step))
        assert f"save: step {step} is not above 2000, that of the last checkpoint" in message
    assert Start(tmp_path).restore() == (2000, 2000)


# A certain checkpoint


def test_a_run_goes_on_from_an_earlier_step(tmp_path):
    start = Start(tmp_path)
    start.save(1, 2, 3)
    assert start.restore(2) == (2, 2)
    assert start.scheduler.state == {"epoch": 2}
    # Step 3 was given up. What follows from step 2 is newer, and step 2 is kept beside it.
    start.save(3)
    assert names_in(tmp_path) == [
        "step-g0001-0000000002.pt",
        "step-g0001-0000000003.pt",
        "step-g0002-0000000003.pt",
    ]
    start.save(4)
    assert names_in(tmp_path)[0] == "step-g0001-0000000002.pt"
    assert Start(tmp_path).restore() == (4, 4)


def test_a_step_is_chosen_at_the_start(tmp_path):
    Start(tmp_path).save(1, 2, 3)
    start = Start(tmp_path)
    assert start.restore(step=1) == (1, 1)
    start.save(2)
    assert Start(tmp_path).restore() == (2, 2)


def test_what_follows_a_restore_of_the_own_newest_needs_no_new_number(tmp_path):
    start = Start(tmp_path)
    start.save(1, 2)
    assert start.restore() == (2, 2)
    assert "step 2 is not above 2" in error_of(lambda: start.save(2))
    start.save(3)
    assert names_in(tmp_path) == [f"step-g0001-000000000{step}.pt" for step in (1, 2, 3)]


def test_the_best_is_restored(tmp_path):
    start = Start(tmp_path)
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.1)):
        start.save(step, score=score)
    assert start.restore(best=True) == (2, 2)
    assert Start(tmp_path).restore(best=True) == (2, 2)


def test_a_checkpoint_that_is_not_there_is_refused_without_taking_the_folder_over(tmp_path):
    running = Start(tmp_path)
    running.save(1, 2)
    other = Start(tmp_path).checkpoints
    assert error_of(lambda: other.restore(7)) == (
        f"{tmp_path} has no checkpoint of step 7; it has those of 1, 2"
    )
    assert "has no checkpoint with a score" in error_of(lambda: other.restore(best=True))
    assert "expected step or best, got both" in error_of(lambda: other.restore(1, best=True))
    assert "parts must be a list of names" in error_of(lambda: other.restore(parts="model"))
    assert "got ['ema']" in error_of(lambda: other.restore(new_parts=["ema"]))
    nowhere = Checkpoints(None, Runtime(), {"model": a_model()})
    assert "there is no folder" in error_of(lambda: nowhere.restore(7))
    running.save(3)


def test_a_chosen_checkpoint_that_is_damaged_is_not_replaced_by_another(tmp_path):
    Start(tmp_path).save(1, 2, 3)
    flip_a_byte(tmp_path / "step-g0001-0000000002.pt")
    message = error_of(lambda: Start(tmp_path).restore(2))
    assert "the chosen checkpoint" in message
    assert "the checksum of" in message
    assert len(names_in(tmp_path)) == 3


# Some of the parts


def test_only_some_parts_are_restored(tmp_path):
    Start(tmp_path).save(3)
    start = Start(tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    assert start.restore(parts=["model"]) == (3, 3)
    assert start.scheduler.state == {"epoch": 0}
    assert torch.equal(torch.rand(2), expected)


def test_a_new_part_keeps_its_state_if_it_is_expected(tmp_path):
    Start(tmp_path).save(3)

    def a_start(fill):
        ema, loader = a_model(fill), Numbers(position=fill)
        parts = {"model": a_model(), "ema": ema, "loader": PerRank(loader)}
        return ema, loader, Checkpoints(tmp_path, Runtime(), parts)

    _, _, checkpoints = a_start(8.0)
    assert "restore(new_parts=" in error_of(checkpoints.restore)
    ema, loader, checkpoints = a_start(8.0)
    assert checkpoints.restore(new_parts=["ema", "loader"]) == 3
    assert (ema.weight.unique().item(), loader.state) == (8.0, {"position": 8.0})
    checkpoints.save(4)
    checkpoints.wait()
    # From then on it is in the checkpoint.
    ema, loader, checkpoints = a_start(9.0)
    assert checkpoints.restore(new_parts=["ema", "loader"]) == 4
    assert (ema.weight.unique().item(), loader.state) == (8.0, {"position": 8.0})


def test_weights_of_another_run_are_the_initial_ones(tmp_path):
    running = Start(tmp_path / "other")
    running.save(3)
    start = Start(tmp_path / "own")
    if start.checkpoints.restore() == 0:
        (path,) = (tmp_path / "other").glob("step-*")
        start.model.load_state_dict(read_part(path))
    assert start.weight == 3
    running.save(4)


# What is refused


@pytest.mark.parametrize("name", ["model.ema", "", 1])
def test_a_name_that_may_collide_with_that_of_a_tensor_is_refused(name):
    message = error_of(lambda: Checkpoints(None, Runtime(), {name: a_model()}))
    assert message == f"{name!r}: the name of a part must be a string without a dot"


def test_a_newer_format_is_refused_and_kept(tmp_path):
    running = Start(tmp_path)
    running.save(1, 2)
    path = tmp_path / "step-g0001-0000000002.pt"
    newer = {**torch.load(path), "format": 3}
    torch.save(newer, path)
    message = error_of(Start(tmp_path).restore)
    assert f"{path} was made by a newer release of ddp_trainer (format 3;" in message
    assert "newer release" in error_of(lambda: read_part(path))
    assert len(names_in(tmp_path)) == 2
    running.save(3)


def test_another_model_is_refused_without_stopping_the_running_job(tmp_path):
    running = Start(tmp_path)
    running.save(1)
    for other, reason in (
        (a_model(width=5), r"size mismatch for weight: .* \[2, 2\], this run \[2, 5\]"),
        (nn.Sequential(a_model()), r'Missing key\(s\) in state_dict: "0.weight"'),
    ):
        checkpoints = Checkpoints(tmp_path, Runtime(), {"model": other})
        with pytest.raises(UserError, match=rf"does not fit this model \({reason}"):
            checkpoints.restore()
    other = Checkpoints(tmp_path, Runtime(), {"ema": a_model()})
    assert "has no state of this ema" in error_of(other.restore)
    # A script that goes on nevertheless does not stop it either.
    assert "call restore() before the first save" in error_of(lambda: other.save(2))
    running.save(2)


class Resized(nn.Module):
    """A module that takes over a parameter of another size, as some do."""

    def __init__(self, size):
        super().__init__()
        self.codes = nn.Parameter(torch.ones(size))

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        self.codes = nn.Parameter(torch.empty_like(state_dict[f"{prefix}codes"]))
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def test_a_module_that_adapts_to_a_state_may_load_it(tmp_path):
    saved = Checkpoints(tmp_path, Runtime(), {"model": nn.Sequential(Resized(3))})
    saved.save(1)
    saved.wait()
    model = nn.Sequential(Resized(1))
    assert Checkpoints(tmp_path, Runtime(), {"model": model}).restore() == 1
    assert model[0].codes.shape == (3,)


def an_optimizer(kind, count=2, **options):
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    optimizer = kind(parameters, **options)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer.step()
    return optimizer


def test_the_reason_of_torch_is_in_the_message(tmp_path):
    def a_start(model, optimizer):
        return Checkpoints(tmp_path, Runtime(), {"model": model, "optimizer": optimizer})

    saved = a_start(nn.BatchNorm1d(2), an_optimizer(torch.optim.Adam))
    saved.save(1)
    saved.wait()

    def message(model, optimizer):
        return error_of(a_start(model, optimizer).restore)

    adam = an_optimizer(torch.optim.Adam)
    plain = nn.BatchNorm1d(2, track_running_stats=False)
    assert '(Unexpected key(s) in state_dict: "running_mean",' in message(plain, adam)
    fewer = message(nn.BatchNorm1d(2), an_optimizer(torch.optim.Adam, count=1))
    assert "(loaded state dict contains a parameter group that doesn't match the size" in fewer
    sgd = message(nn.BatchNorm1d(2), an_optimizer(torch.optim.SGD, momentum=0.9))
    assert "it is the state of another optimizer than SGD: it has amsgrad, betas" in sgd
    assert "--" not in fewer + sgd


def test_the_part_that_cannot_be_read_again_is_named(tmp_path):
    parts = {
        "model": a_model(),
        "scores": Numbers(best=np.float64(0.5)),
        "loader": PerRank(Numbers(position=np.float64(1.5))),
    }
    checkpoints = Checkpoints(tmp_path, Runtime(), parts)
    checkpoints.save(1)
    assert "the state of scores, loader of rank 0 can be written" in error_of(checkpoints.wait)


# Storage


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOENT])
def test_storage_that_fails_during_a_run_is_worth_a_restart(tmp_path, monkeypatch, number):
    start = Start(tmp_path)
    start.save(1)

    def fail(*_):
        raise OSError(number, "the storage failed")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_file.torch, "save", fail)
        error_of(lambda: start.save(2), RetryableError)
        beside = tmp_path / "model.pth"
        error_of(lambda: start.checkpoints.write_beside(beside, {}), RetryableError)
    with monkeypatch.context() as patch:
        patch.setattr(Claim, "list_files", fail)
        error_of(start.restore, RetryableError)
    start.save(3)


def test_another_folder_that_has_worked_is_worth_a_restart_too(tmp_path):
    checkpoints = Start(tmp_path / "c").checkpoints
    path = tmp_path / "models" / "model.pth"
    checkpoints.write_beside(str(path), {"weight": torch.ones(1)})
    shutil.rmtree(path.parent)
    path.parent.touch()
    error_of(lambda: checkpoints.write_beside(path, {}), RetryableError)
    with pytest.raises(UserError) as caught:
        checkpoints.write_beside(path / "never", {})
    assert caught.value.exit_code == 2


def test_a_relative_folder_does_not_follow_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    start = Start("c")
    start.save(1)
    monkeypatch.chdir("elsewhere")
    start.save(2)
    assert start.checkpoints.newest == tmp_path / "c" / "step-g0001-0000000002.pt"
    assert list(Path().iterdir()) == []
    assert Start(tmp_path / "c").restore() == (2, 2)


def test_a_link_to_a_file_that_is_gone_is_reported_and_kept(tmp_path, capsys):
    Start(tmp_path).save(1, 2)
    link = tmp_path / "step-g0001-0000000002.pt"
    link.unlink()
    link.symlink_to(tmp_path / "archive" / "gone.pt")
    assert Start(tmp_path).restore() == (1, 1)
    assert "is a symbolic link to a file that does not exist" in capsys.readouterr().err
    assert link.is_symlink()


def test_a_score_that_is_infinite_is_no_score(tmp_path):
    start = Start(tmp_path)
    start.save(1, score=float("inf"))
    assert Best.read(str(tmp_path)) is None
    start.save(2, score=0.5)
    assert Best.read(str(tmp_path)).step == 2
    # An earlier release has written it.
    best = json.loads((tmp_path / "best.json").read_text())
    (tmp_path / "best.json").write_text(json.dumps({**best, "score": float("inf")}))
    assert Best.read(str(tmp_path)) is None


# torch.compile and wrappers


def compiled(module):
    return torch.compile(module, backend="eager")


def a_net(compiles="", fill=0.0):
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    nn.init.constant_(net[0].weight, fill)
    if compiles == "a layer":
        net[0] = compiled(net[0])
    if compiles == "before wrap":
        return Runtime().wrap(compiled(net))
    return compiled(net) if compiles == "all" else net


KEYS = [f"0.{name}" for name in ("weight", "bias")]


@pytest.mark.parametrize("compiles", ["all", "a layer", "before wrap"])
def test_the_keys_of_a_compiled_model_are_those_of_the_bare_one(tmp_path, compiles):
    for save, load in ((compiles, ""), ("", compiles)):
        folder = tmp_path / f"saved-{save}"
        saved = Checkpoints(folder, Runtime(), {"model": a_net(save, fill=3.0)})
        path = saved.save(1)
        saved.wait()
        state = read_part(path)
        assert list(state)[:2] == KEYS
        assert set(state._metadata) == {"", "0", "1"}
        net = a_net(load)
        assert Checkpoints(folder, Runtime(), {"model": net}).restore() == 1
        assert next(net.parameters()).unique().item() == 3.0
    assert list(a_net("before wrap").state_dict())[:2] == KEYS


def test_states_of_wrapped_models_are_loaded(tmp_path):
    """Load a checkpoint of an earlier release, or of a model in torch's own wrappers."""
    for prefix in ("_orig_mod.", "module.", "_orig_mod.module."):
        saved = Checkpoints(tmp_path / prefix, Runtime(), {"model": a_net(fill=3.0)})
        path = saved.save(1)
        saved.wait()
        state = torch.load(path)
        model = state["parts"]["model"]
        state["parts"]["model"] = {f"{prefix}{name}": value for name, value in model.items()}
        torch.save(state, path)
        net = a_net()
        Checkpoints(tmp_path / prefix, Runtime(), {"model": net}).restore()
        assert net[0].weight.unique().item() == 3.0
