"""Checkpoint files are complete, the newest readable one is used, another job's is refused."""

import re
import resource
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.checkpoint.file import save_atomically
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.errors import UserError
from ddp_trainer.ranks.runtime import Runtime

from .launch import newest


class Job:
    """A model, an optimizer with state and a sampler. All weights are `fill`."""

    def __init__(self, folder, fill=0.0, width=4, **identity):
        self.model = nn.Linear(width, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.sampler = GlobalBatchSampler(10, 2)
        self.model(torch.ones(2, width)).sum().backward()
        self.optimizer.step()
        nn.init.constant_(self.model.weight, fill)
        parts = {"model": self.model, "optimizer": self.optimizer, "sampler": self.sampler}
        self.checkpoints = Checkpoints(folder, Runtime(), parts, identity)

    def save(self, step):
        self.sampler.offset = step % 10
        return save_and_wait(self.checkpoints, step)


def save_and_wait(checkpoints, step, **options):
    path = checkpoints.save(step, **options)
    checkpoints.wait()
    return path


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "truncated":
        content = content[: len(content) // 2]
    elif how == "empty":
        content = bytearray()
    elif how == "altered":
        at = content.index(torch.full((4,), 7.0).numpy().tobytes())
        content[at] ^= 1
    path.write_bytes(content)


def test_a_saved_state_is_restored(tmp_path):
    torch.manual_seed(1)
    saved = Job(tmp_path / "not" / "yet" / "there", fill=7.0)
    saved.save(4)
    # Drawn from the generator's state at the time of saving.
    expected = torch.rand(3)

    torch.manual_seed(2)
    restored = Job(tmp_path / "not" / "yet" / "there")
    assert restored.checkpoints.restore() == 4
    assert torch.equal(restored.model.weight, saved.model.weight)
    assert restored.sampler.state_dict() == saved.sampler.state_dict()
    momentum = [
        job.optimizer.state_dict()["state"][0]["momentum_buffer"] for job in (saved, restored)
    ]
    assert torch.equal(*momentum)
    assert torch.equal(torch.rand(3), expected)


def test_a_scheduler_is_restored_exactly(tmp_path):
    """Restore the milestones of MultiStepLR, a Counter: `update` would add to it."""

    def scheduler():
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3])

    save_and_wait(Checkpoints(tmp_path, Runtime(), {"scheduler": scheduler()}), 1)
    restored = scheduler()
    Checkpoints(tmp_path, Runtime(), {"scheduler": restored}).restore()
    assert restored.milestones == {2: 1, 3: 1}


def test_a_state_that_cannot_be_read_again_is_refused_at_the_first_save(tmp_path):
    scores = SimpleNamespace(state_dict=lambda: {"best": np.float64(0.5)})
    with pytest.raises(
        UserError, match=r"the state of scores can be written but not read again .*numpy"
    ):
        save_and_wait(Checkpoints(tmp_path, Runtime(), {"scores": scores}), 1)
    assert names_in(tmp_path) == [".claim-g0001"]


