"""A model cut into stages on several devices, and its batches into parts that pass through the stages one behind another."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary


class Devices(Protocol):
    """Where the stages are. Code that mixes them runs inside `watched()`."""

    def put(self, module: nn.Module, index: int) -> nn.Module:
        """Move a module's parameters to the device of that number, in place."""

    def move(self, tensor: Tensor, index: int) -> Tensor:
        """The tensor on the device of that number; gradients find their way back."""

    def watched(self) -> AbstractContextManager[object]:
        """While this is entered, tensors of different devices do not mix."""


class Accelerators:
    """Devices with consecutive numbers, from `first` on. PyTorch itself watches over them."""

    def __init__(self, first: torch.device) -> None:
        self._first = first

    def put(self, module: nn.Module, index: int) -> nn.Module:
        """See Devices."""
        return module.to(self._device(index))

    def move(self, tensor: Tensor, index: int) -> Tensor:
        """See Devices."""
        return tensor.to(self._device(index), non_blocking=True)

    def watched(self) -> AbstractContextManager[object]:
        """See Devices."""
        return nullcontext()

    def _device(self, index: int) -> torch.device:
        return torch.device(self._first.type, self._first.index + index)


class StandIns(TorchFunctionMode):
    """Pretended devices on a CPU, where `.to("cpu:1")` would move nothing and forgive everything.

    Every tensor that was put or moved carries the number of its device, and so does what is calculated from it. A
    calculation with tensors of two devices, or of a device and none, fails as it would with GPUs. (As with GPUs, a
    tensor without dimensions goes with all.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._index = WeakTensorKeyDictionary()

    def put(self, module: nn.Module, index: int) -> nn.Module:
        """See Devices."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._index[tensor] = index
        return module

    def move(self, tensor: Tensor, index: int) -> Tensor:
        """See Devices."""
        with torch._C.DisableTorchFunction():
            moved = tensor.clone()
        self._index[moved] = index
        return moved

    def watched(self) -> AbstractContextManager[object]:
        """See Devices."""
        return self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called in place of every function of torch that is given a tensor."""
        found = {
            self._index.get(tensor)  # type: ignore[no-untyped-call]
            for tensor in _tensors((args, *(kwargs or {}).values()))
            if tensor.dim()
        }
        if len(found) > 1:
            names = " and ".join(
                sorted("the host" if index is None else f"stand-in {index}" for index in found)
            )
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} was given tensors on {names}: move one of them to the other's device"
            )
        result = func(*args, **(kwargs or {}))
        if found and (index := found.pop()) is not None:
            for tensor in _tensors([result]):
                self._index[tensor] = index
        return result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def schedule(micro_batches: int, stages: int) -> list[list[tuple[int, int]]]:
    """What runs side by side: for each tick the (stage, micro-batch) pairs, both counted from 0.

    Micro-batch m is in stage s at tick m + s, so n parts need n + stages - 1 ticks (GPipe, Huang et al. 2019).
    """
    return [
        [(stage, tick - stage) for stage in range(stages) if 0 <= tick - stage < micro_batches]
        for tick in range(micro_batches + stages - 1)
    ]


def drawing(micro_batches: int, stages: int) -> list[str]:
    """The schedule as lines of text: one a stage, one column a tick."""
    rows = [["."] * (micro_batches + stages - 1) for _ in range(stages)]
    for tick, running in enumerate(schedule(micro_batches, stages)):
        for stage, micro_batch in running:
            rows[stage][tick] = str(micro_batch)
    return [
        f"device {stage}: {' '.join(f'{cell:>2}' for cell in row)}"
        for stage, row in enumerate(rows)
    ]


class Pipeline(nn.Module):
    """`stages` on devices 0, 1, …; a batch passes through them in `micro_batches` parts of about equal size.

    The devices work at the same time because what is queued on one does not wait for another: at each tick every
    stage is given its part, and only then the next tick begins. Gradients are those of the unpipelined model.
    """

    def __init__(self, stages: Sequence[nn.Module], devices: Devices, micro_batches: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(devices.put(stage, index) for index, stage in enumerate(stages))
        self.devices, self.micro_batches = devices, micro_batches

    def forward(self, inputs: Tensor) -> Tensor:
        """(N, …) on any device → (N, …) on the last one."""
        parts = list(torch.tensor_split(inputs, self.micro_batches))
        for running in schedule(len(parts), len(self.stages)):
            for stage, part in running:
                parts[part] = self.stages[stage](self.devices.move(parts[part], stage))
        return torch.cat(parts)
