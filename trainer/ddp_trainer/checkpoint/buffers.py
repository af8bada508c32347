"""Copies of tensors. The next checkpoint uses their memory again.

New memory costs more than the copy. The operating system clears it, and for a GPU the driver locks
it, so the device can copy into it. And freed memory is not always free at once: torch.save leaves
reference cycles with the tensors, and these last until Python collects garbage. The memory of two
checkpoints would then be needed.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

# The shape and the type of a buffer, and whether its memory is locked ("pinned").
Kind = tuple[torch.Size, torch.dtype, bool]


class Buffers:
    """The memory of one checkpoint at a time.

    - `copied` returns a copy of a tensor, and `finish` waits until all copies are complete.
    - `reuse` gives the memory to the next checkpoint. The last one must be written.
    """

    def __init__(self) -> None:
        self._free: dict[Kind, list[Tensor]] = defaultdict(list)
        self._used: list[tuple[Kind, Tensor]] = []
        self._devices: set[torch.device] = set()

    def reuse(self) -> None:
        """Let the next checkpoint use the memory of the last one.

        Buffers that the last one did not use are freed: the state has other tensors now.
        """
        self._free.clear()
        for kind, buffer in self._used:
            self._free[kind].append(buffer)
        self._used.clear()

    def copied(self, leaf: Any) -> Any:
        """Return a copy of a tensor on the CPU, in row-major order, and other leaves unchanged.

        On CUDA it returns before the copy is complete. Raises ValueError for tensors of other
        kinds, such as DTensors: they cannot be read again.
        """
        if not isinstance(leaf, Tensor):
            return leaf
        is_plain = type(leaf) in (Tensor, nn.Parameter) and leaf.layout == torch.strided
        if not is_plain or leaf.is_quantized:
            raise ValueError(f"it has a {type(leaf).__name__} with the layout {leaf.layout}")
        is_pinned = leaf.device.type == "cuda"
        kind = leaf.shape, leaf.dtype, is_pinned
        free = self._free[kind]
        buffer = free.pop() if free else _new_buffer(kind)
        self._used.append((kind, buffer))
        if is_pinned:
            self._devices.add(leaf.device)
        return buffer.copy_(leaf.detach(), non_blocking=is_pinned)

    def finish(self) -> None:
        """Wait until the copies are complete. Training may then change the tensors."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._devices.clear()


def _new_buffer(kind: Kind) -> Tensor:
    shape, dtype, is_pinned = kind
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=is_pinned)
