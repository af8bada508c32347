"""A checkpoint is written by a thread while the training goes on, and nothing of it is lost."""

import signal
import threading

import pytest
import torch
from torch import nn

from ddp_trainer import checkpoint_file
from ddp_trainer.checkpoint import Checkpoints
from ddp_trainer.checkpoint_folder import Retention
from ddp_trainer.errors import Interrupted, UserError
from ddp_trainer.process_group import process_group
from ddp_trainer.runtime import Runtime

from .launch import torchrun

DEADLINE = 30.0  # seconds; reached only if a thread hangs


class Gate:
    """Stops torch.save until it is opened. With `error`, it then raises that."""

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


def test_a_second_save_at_a_step_writes_what_has_changed_since(tmp_path):
    model = a_model(1.0)
    checkpoints = Checkpoints(tmp_path, Runtime(), {"model": model})
    checkpoints.save(4)
    nn.init.constant_(model.weight, 3.0)
    checkpoints.save(4)
    checkpoints.wait()
    assert steps_in(tmp_path) == [4]
    assert restored_weight(tmp_path) == (4, 3.0)


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


# torchrun's own restarts

RESTARTED = """
import os, sys, torch
from ddp_trainer.checkpoint import Checkpoints
from ddp_trainer.process_group import process_group
from ddp_trainer.progress import Progress

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
