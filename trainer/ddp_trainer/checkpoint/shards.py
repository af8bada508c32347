"""Checkpoints of a model with parameters sharded over the ranks, as by FSDP2.

Every rank writes its own part to a file in one directory, by torch.distributed.checkpoint (DCP). A
run with another number of ranks reads from it what it needs. DCP's own format contains pickles, and
reading a pickle can run any code. So the files have the format safetensors, with tensors only. All
other state is in a file of its own, and is read with `weights_only`.

    step-g0001-0000000069.sharded/
        index.pt                 step, other state, size and CRC of each shard
        shard-00001.safetensors  written by rank 0
        shard-00002.safetensors  written by rank 1
"""

import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ddp_trainer.checkpoint.file import read_structure
from ddp_trainer.checkpoint.folder import INDEX, Fault, read_with_patience
from ddp_trainer.checkpoint.staging import SUFFIX, ShardFile, measure, plain_errors
from ddp_trainer.errors import UserError
from ddp_trainer.ranks.runtime import Runtime

# Fields of the index in addition to those of a checkpoint in one file: size and CRC of each shard
# by its name, and the shapes of all tensors.
SHARDS = "shards"
SHAPES = "shapes"

# The state of an optimizer as one dict. Its keys do not depend on the number of ranks.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

# The prefix of an optimizer's settings, before the name of the parameter.
GROUPS = "param_groups."

State = Mapping[str, Any]


