"""Training with PyTorch DistributedDataParallel. A run can be stopped and resumed anywhere.

    from ddp_trainer import Checkpoints, GlobalBatchSampler, StopVote, process_group

The names below are what most training scripts need of the library. It works on one machine and on
any cluster.

    errors ─▶ files ─▶ ranks ─┬─▶ data ───────┬─▶ run ─▶ cli ─▶ workloads
                              └─▶ checkpoint ─┘
                                                 imports go from the right to the left

The library ends with `run`. `cli` is the command line. `workloads` has training scripts on top of
the library.
"""

import sys
from importlib import import_module

from ddp_trainer.moved import MovedModules

# Type checkers take this for the constant of `typing`. Importing `typing` would double the time of
# the import.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from ddp_trainer.checkpoint.checkpoints import Checkpoints as Checkpoints
    from ddp_trainer.checkpoint.folder import Best as Best
    from ddp_trainer.checkpoint.folder import Retention as Retention
    from ddp_trainer.checkpoint.parts import PerRank as PerRank
    from ddp_trainer.checkpoint.weights import read_part as read_part
    from ddp_trainer.data.loader import ShardLoader as ShardLoader
    from ddp_trainer.data.sampler import GlobalBatchSampler as GlobalBatchSampler
    from ddp_trainer.data.sampler import Shard as Shard
    from ddp_trainer.errors import Interrupted as Interrupted
    from ddp_trainer.errors import RetryableError as RetryableError
    from ddp_trainer.errors import SlowRankError as SlowRankError
    from ddp_trainer.errors import UserError as UserError
    from ddp_trainer.ranks.data_parallel import accumulate as accumulate
    from ddp_trainer.ranks.group import attach as attach
    from ddp_trainer.ranks.group import process_group as process_group
    from ddp_trainer.ranks.runtime import Runtime as Runtime
    from ddp_trainer.run.evaluation import evaluate as evaluate
    from ddp_trainer.run.evaluation import evaluation_shards as evaluation_shards
    from ddp_trainer.run.interrupt import StopVote as StopVote
    from ddp_trainer.run.progress import Progress as Progress

__version__ = "0.1.0"

# The module of each name above. It is imported when the name is used, because torch takes seconds.
MODULES = {
    "Checkpoints": "checkpoint.checkpoints",
    "Best": "checkpoint.folder",
    "Retention": "checkpoint.folder",
    "PerRank": "checkpoint.parts",
    "read_part": "checkpoint.weights",
    "ShardLoader": "data.loader",
    "GlobalBatchSampler": "data.sampler",
    "Shard": "data.sampler",
    "Interrupted": "errors",
    "RetryableError": "errors",
    "SlowRankError": "errors",
    "UserError": "errors",
    "accumulate": "ranks.data_parallel",
    "attach": "ranks.group",
    "process_group": "ranks.group",
    "Runtime": "ranks.runtime",
    "evaluate": "run.evaluation",
    "evaluation_shards": "run.evaluation",
    "StopVote": "run.interrupt",
    "Progress": "run.progress",
}

sys.meta_path.append(MovedModules())


def __getattr__(name: str) -> "Any":
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})
