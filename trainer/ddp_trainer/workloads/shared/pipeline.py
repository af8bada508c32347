"""A model in stages on several devices, and its batches in parts, overlapping in the stages."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary


class Devices(Protocol):
    """The devices of the stages, by number. Use several devices only inside `watched()`."""

    def put(self, module: nn.Module, index: int) -> nn.Module:
        """Move the parameters of `module` to device `index`, in place, and return the module."""

    def move(self, tensor: Tensor, index: int) -> Tensor:
        """Return `tensor` on device `index`. Gradients pass back through the move."""

    def watched(self) -> AbstractContextManager[object]:
        """Return a context in which an operation on tensors of two devices raises an error."""


class Accelerators:
    """Devices of one kind with consecutive numbers, beginning with `first`.

    `watched` does nothing, because PyTorch itself raises the error.
    """

    def __init__(self, first: torch.device) -> None:
        self._first = first

    def put(self, module: nn.Module, index: int) -> nn.Module:
        return module.to(self._device(index))

    def move(self, tensor: Tensor, index: int) -> Tensor:
        return tensor.to(self._device(index), non_blocking=True)

    def watched(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _device(self, index: int) -> torch.device:
        return torch.device(self._first.type, self._first.index + index)


class StandIns(TorchFunctionMode):
    """Simulated devices on a CPU, where `.to("cpu:1")` moves nothing and never fails.

    `put` and `move` give a tensor the number of its device, and results computed from it have it
    too. An operation on tensors of two devices, or of a device and the host, raises RuntimeError,
    as with GPUs. As with GPUs, tensors without dimensions go with any device.
    """

    def __init__(self) -> None:
        super().__init__()
        self._index = WeakTensorKeyDictionary()

    def put(self, module: nn.Module, index: int) -> nn.Module:
        for tensor in (*module.parameters(), *module.buffers()):
            self._index[tensor] = index
        return module

    def move(self, tensor: Tensor, index: int) -> Tensor:
        with torch._C.DisableTorchFunction():
            moved = tensor.clone()
        self._index[moved] = index
        return moved

    def watched(self) -> AbstractContextManager[object]:
        return self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Check the devices of the arguments, call `func`, and number its results.

        PyTorch calls this in place of each of its functions inside `watched()`.
        """
        settings = kwargs or {}
        found = self._devices_of(args, settings)
        if len(found) > 1:
            name = getattr(func, "__name__", func)
            places = " and ".join(sorted(_place(index) for index in found))
            raise RuntimeError(
                f"{name} was given tensors on {places}: move one of them to the other's device"
            )

        result = func(*args, **settings)

        # Results of tensors on the host, or of no tensor, stay on the host.
        index = found.pop() if found else None
        if index is not None:
            for tensor in _tensors([result]):
                self._index[tensor] = index
        return result

    def _devices_of(self, args: Sequence[Any], settings: Mapping[str, Any]) -> set[int | None]:
        """Return the device numbers of all tensors with dimensions, None for the host."""
        return {
            self._index.get(tensor)  # type: ignore[no-untyped-call]
            for tensor in _tensors((args, *settings.values()))
            if tensor.dim() > 0
        }


def _place(index: int | None) -> str:
    return "the host" if index is None else f"stand-in {index}"


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among `values`, also those inside lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


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
