"""The parts of a checkpoint: what they must offer, how they are loaded, and what is refused.

`folder` is that of the checkpoints, for the messages.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ddp_trainer.checkpoint_file import copied_to_cpu, first_line, map_leaves
from ddp_trainer.claim import SHARDED
from ddp_trainer.errors import UserError

# Settings of an optimizer that say how it computes, which depends on the hardware.
COMPUTATION = ("fused", "foreach")


class Stateful(Protocol):
    """Anything that can be saved: modules, optimizers, schedulers, samplers, scalers."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, Python's numbers and strings, and lists and dicts of them.

        Numbers of numpy cannot be read again.
        """

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over a saved state."""


@dataclass(frozen=True)
class PerRank:
    """A part of which each rank has its own state, such as a loader with its own position.

    A checkpoint with it is refused by a run with another number of ranks.
    """

    part: Stateful


def copied_state(name: str, part: Stateful) -> Any:
    """Return a copy of a part's state, which training does not change any more."""
    try:
        return map_leaves(copied_to_cpu, part.state_dict())
    except ValueError as error:
        raise UserError(
            f"the state of {name} cannot be saved ({error}); return only plain tensors, Python's "
            "own numbers and strings, and lists and dicts of them from state_dict()"
        ) from error


def load_part(part: Stateful, state: Any, *, name: str, folder: Path) -> None:
    """Load a saved state. Raises UserError if it does not fit."""
    with explained_misfit(name, folder):
        if isinstance(part, Optimizer):
            _load_optimizer(part, state)
        else:
            part.load_state_dict(state)


def _load_optimizer(optimizer: Optimizer, state: Any) -> None:
    """Load an optimizer's state, but keep how it computes.

    The hardware decides whether it is fused, and the memory order of its tensors. For a fused
    optimizer, this order must be that of the parameters.
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
    for index, values in state.items():
        parameter = parameters[index]
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
    except Exception as error:
        reason = first_line(error)
        raise UserError(
            f"the checkpoint in {folder} does not fit this {name} ({reason}); use the flags that "
            "it was made with, or another --checkpoint-dir"
        ) from error


def require_part(name: str, parts: Mapping[str, Any], folder: Path) -> None:
    """Raise UserError if a checkpoint has no state of a part."""
    if name not in parts:
        raise UserError(
            f"the checkpoint in {folder} has no state of this {name}; it has "
            f"{', '.join(map(str, parts)) or 'none'}. Use the script that it was made with, or "
            "another --checkpoint-dir"
        )


def require_ranks(name: str, saved: int, world_size: int, folder: Path) -> None:
    """Raise UserError if a checkpoint has the states of another number of ranks."""
    if saved != world_size:
        raise UserError(
            f"the checkpoint in {folder} has the state of {name} for {saved} ranks, but this run "
            f"has {world_size}; start as many ranks, or use another --checkpoint-dir"
        )


def require_identity(
    own: Mapping[str, str | int], found: Mapping[str, str | int], folder: Path
) -> None:
    """Raise UserError if a checkpoint belongs to something else.

    This run's settings are compared first: they begin with the workload, the clearest difference.
    """
    for name in dict.fromkeys([*own, *found]):
        if own.get(name) != found.get(name):
            raise UserError(
                f"the checkpoint in {folder} was made with {name} {found.get(name)!r}, but this "
                f"run has {own.get(name)!r}; use the flags that it was made with, or another "
                "--checkpoint-dir"
            )


def require_format(path: Path, *, is_sharded: bool) -> None:
    """Raise UserError if a checkpoint is sharded and this run's model is not, or vice versa."""
    if is_sharded == (path.suffix == SHARDED):
        return
    own, found = ("sharded", "not sharded") if is_sharded else ("not sharded", "sharded")
    raise UserError(
        f"the checkpoint {path} was made with a model that is {found}, but this run's model is "
        f"{own}; use the flags that it was made with, or another --checkpoint-dir"
    )
