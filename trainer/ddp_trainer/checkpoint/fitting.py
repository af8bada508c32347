"""Checks whether a checkpoint fits a run. All of it is checked before any part is changed.

A saved state has a StoredTensor in the place of each tensor. `folder` is the folder of the
checkpoints, for the messages.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_trainer.checkpoint.claim import SHARDED
from ddp_trainer.checkpoint.file import StoredTensor
from ddp_trainer.checkpoint.parts import explained_misfit
from ddp_trainer.errors import UserError
from ddp_trainer.ranks.module_names import compiled_names

# Most keys named in a message.
NAMED_KEYS = 5

# BatchNorm's count of batches. States of old releases do not have it, and torch adds it to them.
ADDED_KEY = "num_batches_tracked"

# If a module overrides one of these methods, its state has a format of its own.
FORMAT_METHODS = ("_save_to_state_dict", "_load_from_state_dict")

# Optimizers of torch with a state in the shape of the parameter, or a number.
ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
)


def require_fitting_part(name: str, part: Any, saved: Any, folder: Path) -> None:
    """Raise UserError if a saved state does not fit a part. Nothing is loaded.

    Any part but a module or an optimizer may have a method `check_state_dict`. It is called, and
    raises an exception if the state does not fit.
    """
    with explained_misfit(name, folder):
        if isinstance(part, nn.Module):
            _require_fitting_module(part, saved)
        elif isinstance(part, Optimizer):
            _require_fitting_optimizer(part, saved)
        elif hasattr(part, "check_state_dict"):
            part.check_state_dict(saved)


def is_checked(part: Any) -> bool:
    """Return True if a part can load every state accepted by `require_fitting_part`."""
    if isinstance(part, nn.Module):
        return not _has_own_format(part) and not _has_extra_state(part)
    if isinstance(part, Optimizer):
        return not _loads_in_own_way(part)
    return hasattr(part, "check_state_dict")


def _require_fitting_module(module: nn.Module, saved: Any) -> None:
    """Raise ValueError if a saved state has other names or shapes than a module.

    A module with a state in a format of its own is not checked.
    """
    if _has_own_format(module):
        return
    saved = compiled_names(saved, module)
    own = module.state_dict()
    missing = [key for key in own if key not in saved and key.rpartition(".")[2] != ADDED_KEY]
    unexpected = [key for key in saved if key not in own]
    for what, keys in (("Missing", missing), ("Unexpected", unexpected)):
        if keys:
            raise ValueError(f"{what} key(s) in state_dict: {_named(keys)}")
    for key, tensor in own.items():
        if key in saved and isinstance(tensor, Tensor):
            _require_shape(key, saved[key], tensor)


def _named(keys: Collection[str]) -> str:
    """Return the first of some keys in quotation marks."""
    named = [f'"{key}"' for key in keys][:NAMED_KEYS]
    more = len(keys) - len(named)
    return ", ".join([*named, *([f"and {more} more"] if more else [])])


def _require_shape(key: str, found: Any, own: Tensor) -> None:
    if not isinstance(found, StoredTensor):
        raise ValueError(f"{key}: expected a tensor, got {type(found).__name__}")
    # torch loads a tensor of one element as a number, as very old releases saved it.
    is_number = own.dim() == 0 and found.shape == (1,)
    if found.shape != tuple(own.shape) and not is_number:
        raise ValueError(
            f"size mismatch for {key}: the checkpoint has the shape {list(found.shape)}, "
            f"this run {list(own.shape)}"
        )


def _has_extra_state(module: nn.Module) -> bool:
    """Return True if a module or a part of it has an extra state. Only itself can check it."""
    own = nn.Module.set_extra_state
    return any(type(child).set_extra_state is not own for child in module.modules())


def _has_own_format(module: nn.Module) -> bool:
    """Return True if a module or a part of it saves or loads its state in a way of its own."""
    for method in ("state_dict", "load_state_dict"):
        if getattr(type(module), method) is not getattr(nn.Module, method):
            return True
    for child in module.modules():
        if child._load_state_dict_pre_hooks or child._state_dict_hooks:
            return True
        for method in FORMAT_METHODS:
            own = getattr(type(child), method)
            # Those of torch, such as BatchNorm's, only accept older states too.
            is_known = own.__module__.startswith("torch.nn.modules")
            if own is not getattr(nn.Module, method) and not is_known:
                return True
    return False


def _require_fitting_optimizer(optimizer: Optimizer, saved: Any) -> None:
    """Raise ValueError if a saved state belongs to another optimizer, or to other parameters.

    torch checks the number of the parameters only.
    """
    groups = saved["param_groups"]
    require_same_kind(optimizer, groups)
    if _loads_in_own_way(optimizer):
        return
    # The sentences are torch's.
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups: "
            f"{len(groups)}, and this run has {len(optimizer.param_groups)}"
        )
    for own, found in zip(optimizer.param_groups, groups, strict=True):
        if len(own["params"]) != len(found["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                f"optimizer's group: {len(found['params'])} parameters, and this run has "
                f"{len(own['params'])}"
            )
        if is_elementwise(optimizer):
            for index, parameter in zip(found["params"], own["params"], strict=True):
                _require_fitting_state(index, parameter, saved["state"].get(index, {}))


def _require_fitting_state(index: int, parameter: Tensor, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, StoredTensor) and value.shape not in ((), (1,)):
            _require_shape(f"{key} of parameter {index}", value, parameter)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return True if the state of a parameter is known to have its shape, or to be numbers."""
    kind = type(optimizer)
    return kind.__name__ in ELEMENTWISE and kind is getattr(torch.optim, kind.__name__)


