"""A checkpoint is written by a thread while the training goes on, and nothing of it is lost."""

import random
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn

from ddp_trainer.checkpoint import file as checkpoint_file
from ddp_trainer.checkpoint import folder as checkpoint_folder
from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.checkpoint.claim import TakenOver
from ddp_trainer.checkpoint.folder import Best, Retention
from ddp_trainer.checkpoint.weights import read_part
from ddp_trainer.errors import Interrupted, UserError
from ddp_trainer.ranks.group import process_group
from ddp_trainer.ranks.runtime import Runtime

from .launch import torchrun
from .parts import Numbers

DEADLINE = 120.0  # seconds; reached only if a thread hangs


class Coordinates(torch.Tensor):
    """A subclass. It cannot be read with weights_only."""


class Gate:
    """Stops torch.save until it is opened. With `error`, it then raises this error."""

    def __init__(self, monkeypatch, error=None):
        self.reached = threading.Event()
        self._opened = threading.Event()
        self._error = error
        self._save = torch.save
        monkeypatch.setattr(checkpoint_file.torch, "save", self._wait_and_save)

    def _wait_and_save(self, state, file):
        self.reached.set()
        assert self._opened.wait(DEADLINE)
        if self._error:
            raise self._error
        self._save(state, file)

    def open(self):
        self._opened.set()


def a_model(fill=1.0):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, fill)
    return model


def restored_weight(folder):
    model = a_model()
    step = Checkpoints(folder, Runtime(), {"model": model}).restore()
    return step, model.weight.unique().item()


def steps_in(folder):
    return sorted(int(path.stem[-10:]) for path in folder.glob("step-*.pt"))


def test_the_training_goes_on_while_the_state_of_that_moment_is_written(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    model = a_model(1.0)
    checkpoints = Checkpoints(tmp_path, Runtime(), {"model": model})
    path = checkpoints.save(5)
    assert gate.reached.wait(DEADLINE)
    assert not path.exists()
    nn.init.constant_(model.weight, 2.0)
    gate.open()
    checkpoints.wait()
    assert restored_weight(tmp_path) == (5, 1.0)


@pytest.mark.parametrize("then", ["save", "wait"])
def test_the_error_of_a_write_is_raised_by_the_next_call(tmp_path, monkeypatch, then):
    gate = Gate(monkeypatch, OSError(28, "No space left on device"))
    gate.open()
    checkpoints = Checkpoints(tmp_path, Runtime(), {"model": a_model()})
    checkpoints.save(1)
    with pytest.raises(UserError, match=r"cannot write .*No space left on device"):
        checkpoints.save(2) if then == "save" else checkpoints.wait()
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_end_of_the_group_waits_for_the_last_checkpoint(tmp_path, monkeypatch, interrupted):
    gate = Gate(monkeypatch)

    def run():
        with process_group(device="cpu") as runtime:
            Checkpoints(tmp_path, runtime, {"model": a_model()}).save(3)
            assert gate.reached.wait(DEADLINE)
            threading.Timer(0.1, gate.open).start()
            if interrupted:
                raise Interrupted(signal.SIGTERM, True, 3)

    if interrupted:
        with pytest.raises(Interrupted):
            run()
    else:
        run()
    assert steps_in(tmp_path) == [3]


def test_the_end_of_the_group_raises_the_error_of_the_last_write(tmp_path, monkeypatch):
    gate = Gate(monkeypatch, OSError(28, "No space left on device"))
    gate.open()
    with (
        pytest.raises(UserError, match=r"cannot write .*No space left on device"),
        process_group(device="cpu") as runtime,
    ):
        Checkpoints(tmp_path, runtime, {"model": a_model()}).save(3)


def test_the_newest_the_best_and_every_fourth_are_kept_across_starts(tmp_path):
    def a_start():
        retention = Retention(newest=1, every=4)
        return Checkpoints(tmp_path, Runtime(), {"model": a_model()}, retention=retention)

    first = a_start()
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.1), (4, float("nan")), (5, 0.2)):
        first.save(step, score=score)
    first.wait()
    assert steps_in(tmp_path) == [2, 4, 5]

    second = a_start()
    assert second.restore() == 5
    second.save(6, score=0.8)
    second.wait()
    assert steps_in(tmp_path) == [2, 4, 6]
    assert (second.best.step, second.best.score) == (2, 0.9)
    second.save(7, score=0.95)
    second.wait()
    assert steps_in(tmp_path) == [4, 7]


