"""A model over two devices: its schedule, its gradients and its devices."""

import itertools
import types

import pytest
import torch
from torch import nn

from ddp_trainer.workloads.shared.pipeline import Devices, Pipeline, drawing, schedule


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
        devices = Devices(torch.device("cpu"))
        model = Pipeline(
            [nn.Linear(6, 40), nn.Sequential(nn.ReLU(), nn.Linear(40, 3))], devices, micro_batches
        )
        model(inputs).square().mean().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert (gradients[1] - gradients[0]).norm() / gradients[0].norm() <= 1e-5


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_accelerators_put_the_stages_on_consecutive_devices(kind):
    # There is no such device here, so what is moved returns its destination.
    sent = types.SimpleNamespace(to=lambda device, **_: device)
    devices = Devices(torch.device(kind, 2))
    assert [devices.put(sent, 0), devices.put(sent, 1)] == [
        torch.device(kind, 2),
        torch.device(kind, 3),
    ]
    assert devices.move(sent, 1) == torch.device(kind, 3)
