"""A model in stages on several devices, and its batches in parts, overlapping in the stages."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Devices:
    """The devices of the stages: of one kind, with consecutive numbers from `first` on.

    A CPU has one device, so all stages share it. PyTorch raises no error there for a tensor on the
    wrong device.
    """

    def __init__(self, first: torch.device) -> None:
        self._first = first

    def put(self, module: nn.Module, index: int) -> nn.Module:
        """Move the parameters of `module` to device `index`, in place, and return the module."""
        return module.to(self._device(index))

    def move(self, tensor: Tensor, index: int) -> Tensor:
        """Return `tensor` on device `index`. Gradients pass back through the move."""
        return tensor.to(self._device(index), non_blocking=True)

    def _device(self, index: int) -> torch.device:
        if self._first.type == "cpu":
            return self._first
        return torch.device(self._first.type, self._first.index + index)


def schedule(micro_batches: int, stages: int) -> list[list[tuple[int, int]]]:
    """Return the (stage, micro-batch) pairs of each tick, both counted from 0.

    Micro-batch m is in stage s at tick m + s, so n micro-batches need n + stages - 1 ticks (GPipe,
    Huang et al. 2019).
    """
    ticks = []
    for tick in range(micro_batches + stages - 1):
        pairs = [(stage, tick - stage) for stage in range(stages)]
        ticks.append([pair for pair in pairs if 0 <= pair[1] < micro_batches])
    return ticks


def drawing(micro_batches: int, stages: int) -> list[str]:
    """Return the schedule as lines of text: one line per stage, one column per tick."""
    rows = [["."] * (micro_batches + stages - 1) for _ in range(stages)]
    for tick, running in enumerate(schedule(micro_batches, stages)):
        for stage, micro_batch in running:
            rows[stage][tick] = str(micro_batch)

    lines = []
    for stage, row in enumerate(rows):
        cells = " ".join(f"{cell:>2}" for cell in row)
        lines.append(f"device {stage}: {cells}")
    return lines


class Pipeline(nn.Module):
    """A model with its `stages` on devices 0, 1, … and its batches in parts.

    A batch is split into `micro_batches` parts of about equal size. In each tick, every stage gets
    its part before the next tick begins. Devices work at the same time, because operations queued
    on one device do not wait for another. The gradients are those of the unpipelined model.
    """

    def __init__(self, stages: Sequence[nn.Module], devices: Devices, micro_batches: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(devices.put(stage, index) for index, stage in enumerate(stages))
        self.devices = devices
        self.micro_batches = micro_batches

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, …) on any device to outputs (N, …) on the last one."""
        parts = list(torch.tensor_split(inputs, self.micro_batches))
        for running in schedule(len(parts), len(self.stages)):
            for stage, part in running:
                parts[part] = self.stages[stage](self.devices.move(parts[part], stage))
        return torch.cat(parts)
