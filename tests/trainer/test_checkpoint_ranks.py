"""Checkpoints of several ranks: what differs between them is found, and all raise an error."""

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.checkpoint import checkpoints as checkpoint
from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.checkpoint.file import StoredTensor
from ddp_trainer.checkpoint.parts import PerRank
from ddp_trainer.checkpoint.staging import Meeting
from ddp_trainer.checkpoint.weights import read_part
from ddp_trainer.errors import RetryableError, UserError
from ddp_trainer.ranks.runtime import Runtime

from . import launch
from .every_rank import Outcomes, on_every_rank


@pytest.fixture(scope="module")
def pair(launched) -> Outcomes:
    """Return what the marked functions returned on each of two ranks."""
    return launched(2)


def a_model(fill=1.0, width=2):
    model = nn.Sequential(nn.Linear(width, 2), nn.BatchNorm1d(2))
    nn.init.constant_(model[0].weight, fill)
    nn.init.constant_(model[0].bias, fill)
    return model


def stepped(gradient):
    """Return an optimizer after a step with this gradient."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.full((2,), gradient)
    optimizer.step()
    return optimizer


def error_of_a_save(folder, runtime, parts, **options):
    checkpoints = Checkpoints(folder, runtime, parts, **options)
    try:
        checkpoints.save(1)
        checkpoints.wait()
    except UserError as error:
        return str(error)
    return ""


@on_every_rank
def errors_of_parts_that_differ(runtime):
    rank = runtime.rank
    equal = a_model()
    equal[1].running_mean.fill_(rank)
    torch.manual_seed(1)
    cases = {
        "strided": nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last),
        "stage": a_model(float(rank)),
        "other_stage": a_model(width=2 + rank),
        "momenta": stepped(float(rank)),
        "sometimes_stepped": stepped(1.0) if rank else torch.optim.SGD(equal.parameters()),
        "equal": equal,
        "half": a_model().to(torch.bfloat16),
        "complex": nn.ParameterList([torch.full((2,), 1j)]),
    }
    found = {}
    for name, part in cases.items():
        found[name] = error_of_a_save(f"differ-{name}", runtime, {"first": a_model(), name: part})
    stage = cases["stage"]
    found["own"] = error_of_a_save("own", runtime, {"stage": PerRank(stage)})
    found["off"] = error_of_a_save("off", runtime, {"stage": stage}, compare_ranks=False)
    return found


def test_state_that_differs_between_ranks_is_found_at_the_first_save(pair):
    for found in pair.values(errors_of_parts_that_differ):
        for name in ("stage", "other_stage", "momenta", "sometimes_stepped"):
            expected = f"the state of {name} on rank 1 differs from that on rank 0"
            assert found.pop(name).startswith(expected)
        assert set(found.values()) == {""}, found


@on_every_rank
def steps_that_are_compared(runtime):
    """Return the steps at which a save finds a difference between the ranks."""
    every, checkpoint.COMPARE_EVERY = checkpoint.COMPARE_EVERY, 3
    model = a_model()
    checkpoints = Checkpoints("diverging", runtime, {"model": model})
    errors = []
    try:
        for step in range(1, 5):
            try:
                checkpoints.save(step)
            except UserError as error:
                errors.append((step, error.is_common))
            nn.init.constant_(model[0].weight, step + runtime.rank)
        checkpoints.wait()
    finally:
        checkpoint.COMPARE_EVERY = every
    return errors


def test_state_that_begins_to_differ_is_found_later(pair):
    assert pair.values(steps_that_are_compared) == [[(4, True)]] * 2


@on_every_rank
def sharded_in_other_ways(runtime):
    """Return the error of FSDP1, and whether a sharded optimizer resumes."""
    # The imports take a while, and only the ranks need them.
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import ZeroRedundancyOptimizer

    try:
        model = FullyShardedDataParallel(a_model(), device_id=torch.device("cpu"))
        Checkpoints("fsdp1", runtime, {"model": model})
        error = ""
    except UserError as refused:
        error = str(refused)

    def a_job():
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        parts = {"model": model, "optimizer": optimizer}
        checkpoints = Checkpoints("zero", runtime, parts)
        return model, optimizer, checkpoints, checkpoints.restore()

    def train(model, optimizer):
        model(torch.arange(3.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    model, optimizer, checkpoints, _ = a_job()
    train(model, optimizer)
    path = checkpoints.save(1)
    checkpoints.wait()
    keys = list(read_part(path)) if path else []
    expected = train(model, optimizer)
    model, optimizer, _, step = a_job()
    return error, step, torch.equal(train(model, optimizer), expected), keys


def test_fsdp1_is_refused_by_name_and_an_optimizer_that_is_sharded_resumes(pair):
    found = pair.values(sharded_in_other_ways)
    for error, step, is_equal, _ in found:
        assert error.startswith("model is sharded by FullyShardedDataParallel (FSDP1)")
        assert (step, is_equal) == (1, True)
    # The names are those of the bare model, also in torch's own wrapper.
    assert found[0][3] == ["0.weight", "0.bias", "1.weight", "1.bias"]


class Fails:
    """A part with methods that fail on one rank."""

    def __init__(self, runtime, saves=(), loads=()):
        self._rank = runtime.rank
        self._saves = saves
        self._loads = loads

    def state_dict(self):
        if self._rank in self._saves:
            raise KeyError("position")
        return {"position": torch.ones(1)}

    def load_state_dict(self, state):
        if self._rank in self._loads:
            raise TypeError("expected a list")


@on_every_rank
def errors_of_one_rank(runtime):
    """Return the messages of each rank if one rank fails. The group works on afterwards."""
    found = []

    def note(call):
        try:
            call()
            found.append("")
        except UserError as error:
            found.append((type(error).__name__, str(error)))

    def a_start(**fails):
        return Checkpoints("fails", runtime, {"part": Fails(runtime, **fails)})

    note(lambda: a_start(saves=[0]).save(1))
    saved = a_start()
    saved.save(1)
    saved.wait()
    note(a_start(loads=[1]).restore)
    read = StoredTensor.read

    def fail(tensor, file):
        raise OSError(5, "Input/output error")

    StoredTensor.read = fail
    try:
        note(a_start().restore)
    finally:
        StoredTensor.read = read
    note(a_start().restore)
    return found


def test_all_ranks_get_the_error_of_one(pair):
    for on_save, on_load, on_read, last in pair.values(errors_of_one_rank):
        assert on_save[1].startswith("the state of part cannot be saved (KeyError: 'position')")
        assert "does not fit this part (TypeError: expected a list)" in on_load[1]
        assert on_load[1].startswith("rank 1: ")
        assert on_read == ("RetryableError", "cannot read the checkpoint: Input/output error")
        assert last == ""


@on_every_rank
def after_a_roll_back(runtime):
    model = a_model()
    checkpoints = Checkpoints("rolled-back", runtime, {"model": model})
    for step in (1, 2):
        nn.init.constant_(model[0].weight, step)
        checkpoints.save(step)
    nn.init.constant_(model[0].weight, 77)
    found = [checkpoints.restore(1), model[0].weight.unique().item(), checkpoints.newest.name]
    checkpoints.save(2)
    checkpoints.wait()
    try:
        checkpoints.save(1)
    except UserError as error:
        found.append(str(error)[:31])
    return [*found, checkpoints.newest.name]


def test_all_ranks_go_back_to_an_earlier_step(pair):
    names = [
        "step-g0001-0000000001.pt",
        "save: step 1 is not above 2, th",
        "step-g0002-0000000002.pt",
    ]
    assert pair.values(after_a_roll_back) == [[1, 1.0, *names]] * 2


# The timeout of the group


def test_a_rank_that_died_during_a_sharded_write_is_noticed_within_the_timeout_of_the_group():
    runtime = Runtime(world_size=2, store=HashStore(), timeout=0.1)
    with pytest.raises(RetryableError, match="rank 1 has not written its part"):
        Meeting(runtime, "key", checkpoint.threading.Event()).collect()


TIMEOUTS = """
import json
from ddp_trainer.ranks.group import process_group
for timeout in (None, 7.0):
    with process_group(device="cpu", timeout=timeout) as runtime:
        print(json.dumps({"event": "timeout", "seconds": runtime.timeout}))
"""


def test_the_timeout_of_the_group_is_that_of_the_runtime():
    runs = launch.ranks("-c", TIMEOUTS, processes=1)
    assert launch.finish(runs) == [0], runs[0].stderr
    assert [event["seconds"] for event in runs[0].of("timeout")] == [1800.0, 7.0]