@pytest.mark.parametrize("name", ["newest", "every"])
def test_a_retention_that_keeps_nothing_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name}: must be an integer >= 1, got 0"):
        Retention(**{name: 0})


def test_partial_files_of_other_processes_are_not_removed(tmp_path):
    partial = tmp_path / ".model.pt.other-host-7.partial"
    partial.write_bytes(b"half a file")
    checkpoints = Checkpoints(tmp_path, Runtime(), {"model": a_model()})
    checkpoints.restore()
    checkpoints.save(1)
    checkpoints.wait()
    assert partial.exists()


def test_weights_are_read_without_taking_the_folder_over(tmp_path):
    model = a_model(3.0)
    checkpoints = Checkpoints(tmp_path, Runtime(), {"model": model})
    path = checkpoints.save(1, score=0.5)
    checkpoints.wait()
    assert tmp_path / Best.read(tmp_path).file == path
    assert torch.equal(read_part(path)["weight"], model.weight)
    with pytest.raises(UserError, match="has no part ema; it has model"):
        read_part(path, "ema")
    with pytest.raises(UserError, match="file not found"):
        read_part(tmp_path / "step-g0001-0000000009.pt")
    checkpoints.save(2)
    checkpoints.wait()


# What can go wrong


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.ones(2).to_sparse(), "it has a Tensor with the layout torch.sparse_coo"),
        (Coordinates([1.0, 2.0]), "it has a Coordinates with the layout torch.strided"),
    ],
)
def test_a_tensor_of_another_kind_is_refused_at_the_save(tmp_path, tensor, said):
    checkpoints = Checkpoints(tmp_path, Runtime(), {"numbers": Numbers(tensor=tensor)})
    with pytest.raises(UserError, match=f"the state of numbers cannot be saved .{said}"):
        checkpoints.save(1)
    assert steps_in(tmp_path) == []


def test_a_state_that_becomes_unreadable_removes_no_readable_checkpoint(tmp_path):
    numbers = Numbers(best=-1.0)
    checkpoints = Checkpoints(tmp_path, Runtime(), {"numbers": numbers})
    checkpoints.save(1)
    numbers.state["best"] = np.float64(0.5)
    for step in (2, 3):
        checkpoints.save(step)
        with pytest.raises(UserError, match=r"the state of numbers can be written but not read"):
            checkpoints.wait()
    assert steps_in(tmp_path) == [1]


def test_an_error_of_the_callers_function_is_raised_as_a_user_error(tmp_path):
    def fail(step, path, seconds):
        raise KeyError("no such thing")

    checkpoints = Checkpoints(tmp_path, Runtime(), {"model": a_model()})
    checkpoints.save(1, on_written=fail)
    with pytest.raises(UserError, match=r"cannot write the checkpoint .*no such thing"):
        checkpoints.wait()


def test_a_file_is_not_set_aside_if_the_storage_fails(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, Runtime(), {"model": a_model()})
    for step in (1, 2):
        checkpoints.save(step)
    checkpoints.wait()
    find_fault = checkpoint_folder.find_fault
    failing = {2}

    def fail(path):
        if int(path.stem[-10:]) in failing:
            raise OSError(5, "Input/output error")
        return find_fault(path)

    monkeypatch.setattr(checkpoint_folder, "find_fault", fail)
    monkeypatch.setattr(checkpoint_folder, "RETRY_PAUSE", 0.01)
    assert restored_weight(tmp_path) == (1, 1.0)
    assert steps_in(tmp_path) == [1, 2]
    failing.add(1)
    with pytest.raises(UserError, match=r"can be read .*Input/output error") as caught:
        restored_weight(tmp_path)
    # Another attempt may succeed.
    assert caught.value.exit_code == 1


