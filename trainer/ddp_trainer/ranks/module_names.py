"""The names of a model's parameters, without those of its wrappers by DDP and torch.compile.

A checkpoint has these names, so it can be loaded with another number of ranks, and with or without
torch.compile.
"""

import copy
import re
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

# What torch.compile puts into the names of a module's parameters.
COMPILED = re.compile(r"(?:^|(?<=\.))_orig_mod\.")

# What DistributedDataParallel puts before them.
WRAPPED = "module."


class OwnStateDict(nn.Module):
    """A wrapper of `module` with the state dict of the module, without a prefix."""

    module: nn.Module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return bare(self.module).state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return bare(self.module).load_state_dict(*args, **kwargs)


def bare(part: Any) -> Any:
    """Return a model without its wrappers by DDP and torch.compile. Return other parts unchanged.

    The wrappers put prefixes into the keys of the state dict.
    """
    while True:
        # A compiled module has a class in this module. Its import takes a while.
        dynamo = sys.modules.get("torch._dynamo")
        if isinstance(part, DistributedDataParallel | OwnStateDict):
            part = part.module
        elif dynamo is not None and isinstance(part, dynamo.OptimizedModule):
            part = part._orig_mod
        else:
            return part


def bare_names(state: Any) -> Any:
    """Return a module's state dict with its names without torch.compile.

    Other states are returned unchanged.
    """
    if not isinstance(state, dict) or not any(COMPILED.search(str(name)) for name in state):
        return state
    return _renamed(state, lambda name: COMPILED.sub("", name))


def compiled_names(state: Any, module: nn.Module) -> Any:
    """Return a bare module's state dict with the names in `module`.

    Parts of `module` may be compiled. The state may come from a model in a wrapper, as other
    programs save it.
    """
    if not isinstance(state, dict):
        return state
    state = bare_names(state)
    is_wrapped = bool(state) and all(str(name).startswith(WRAPPED) for name in state)
    if is_wrapped and "module" not in module._modules:
        state = _renamed(state, lambda name: name.removeprefix(WRAPPED))

    # The prefix of each module within a compiled one, by its prefix without torch.compile.
    prefixes = [f"{name}." for name, _ in module.named_modules()]
    compiled = {COMPILED.sub("", prefix): prefix for prefix in prefixes if COMPILED.search(prefix)}
    if not compiled:
        return state

    def rename(name: str) -> str:
        head, dot, leaf = name.rpartition(".")
        return compiled.get(head + dot, head + dot) + leaf

    return _renamed(state, rename)


def _renamed(state: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return a state dict with other names."""
    renamed = copy.copy(state)
    renamed.clear()
    for name, value in state.items():
        renamed[rename(name)] = value
    # The versions of the modules, by their names. Those of wrappers come before what they wrap.
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        renamed._metadata = {  # type: ignore[attr-defined]
            rename(f"{name}." if name else "").removesuffix("."): version
            for name, version in versions.items()
        }
    return renamed