class ShardedState:
    """The sharded models among the parts of a checkpoint, and their optimizers.

    It is false if there are none. Every rank calls its methods.
    """

    def __init__(self, parts: Mapping[str, Any], runtime: Runtime) -> None:
        self._runtime = runtime
        self._models: dict[str, nn.Module] = {
            name: part
            for name, part in parts.items()
            if isinstance(part, nn.Module) and is_sharded(part)
        }
        for sharded in self._models.values():
            _reshard(sharded)
        # Each optimizer, and the module with its parameters.
        self._optimizers: dict[str, tuple[Optimizer, nn.Module]] = {}
        for name, part in parts.items():
            if isinstance(part, Optimizer):
                model = self._model_of(name, part, parts)
                if model is not None:
                    self._optimizers[name] = part, model

    def __bool__(self) -> bool:
        return bool(self._models)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def names(self) -> list[str]:
        """Return the names of the sharded parts."""
        return [*self._models, *self._optimizers]

    def _model_of(
        self, name: str, optimizer: Optimizer, parts: Mapping[str, Any]
    ) -> nn.Module | None:
        """Return the module with the parameters of an optimizer, or None if none is sharded.

        If several models have them, it is one module with these models in it. Raises UserError if
        some parameters are of no model among the parts, because their names are then not known.
        """
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        modules = {key: part for key, part in parts.items() if isinstance(part, nn.Module)}
        owned = {
            key: own & {id(parameter) for parameter in module.parameters()}
            for key, module in modules.items()
        }
        if not any(owned[key] for key in self._models):
            return None
        for key in self._models:
            if owned[key] == own:
                return self._models[key]
        found: dict[str, nn.Module] = {}
        left = set(own)
        for key, module in modules.items():
            if owned[key] & left:
                # Without a prefix, a name such as `keys` would be the name of a method.
                found[f"part_{key}"] = module
                left -= owned[key]
        if left:
            raise UserError(
                f"{name} has {len(left)} parameters of models that are no parts of the "
                f"checkpoint, beside those of {' and '.join(modules)}; give these models to "
                "Checkpoints too",
                is_common=True,
            )
        return nn.ModuleDict(found)

    def _read(self, names: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the state of some parts. Its tensors are those of the model, not copies."""
        found: dict[str, dict[str, Any]] = {}
        for name, model in self._models.items():
            if name in names:
                found[name] = get_model_state_dict(model)
        for name, (optimizer, model) in self._optimizers.items():
            if name not in names:
                continue
            is_new = not optimizer.state
            found[name] = get_optimizer_state_dict(model, optimizer, options=FLAT)
            if is_new:
                # torch takes a step with a rate of 0 to make the state. It would count later.
                optimizer.state.clear()
        return found

    def read_saved(self) -> dict[str, dict[str, Any]]:
        """Return the state of each part. An optimizer without a state yet has no tensors in it."""
        has_state = {
            name: bool(optimizer.state) for name, (optimizer, _) in self._optimizers.items()
        }
        found = self._read(self.names)
        for name, has_own in has_state.items():
            if not has_own:
                found[name] = without_tensors(found[name])
        return found

    def require_fitting(self, saved: State, names: Collection[str]) -> None:
        """Raise ValueError if a checkpoint has other tensors of the parts in `names`.

        `saved` is its index. Nothing is loaded.
        """
        _require_shapes(tensors_of(self._read(names)), _shapes_of(names, saved))

    def load(self, path: Path, saved: State, names: Collection[str]) -> None:
        """Load the sharded parts in `names` from a checkpoint. `saved` is its index.

        Raises ValueError if it has other tensors.
        """
        states = self._read(names)
        tensors = tensors_of(states)
        shapes = _shapes_of(states, saved)
        unused = self._find_unused_state(tensors, shapes)
        for name in unused:
            del tensors[name]
        _require_shapes(tensors, shapes)
        for name, state in states.items():
            _require_parameters(state, saved["parts"][name])
        with plain_errors():
            load(
                tensors,
                storage_reader=HuggingFaceStorageReader(str(path)),
                process_group=self._runtime.cpu_group,
            )
        for name, state in states.items():
            state |= saved["parts"][name]
        for name, model in self._models.items():
            if name in states:
                set_model_state_dict(model, states[name])
        for name, (optimizer, model) in self._optimizers.items():
            if name not in states:
                continue
            set_optimizer_state_dict(model, optimizer, states[name], options=FLAT)
            for parameter_name, parameter in model.named_parameters():
                if any(key.startswith(f"{name}.state.{parameter_name}.") for key in unused):
                    optimizer.state.pop(parameter, None)

    def _find_unused_state(self, tensors: State, saved: State) -> list[str]:
        """Return the names of optimizers' tensors missing in a checkpoint.

        An optimizer has no state of a parameter without a gradient so far.
        """
        prefixes = tuple(f"{name}.state." for name in self._optimizers)
        return [name for name in tensors if name.startswith(prefixes) and name not in saved]


def is_sharded(model: nn.Module) -> bool:
    has_shards = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return has_shards or next(_fsdp_modules(model), None) is not None


def _reshard(model: nn.Module) -> None:
    """Give a model of FSDP2 its sharded parameters, as the optimizer has them.

    After a forward pass without a backward pass, as in an evaluation, the outermost module still
    has whole parameters. These are other objects.
    """
    for module in _fsdp_modules(model):
        module.reshard()


def _fsdp_modules(model: nn.Module) -> Iterator[Any]:
    # Tensor parallelism alone does not need this module, and its import takes a while.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        yield from (module for module in model.modules() if isinstance(module, fsdp.FSDPModule))


def tensors_of(states: Mapping[str, State]) -> dict[str, Tensor]:
    """Return the tensors of all parts in one dict, as DCP takes it."""
    return {
        f"{part}.{key}": value
        for part, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def without_tensors(state: State) -> dict[str, Any]:
    """Return what the index has of a sharded part: learning rates and the like."""
    return {key: value for key, value in state.items() if not isinstance(value, Tensor)}


def _shapes_of(names: Collection[str], saved: State) -> dict[str, list[int]]:
    """Return the shapes of the tensors of some parts in a checkpoint."""
    shapes: Mapping[str, list[int]] = saved[SHAPES]
    return {key: shape for key, shape in shapes.items() if key.partition(".")[0] in names}


def _require_shapes(tensors: Mapping[str, Tensor], saved: Mapping[str, list[int]]) -> None:
    """Raise ValueError unless the checkpoint has the same tensors with the same shapes."""
    own = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in [*own, *saved]:
        if own.get(name) != saved.get(name):
            raise ValueError(
                f"{name} has the shape {saved.get(name)} in the checkpoint and "
                f"{own.get(name)} in this run"
            )


def _require_parameters(own: State, saved: State) -> None:
    """Raise ValueError unless a saved optimizer has settings for the same parameters."""
    names, found = (
        {key.rpartition(".")[0] for key in state if key.startswith(GROUPS)}
        for state in (own, saved)
    )
    for name in sorted(names ^ found):
        where = "this run" if name in names else "the checkpoint"
        raise ValueError(f"only the optimizer of {where} has {name.removeprefix(GROUPS)}")


# Reading


def find_fault(path: Path, runtime: Runtime) -> Fault | None:
    """Return why a sharded checkpoint with a good index is not readable, or None.

    Each rank checks some of the shards. Every rank calls it.
    """
    fault, shards = runtime.on_main(lambda: _read_shard_list(path))
    if fault:
        return Fault(fault)
    own = sorted(shards)[runtime.rank :: runtime.world_size]
    faults = (_fault_of(path / name, shards[name]) for name in own)
    found = next(filter(None, faults), None)
    return next(filter(None, runtime.gather(found)), None)


def _read_shard_list(path: Path) -> tuple[str, dict[str, ShardFile]]:
    """Return (what is wrong with the list of the shards, the shards by name)."""
    index = read_structure(path / INDEX)
    try:
        shards = {str(name): ShardFile(*numbers) for name, numbers in index[SHARDS].items()}
        dict(index[SHAPES])
    except (KeyError, TypeError, ValueError, AttributeError):
        return f"{INDEX} does not list the shards", {}
    # DCP reads every file with this suffix.
    unlisted = {file.name for file in path.glob(f"*{SUFFIX}")} - shards.keys()
    if unlisted:
        return f"{INDEX} does not list {min(unlisted)}", {}
    return "", shards


def _fault_of(path: Path, expected: ShardFile) -> Fault | None:
    found = read_with_patience(lambda: measure(path))
    if isinstance(found, Fault):
        return Fault(f"{path.name}: {found.reason}", found.is_damage)
    if found.size != expected.size:
        return Fault(f"{path.name} has {found.size} bytes instead of {expected.size}")
    return None if found.crc == expected.crc else Fault(f"the checksum of {path.name} is wrong")