def test_another_jobs_folder_is_not_taken_over(tmp_path):
    healthy = Checkpoints(tmp_path, Runtime(), {"model": a_model()}, {"workload": "first"})
    healthy.save(1)
    healthy.wait()
    other = Checkpoints(tmp_path, Runtime(), {"model": a_model()}, {"workload": "second"})
    with pytest.raises(UserError, match="was made with workload 'first', but this run has 'second"):
        other.restore()
    healthy.save(2)
    healthy.wait()
    assert steps_in(tmp_path) == [1, 2]


def test_a_first_save_without_a_restore_does_not_take_a_folder_over(tmp_path):
    earlier = Checkpoints(tmp_path, Runtime(), {"model": a_model()})
    earlier.save(1)
    earlier.wait()
    with pytest.raises(UserError, match=r"call restore\(\) before the first save"):
        Checkpoints(tmp_path, Runtime(), {"model": a_model()}).save(1)
    earlier.save(2)
    earlier.wait()


def test_the_best_one_left_counts_if_the_best_is_gone(tmp_path):
    checkpoints = Checkpoints(tmp_path, Runtime(), {"model": a_model()})
    best = checkpoints.save(1, score=0.9)
    checkpoints.wait()
    best.unlink()
    checkpoints.save(2, score=0.8)
    checkpoints.wait()
    assert (Best.read(tmp_path).step, Best.read(tmp_path).score) == (2, 0.8)


def test_another_default_device_changes_nothing(tmp_path):
    model = a_model()
    torch.set_default_device("meta")
    try:
        checkpoints = Checkpoints(tmp_path, Runtime(), {"model": model})
        checkpoints.save(1)
        checkpoints.wait()
        assert checkpoints.restore() == 1
    finally:
        torch.set_default_device(None)
    assert model.weight.unique().item() == 1.0


def test_a_file_beside_the_checkpoints_is_protected_under_every_name_of_the_folder(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    older = Checkpoints("c", Runtime(), {"model": a_model()})
    older.restore()
    Checkpoints(tmp_path / "c", Runtime(), {"model": a_model()}).restore()
    with pytest.raises(TakenOver):
        older.write_beside(tmp_path / "c" / "model.pth", {"weight": torch.ones(1)})


def test_the_generators_of_python_and_numpy_are_saved_too(tmp_path):
    def draw():
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random(), random.gauss()

    random.gauss()
    checkpoints = Checkpoints(tmp_path, Runtime(), {"model": a_model()})
    checkpoints.save(1)
    checkpoints.wait()
    expected = draw()
    assert checkpoints.restore() == 1
    assert draw() == expected


# torchrun's own restarts

RESTARTED = """
import os, sys, torch
from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.ranks.group import process_group
from ddp_trainer.run.progress import Progress

with process_group(device="cpu") as runtime:
    model = torch.nn.Linear(1, 1)
    checkpoints = Checkpoints(sys.argv[1], runtime, {"model": model})
    step = checkpoints.restore()
    while step < 4:
        step += 1
        total = runtime.sum(torch.ones(1))
        checkpoints.save(step)
        checkpoints.wait()
        if step == 2 and runtime.rank == 1:
            os._exit(1)
    progress = Progress(runtime)
    count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    progress.end(step, {"total": total.item(), "restarts": count})
"""


def test_a_run_continues_after_torchruns_own_restart_on_one_node(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    run = torchrun("--max-restarts", 1, script, tmp_path / "checkpoints")
    assert run.finish() == 0, run.stderr
    (end,) = run.of("end")
    assert (end["step"], end["result"]) == (4, {"total": 2.0, "restarts": 1})