def test_a_file_does_not_change_how_a_step_is_computed(tmp_path):
    """Keep the memory order of a fused optimizer. Otherwise it would compute wrong values."""

    def job(layout, fused):
        torch.manual_seed(1)
        model = nn.Conv2d(2, 3, 2).to(memory_format=layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        return (
            model,
            optimizer,
            Checkpoints(tmp_path, Runtime(), {"model": model, "optimizer": optimizer}, {}),
        )

    def step(model, optimizer):
        model(torch.arange(18.0).view(1, 2, 3, 3)).square().sum().mul(1e-4).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, checkpoints = job(torch.channels_last, fused=False)
    step(model, optimizer)
    file = torch.load(save_and_wait(checkpoints, 1))
    assert file["parts"]["model"]["weight"].is_contiguous()
    assert file["parts"]["optimizer"]["state"][0]["momentum_buffer"].is_contiguous()
    step(model, optimizer)
    resumed, fused, checkpoints = job(torch.channels_last, fused=True)
    assert checkpoints.restore() == 1
    assert fused.param_groups[0]["fused"] is True
    step(resumed, fused)
    assert torch.allclose(resumed.weight, model.weight, rtol=1e-5)


def test_without_a_folder_nothing_is_saved_and_the_user_is_warned(capsys):
    job = Job(None)
    assert job.checkpoints.restore() == 0
    assert job.save(1) is None
    assert "no checkpoints are written, because no folder is given" in capsys.readouterr().err


def test_an_empty_folder_starts_from_the_beginning(tmp_path):
    assert Job(tmp_path).checkpoints.restore() == 0


def test_the_newest_two_are_kept_and_nothing_else_is_left(tmp_path):
    job = Job(tmp_path)
    for step in (1, 2, 9, 10):
        job.save(step)
    assert names_in(tmp_path) == [
        ".claim-g0001",
        "step-g0001-0000000009.pt",
        "step-g0001-0000000010.pt",
    ]


@pytest.mark.parametrize("how", ["truncated", "empty", "altered"])
def test_a_damaged_newest_file_is_replaced_by_the_one_before_it(tmp_path, how, capsys):
    job = Job(tmp_path, fill=7.0)
    job.save(1)
    damage(job.save(2), how)
    restored = Job(tmp_path)
    assert restored.checkpoints.restore() == 1
    assert restored.model.weight.unique().tolist() == [7.0]
    warning = r"cannot read the checkpoint \S*step-g0001-0000000002.pt"
    assert re.search(warning, capsys.readouterr().err)
    restored.save(3)
    assert names_in(tmp_path) == [
        ".claim-g0002",
        "step-g0001-0000000001.pt",
        "step-g0001-0000000002.unreadable",
        "step-g0002-0000000003.pt",
    ]


def test_without_a_readable_file_the_run_does_not_start_again_silently(tmp_path):
    job = Job(tmp_path, fill=7.0)
    for step in (1, 2):
        damage(job.save(step), "truncated")
    # The second time shows that the first try has changed nothing.
    for _ in range(2):
        with pytest.raises(
            UserError,
            match=r"no checkpoint in .* can be read .* remove all of them to train from the begin",
        ):
            Job(tmp_path).checkpoints.restore()


def test_an_incomplete_write_leaves_no_file(tmp_path, monkeypatch):
    job = Job(tmp_path, fill=7.0)
    job.save(1)

    def half(state, file):
        file.write(b"half a checkpoint")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half)
        with pytest.raises(UserError, match=r"cannot write .*No space left on device"):
            job.save(2)
    assert list(tmp_path.rglob("*.partial")) == []
    assert names_in(tmp_path) == [".claim-g0001", "step-g0001-0000000001.pt"]

    (workspace,) = tmp_path.glob(".claim-*/*")
    (workspace / ".step-g0001-0000000002.pt.host-1.partial").write_bytes(b"left by a SIGKILL")
    assert Job(tmp_path).checkpoints.restore() == 1
    assert list(tmp_path.rglob("*.partial")) == []
    assert names_in(tmp_path) == [".claim-g0002", "step-g0001-0000000001.pt"]


