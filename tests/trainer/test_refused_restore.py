"""A refused restore changes no model, no optimizer and no sampler."""

import copy

import pytest
import torch
from torch import nn

from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.checkpoint.parts import PerRank
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.errors import UserError
from ddp_trainer.ranks.hardware import Hardware
from ddp_trainer.ranks.runtime import Runtime

SHAPES = ((2, 3), (4,))


def some_parameters(fill, shapes=SHAPES):
    return [nn.Parameter(torch.full(shape, fill)) for shape in shapes]


def trained(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return optimizer


def adam(parameters, kind=torch.optim.Adam, **settings):
    return trained(kind(parameters, lr=0.1, **settings))


def norm(fill, **attributes):
    module = nn.BatchNorm1d(2)
    nn.init.constant_(module.weight, fill)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def job(fill):
    """Return the parts of a job. Their state depends on `fill`."""
    sampler = GlobalBatchSampler(8, 2)
    if fill > 1:
        next(iter(sampler))
    return {
        "model": norm(fill),
        "optimizer": adam(some_parameters(fill)),
        "sampler": sampler,
    }


class Picky:
    """A part that refuses a saved state only when it gets it."""

    def __init__(self, size):
        self.size = size

    def state_dict(self):
        return {"size": self.size}

    def load_state_dict(self, state):
        if state["size"] != self.size:
            raise ValueError(f"expected the size {self.size}, got {state['size']}")


class OddModule(nn.Module):
    """A module with its own way to load its state. The load fails."""

    def __init__(self, size):
        super().__init__()
        self.picky = Picky(size)

    def get_extra_state(self):
        return self.picky.state_dict()

    def set_extra_state(self, state):
        self.picky.load_state_dict(state)


class OddAdam(torch.optim.Adam):
    """An optimizer with its own way to load its state. The load fails."""

    def load_state_dict(self, state_dict):
        if len(state_dict["state"]) != len(SHAPES):
            raise ValueError("the state has parameters of another number")
        super().load_state_dict(state_dict)


# What is saved, what the run has instead, and the reason.
MISFITS = {
    "the sampler has other samples": (
        lambda: {"sampler": GlobalBatchSampler(9, 2)},
        "samples 9, but this run has 8",
    ),
    "the sampler has another batch": (
        lambda: {"sampler": GlobalBatchSampler(8, 4)},
        "4 samples per step over all ranks, but this run has 2",
    ),
    "a buffer is missing": (
        lambda: {"model": norm(5.0, running_mean=None, running_var=None)},
        'Missing key(s) in state_dict: "running_mean", "running_var"',
    ),
    "there is a key more": (
        lambda: {"model": norm(5.0, more=nn.Linear(1, 1))},
        'Unexpected key(s) in state_dict: "more.weight", "more.bias"',
    ),
    "a buffer has another shape": (
        lambda: {"model": norm(5.0, running_mean=torch.zeros(7))},
        "size mismatch for running_mean: the checkpoint has the shape [7], this run [2]",
    ),
    "the optimizer has another number of groups": (
        lambda: {
            "optimizer": adam([{"params": [each]} for each in some_parameters(5.0)]),
        },
        "different number of parameter groups",
    ),
    "a group has another size": (
        lambda: {"optimizer": adam(some_parameters(5.0, [*SHAPES, (1,)]))},
        "doesn't match the size of optimizer's group",
    ),
    "the optimizer has its parameters in another order": (
        lambda: {"optimizer": adam(some_parameters(5.0, SHAPES[::-1]))},
        "size mismatch for exp_avg of parameter 0: the checkpoint has the shape [4], this run "
        "[2, 3]",
    ),
    "the optimizer is another one": (
        lambda: {"optimizer": adam(some_parameters(5.0), torch.optim.SGD, momentum=0.9)},
        "the state of another optimizer than Adam",
    ),
    "a part of its own refuses": (
        lambda: {"own": Picky(5)},
        "expected the size 3, got 5",
    ),
    "a module of its own refuses": (
        lambda: {"own": OddModule(5)},
        "expected the size 3, got 5",
    ),
    "an optimizer of its own refuses": (
        lambda: {"own": OddAdam(some_parameters(5.0))},
        "parameters of another number",
    ),
    "a part of each rank refuses": (
        lambda: {"own": PerRank(Picky(5))},
        "expected the size 3, got 5",
    ),
    "an optimizer of each rank does not fit": (
        lambda: {"own": PerRank(adam(some_parameters(5.0, [*SHAPES, (1,)])))},
        "doesn't match the size of optimizer's group",
    ),
}

# What a run has beside the parts of `job`, by the misfit.
OWN = {
    "a part of its own refuses": lambda: Picky(3),
    "a module of its own refuses": lambda: OddModule(3),
    "an optimizer of its own refuses": lambda: OddAdam(some_parameters(1.0)),
    "a part of each rank refuses": lambda: PerRank(Picky(3)),
    "an optimizer of each rank does not fit": lambda: PerRank(adam(some_parameters(1.0))),
}


def states_of(parts):
    bare = {name: getattr(part, "part", part) for name, part in parts.items()}
    return copy.deepcopy({name: part.state_dict() for name, part in bare.items()})


def is_equal(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(is_equal(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(is_equal, first, second))
    return first == second


@pytest.mark.parametrize("name", MISFITS)
def test_a_refused_restore_changes_nothing(tmp_path, name):
    misfit, reason = MISFITS[name]
    saved = Checkpoints(tmp_path, Runtime(), job(5.0) | misfit())
    saved.save(3)
    saved.wait()

    parts = job(1.0)
    if name in OWN:
        parts["own"] = OWN[name]()
    before = states_of(parts)
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    with pytest.raises(UserError) as caught:
        Checkpoints(tmp_path, Runtime(), parts).restore()
    assert reason in str(caught.value)
    assert is_equal(states_of(parts), before)
    assert torch.equal(torch.rand(2), expected)


def test_a_state_that_fits_is_loaded_in_any_order_of_the_parts(tmp_path):
    def parts(fill, picky):
        return job(fill) | {"own": picky, "each": PerRank(adam(some_parameters(fill)))}

    saved = parts(5.0, Picky(3))
    checkpoints = Checkpoints(tmp_path, Runtime(), saved)
    checkpoints.save(3)
    checkpoints.wait()
    restored = parts(1.0, Picky(3))
    assert Checkpoints(tmp_path, Runtime(), restored).restore() == 3
    assert is_equal(states_of(restored), states_of(saved))


def test_generators_of_another_kind_change_nothing(tmp_path, monkeypatch):
    saved = Checkpoints(tmp_path, Runtime(), job(5.0))
    saved.save(3)
    saved.wait()
    parts = job(1.0)
    before = states_of(parts)
    set_state = Hardware.set_random_state

    def refuse(hardware, state):
        if not torch.equal(state["cpu"], current):
            raise RuntimeError("RNG state is wrong size")
        set_state(hardware, state)

    torch.manual_seed(7)
    current = torch.get_rng_state()
    monkeypatch.setattr(Hardware, "set_random_state", refuse)
    with pytest.raises(UserError, match=r"random number generator .RNG state is wrong size"):
        Checkpoints(tmp_path, Runtime(), parts).restore()
    assert is_equal(states_of(parts), before)


def test_a_misfit_of_the_sampler_does_not_stop_the_running_job(tmp_path):
    running = Checkpoints(tmp_path, Runtime(), job(5.0))
    running.save(3)
    running.wait()
    other = job(1.0) | {"sampler": GlobalBatchSampler(9, 2)}
    with pytest.raises(UserError, match="samples 8, but this run has 9"):
        Checkpoints(tmp_path, Runtime(), other).restore()
    running.save(4)


def test_a_module_with_extra_state_is_checked_before_the_folder_is_taken_over(tmp_path):
    def a_start(width):
        model = nn.Sequential(OddModule(3), nn.Linear(width, 1))
        return Checkpoints(tmp_path, Runtime(), {"model": model})

    running = a_start(2)
    running.save(3)
    running.wait()
    with pytest.raises(UserError, match=r"size mismatch for 1.weight"):
        a_start(5).restore()
    running.save(4)


def test_the_order_of_an_epoch_is_checked_without_a_move():
    def sampler(order):
        return GlobalBatchSampler(8, 2, order=order)

    saved = sampler(lambda epoch, rng: rng.permutation(8))
    next(iter(saved))
    other = sampler(lambda epoch, rng: range(8))
    with pytest.raises(UserError, match="made inside epoch 0, whose order was another one"):
        other.load_state_dict(saved.state_dict())
    assert (other.epoch, other.offset) == (0, 0)


def test_a_batch_norm_of_an_old_release_has_no_count(tmp_path):
    saved = Checkpoints(tmp_path, Runtime(), {"model": norm(5.0)})
    path = saved.save(3)
    saved.wait()
    state = torch.load(path)
    model = state["parts"]["model"]
    del model["num_batches_tracked"]
    model._metadata[""]["version"] = 1
    torch.save(state, path)
    restored = norm(1.0)
    assert Checkpoints(tmp_path, Runtime(), {"model": restored}).restore() == 3
    assert restored.weight.unique().item() == 5.0
