"""The parts of a checkpoint: their methods, and how they are copied and loaded.

`folder` is the folder of the checkpoints, for the messages. fitting.py has the checks before a
load.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_trainer.checkpoint.buffers import Buffers
from ddp_trainer.checkpoint.file import map_leaves
from ddp_trainer.errors import RetryableError, UserError
from ddp_trainer.ranks.module_names import bare, bare_names, compiled_names

# Most lines and characters of torch's error in a message.
REASON_LINES = 3
REASON_LENGTH = 400

# Errors of a device. Another attempt may not have them. torch 2.8 has the second.
DEVICE_ERRORS = tuple(
    getattr(torch, name)
    for name in ("OutOfMemoryError", "AcceleratorError")
    if hasattr(torch, name)
)

# Settings that say how an optimizer computes. They depend on the hardware.
COMPUTATION = ("fused", "foreach")


class Stateful(Protocol):
    """A part to save: a module, an optimizer, a scheduler, a sampler, a scaler, or the like.

    With a method `check_state_dict(state)`, it can refuse a state before any part is changed.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, Python's numbers and strings, and lists and dicts of them.

        Numbers of numpy cannot be read again.
        """

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over a saved state."""


@dataclass(frozen=True)
class PerRank:
    """A part with its own state on each rank, such as a loader with its own position.

    A run with another number of ranks refuses a checkpoint with such a part.
    """

    part: Stateful


def split_parts(
    parts: Mapping[str, Stateful | PerRank],
) -> tuple[dict[str, Stateful], dict[str, Stateful]]:
    """Return (the common parts of all ranks, the parts in `PerRank`).

    Models are taken out of their wrappers. Raises UserError for an unusable name.
    """
    common: dict[str, Stateful] = {}
    own: dict[str, Stateful] = {}
    for name, part in parts.items():
        # In a sharded checkpoint, the name of a part and a dot precede the name of a tensor.
        if not isinstance(name, str) or not name or "." in name:
            raise UserError(
                f"{name!r}: the name of a part must be a string without a dot", is_common=True
            )
        if isinstance(part, PerRank):
            own[name] = bare(part.part)
        else:
            common[name] = bare(part)
    return common, own


def copied_state(name: str, part: Stateful, buffers: Buffers) -> Any:
    """Return a copy of a part's state. Training does not change the copy.

    Raises UserError for every error, so the ranks can exchange it.
    """
    try:
        return map_leaves(buffers.copied, bare_names(part.state_dict()))
    except DEVICE_ERRORS as error:
        raise RetryableError(f"the state of {name} cannot be read: {reason_of(error)}") from error
    except Exception as error:
        raise UserError(
            f"the state of {name} cannot be saved ({reason_of(error)}); return only plain tensors, "
            "Python's own numbers and strings, and lists and dicts of them from state_dict()"
        ) from error


def load_part(part: Stateful, state: Any, *, name: str, folder: Path) -> None:
    """Load a saved state. Raises UserError if it does not fit."""
    with explained_misfit(name, folder):
        if isinstance(part, Optimizer):
            _load_optimizer(part, state)
        elif isinstance(part, nn.Module):
            part.load_state_dict(compiled_names(state, part))
        else:
            part.load_state_dict(state)


def _load_optimizer(optimizer: Optimizer, state: Any) -> None:
    """Load an optimizer's state, but keep how it computes.

    The hardware decides whether it is fused, and the memory order of its tensors. For a fused
    optimizer, this order must equal the order of the parameters.
    """
    computation: list[dict[str, Any]] = [
        {name: group[name] for name in COMPUTATION if name in group}
        for group in optimizer.param_groups
    ]
    _reorder(optimizer, state["state"])
    optimizer.load_state_dict(state)
    for group, settings in zip(optimizer.param_groups, computation, strict=True):
        group.update(settings)


def _reorder(optimizer: Optimizer, state: dict[int, dict[str, Any]]) -> None:
    """Bring the tensors of a state into the memory order of their parameters, in place.

    Only tensors in another order are copied, one after another, to save memory.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        values = state.get(index, {})
        for name, value in values.items():
            is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if is_like and value.stride() != parameter.stride():
                like = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                values[name] = like.copy_(value)


@contextmanager
def explained_misfit(name: str, folder: Path) -> Iterator[None]:
    """Raise UserError if a state cannot be loaded.

    Modules raise RuntimeError, and optimizers with other parameter groups raise ValueError. A state
    of another type can lead to any error.
    """
    try:
        yield
    except UserError:
        raise
    except DEVICE_ERRORS as error:
        raise RetryableError(f"the state of {name} cannot be loaded: {reason_of(error)}") from error
    except Exception as error:
        raise UserError(
            f"the checkpoint in {folder} does not fit this {name} ({reason_of(error)}); use the "
            "settings that it was made with, or another folder"
        ) from error


def reason_of(error: BaseException) -> str:
    """Return the reason in the text of an error, in one line.

    If a module refuses a state, the first line of torch's error has no reason. The reasons, such as
    missing keys and other shapes, are in the lines after it.
    """
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        del lines[0]
    if len(lines) > REASON_LINES:
        lines[REASON_LINES:] = [f"and {len(lines) - REASON_LINES} more"]
    if not isinstance(error, ValueError | RuntimeError | OSError):
        # The text of a KeyError is only the key.
        lines.insert(0, f"{type(error).__name__}:" if lines else type(error).__name__)
    reason = " ".join(lines) or type(error).__name__
    return reason if len(reason) <= REASON_LENGTH else f"{reason[:REASON_LENGTH]} …"