def _loads_in_own_way(optimizer: Optimizer) -> bool:
    """Return True if an optimizer loads its state in a way of its own."""
    has_own = type(optimizer).load_state_dict is not Optimizer.load_state_dict
    return has_own or bool(optimizer._optimizer_load_state_dict_pre_hooks)


def require_same_kind(optimizer: Optimizer, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError if parameter groups belong to another optimizer, as Adam's for SGD.

    torch accepts it. A release of torch may add a setting or remove one, but not both at once.
    """
    for own, saved in zip(optimizer.param_groups, groups, strict=False):
        missing = optimizer.defaults.keys() - saved.keys()
        unknown = saved.keys() - own.keys() - {"initial_lr"}
        if missing and unknown:
            raise ValueError(
                f"it is the state of another optimizer than {type(optimizer).__name__}: it has "
                f"{', '.join(sorted(unknown))} and not {', '.join(sorted(missing))}"
            )


def require_parts(
    names: Collection[str], parts: Mapping[str, Any], folder: Path, new: Collection[str]
) -> list[str]:
    """Return the names of the parts with a state in a checkpoint.

    Raises UserError if a part has no state there and is not in `new`.
    """
    for name in names:
        if name not in parts and name not in new:
            raise UserError(
                f"the checkpoint in {folder} has no state of this {name}; it has "
                f"{', '.join(map(str, parts)) or 'none'}. Use the script that it was made with, "
                "another folder, or restore(new_parts=…) for a part that is new"
            )
    return [name for name in names if name in parts]


def require_ranks(name: str, saved: int, world_size: int, folder: Path) -> None:
    """Raise UserError if a checkpoint has the states of another number of ranks."""
    if saved != world_size:
        raise UserError(
            f"the checkpoint in {folder} has the state of {name} for {saved} ranks, but this run "
            f"has {world_size}; start as many ranks, or use another folder"
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
                f"run has {own.get(name)!r}; use the settings that it was made with, or another "
                "folder"
            )


def require_format(path: Path, *, is_sharded: bool) -> None:
    """Raise UserError if a checkpoint is sharded and this run's model is not, or vice versa."""
    if is_sharded == (path.suffix == SHARDED):
        return
    own, found = ("sharded", "not sharded") if is_sharded else ("not sharded", "sharded")
    raise UserError(
        f"the checkpoint {path} was made with a model that is {found}, but this run's model is "
        f"{own}; use the settings that it was made with, or another folder"
    )
