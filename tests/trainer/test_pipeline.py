"""A model over two devices: its schedule, its gradients, and the stand-ins for devices."""

import itertools
import types

import pytest
import torch
from torch import nn

from ddp_trainer.workloads.shared.pipeline import (
    Accelerators,
    Pipeline,
    StandIns,
    drawing,
    schedule,
)


@pytest.mark.parametrize(("micro_batches", "stages"), [(1, 1), (1, 2), (4, 2), (3, 5)])
def test_every_micro_batch_passes_every_stage_once_and_in_order(micro_batches, stages):
    ticks = schedule(micro_batches, stages)
    assert len(ticks) == micro_batches + stages - 1
    tick_of = {}
    for tick, running in enumerate(ticks):
        # A device has one micro-batch at a time.
        assert len({stage for stage, _ in running}) == len(running)
        for pair in running:
            tick_of[pair] = tick
    assert set(tick_of) == set(itertools.product(range(stages), range(micro_batches)))
    for stage, part in tick_of:
        if stage > 0:
            assert tick_of[stage, part] == tick_of[stage - 1, part] + 1


def test_the_schedule_is_drawn_with_one_line_per_device():
    assert drawing(3, 2) == ["device 0:  0  1  2  .", "device 1:  .  0  1  2"]


@pytest.mark.parametrize("rows", [8, 7, 1])
def test_gradients_do_not_depend_on_the_number_of_micro_batches(rows):
    inputs = torch.randn(rows, 6)
    gradients = []
    for micro_batches in (1, 3):
        torch.manual_seed(3)
        devices = StandIns()
        model = Pipeline(
            [nn.Linear(6, 40), nn.Sequential(nn.ReLU(), nn.Linear(40, 3))], devices, micro_batches
        )
        with devices.watched():
            model(inputs).square().mean().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert (gradients[1] - gradients[0]).norm() / gradients[0].norm() <= 1e-5


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_accelerators_put_the_stages_on_consecutive_devices(kind):
    # There is no such device here, so the stand-in for a tensor returns its destination.
    sent = types.SimpleNamespace(to=lambda device, **_: device)
    devices = Accelerators(torch.device(kind, 2))
    assert [devices.put(sent, 0), devices.put(sent, 1)] == [
        torch.device(kind, 2),
        torch.device(kind, 3),
    ]
    assert devices.move(sent, 1) == torch.device(kind, 3)


@pytest.fixture
def devices():
    return StandIns()


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (
            lambda model, devices, x: model[1](model[0](devices.move(x, 0))),
            "linear was given tensors on stand-in 0 and",
        ),
        (lambda model, devices, x: model[0](x), "on stand-in 0 and the host"),
        (
            lambda model, devices, x: devices.move(x, 0) + devices.move(x, 1),
            "on stand-in 0 and stand-in 1",
        ),
        (lambda model, devices, x: torch.cat([x, model[0](devices.move(x, 0))]), "cat was given"),
        (
            lambda model, devices, x: nn.functional.mse_loss(
                model[0](devices.move(x, 0)), target=x
            ),
            "on stand-in 0 and the",
        ),
    ],
    ids=["between the stages", "inputs", "two devices", "in a list", "by keyword"],
)
def test_stand_ins_reject_tensors_of_different_devices(devices, operation, message):
    model = [devices.put(nn.Linear(4, 4), 0), devices.put(nn.Linear(4, 4), 1)]
    with devices.watched(), pytest.raises(RuntimeError, match=message):
        operation(model, devices, torch.ones(2, 4))


def test_stand_ins_accept_moved_tensors_and_tensors_without_dimensions(devices):
    first, second = devices.put(nn.Linear(4, 4), 0), devices.put(nn.Linear(4, 4), 1)
    with devices.watched():
        hidden = first(devices.move(torch.ones(2, 4), 0))
        out = second(devices.move(hidden, 1)) * torch.tensor(2.0) + 1
        out.sum().backward()
    # Gradients pass back through the moves.
    assert first.weight.grad is not None
