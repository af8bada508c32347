"""Training with PyTorch DistributedDataParallel that can be stopped and resumed anywhere.

    from ddp_trainer import Checkpoints, GlobalBatchSampler, StopVote, process_group

The modules of this package are a library for training scripts. The names below are what most
scripts need of them. `cli` is the command line. `workloads` has training scripts that use the
library. The package works on one machine and on any cluster.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_trainer.checkpoint import Checkpoints as Checkpoints
    from ddp_trainer.checkpoint_parts import PerRank as PerRank
    from ddp_trainer.data_parallel import accumulate as accumulate
    from ddp_trainer.errors import Interrupted as Interrupted
    from ddp_trainer.errors import UserError as UserError
    from ddp_trainer.evaluation import evaluate as evaluate
    from ddp_trainer.evaluation import evaluation_shards as evaluation_shards
    from ddp_trainer.group import attach as attach
    from ddp_trainer.group import process_group as process_group
    from ddp_trainer.interrupt import StopVote as StopVote
    from ddp_trainer.loader import ShardLoader as ShardLoader
    from ddp_trainer.progress import Progress as Progress
    from ddp_trainer.runtime import Runtime as Runtime
    from ddp_trainer.sampler import GlobalBatchSampler as GlobalBatchSampler
    from ddp_trainer.sampler import Shard as Shard

__version__ = "0.1.0"

# The module of each name above. It is imported when the name is used, because torch takes seconds.
MODULES = {
    "Checkpoints": "checkpoint",
    "PerRank": "checkpoint_parts",
    "accumulate": "data_parallel",
    "Interrupted": "errors",
    "UserError": "errors",
    "evaluate": "evaluation",
    "evaluation_shards": "evaluation",
    "attach": "group",
    "process_group": "group",
    "StopVote": "interrupt",
    "ShardLoader": "loader",
    "Progress": "progress",
    "Runtime": "runtime",
    "GlobalBatchSampler": "sampler",
    "Shard": "sampler",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})