def test_a_full_disk_gets_its_own_message_instead_of_torchs(tmp_path):
    # The tensor is larger than the file's buffer.
    job = Job(tmp_path, width=100_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*File too large") as caught:
            job.save(1)
        # A restart may help: the operator must not take it for wrong use.
        assert caught.value.exit_code == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert names_in(tmp_path) == [".claim-g0001"]


def test_an_optimizer_with_other_groups_is_refused(tmp_path):
    Job(tmp_path).save(1)
    job = Job(tmp_path)
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(UserError, match="does not fit this optimizer"):
        job.checkpoints.restore()


def test_only_tensors_and_plain_values_are_loaded(tmp_path, capsys):
    Job(tmp_path).save(1)
    torch.save({"format": 2, "call": print}, tmp_path / "step-g0001-0000000002.pt")
    assert Job(tmp_path).checkpoints.restore() == 1
    warning = r"cannot read the checkpoint \S*step-g0001-0000000002.pt"
    assert re.search(warning, capsys.readouterr().err)


def change_file(folder, number, **fields):
    """Replace fields of the checkpoint of step `number`. Remove fields with the value None."""
    path = folder / f"step-g0001-{number:010}.pt"
    state = {**torch.load(path, weights_only=True), **fields}
    torch.save({name: value for name, value in state.items() if value is not None}, path)


@pytest.mark.parametrize("value", [None, "7", 7.5, (1,)])
@pytest.mark.parametrize("field", ["step", "identity", "parts", "generators"])
def test_a_file_with_a_wrong_field_is_damaged(tmp_path, capsys, field, value):
    job = Job(tmp_path)
    job.save(1)
    job.save(2)
    change_file(tmp_path, 2, **{field: value})
    assert Job(tmp_path).checkpoints.restore() == 1
    assert f"its field '{field}' is missing or is not of type" in capsys.readouterr().err


@pytest.mark.parametrize("state", [5, "x", [], {"weight": 1}, {"weight": "x"}, {}])
@pytest.mark.parametrize("part", ["model", "optimizer", "sampler"])
def test_a_part_with_another_state_is_refused(tmp_path, part, state):
    Job(tmp_path).save(1)
    path = tmp_path / "step-g0001-0000000001.pt"
    parts = torch.load(path, weights_only=True)["parts"]
    change_file(tmp_path, 1, parts={**parts, part: state})
    with pytest.raises(UserError, match=f"does not fit this {part} .*another folder"):
        Job(tmp_path).checkpoints.restore()


def test_a_part_that_the_file_does_not_have_is_refused(tmp_path):
    Job(tmp_path).save(1)
    change_file(tmp_path, 1, parts={"weights": {}})
    with pytest.raises(UserError, match=r"has no state of this model; it has weights\. Use"):
        Job(tmp_path).checkpoints.restore()


@pytest.mark.parametrize("generator", [5, {}, {"cpu": 1}, {"cpu": torch.zeros(3)}])
def test_a_wrong_state_of_the_generators_is_refused(tmp_path, generator):
    Job(tmp_path).save(1)
    change_file(tmp_path, 1, generators=[generator])
    with pytest.raises(UserError, match="does not fit this random number generator"):
        Job(tmp_path).checkpoints.restore()


def test_another_workloads_checkpoint_is_refused(tmp_path):
    Job(tmp_path, workload="toy", model="small").save(1)
    with pytest.raises(
        UserError, match="made with workload 'toy', but this run has 'digits'; use the set"
    ):
        Job(tmp_path, workload="digits").checkpoints.restore()


def test_another_models_checkpoint_is_refused(tmp_path):
    Job(tmp_path, width=4).save(1)
    with pytest.raises(UserError, match=r"does not fit this model .*another folder"):
        Job(tmp_path, width=5).checkpoints.restore()


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the checkpoint"):
        Job(tmp_path / "file" / "folder").save(1)


def test_the_parts_keep_their_keys(tmp_path):
    Job(tmp_path).save(1)
    state = torch.load(newest(tmp_path), weights_only=True)
    assert list(state["parts"]["model"]) == ["weight", "bias"]


def test_a_file_keeps_the_versions_of_a_model(tmp_path):
    """Keep what load_state_dict reads to know the age of a file."""
    model = torch.nn.BatchNorm1d(2)
    save_atomically(tmp_path / "model.pth", model.state_dict())
    assert (
        torch.load(tmp_path / "model.pth", weights_only=True)._metadata
        == model.state_dict()._metadata
    )
