"""Run functions of test modules on every rank of a process group, and return their results.

A test module marks functions with `@on_every_rank`. Those of a module run in one launch for each
number of ranks, in the order of the file. A test asks for the values of a function:

    @on_every_rank
    def sum_of_ranks(runtime):
        return runtime.sum(torch.tensor(runtime.rank))

    def test_all_ranks_get_the_sum(ranks):
        assert ranks.values(sum_of_ranks) == [expected] * ranks.count

The fixtures `ranks` (four ranks, and two with `make test-slow`) and `single` (one process) are in
conftest.py.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import launch

RankFunction = Callable[[Any], Any]

# The marked functions of each module by their name.
FUNCTIONS: dict[str, dict[str, RankFunction]] = defaultdict(dict)

# If there are several ranks, this rank of these modules is a new Python. It shows that a process
# with a group ends well, and that nothing depends on the seed of hashes, which forks share.
NEW_PYTHONS = {"test_ranks": 0, "test_checkpoint_shards": 1}

# The key of an outcome known only after the end of the process group. Its value is True if neither
# the group nor one of its threads is left.
GROUP_IS_GONE = "group is gone"


def on_every_rank(function: RankFunction) -> RankFunction:
    """Mark a function for every rank to call with its Runtime. torch.save must take its result.

    The working directory of all ranks is one empty folder.
    """
    FUNCTIONS[function.__module__][function.__name__] = function
    return function


@dataclass(frozen=True)
class Outcomes:
    """The results of the marked functions of a module on each rank."""

    by_rank: list[dict[str, Any]]

    @property
    def count(self) -> int:
        """Number of ranks."""
        return len(self.by_rank)

    def values(self, function: RankFunction) -> list[Any]:
        """Return what `function` returned, in the order of the ranks."""
        return [outcome[function.__name__] for outcome in self.by_rank]

    def first(self, function: RankFunction) -> Any:
        """Return what `function` returned on rank 0."""
        return self.values(function)[0]


def launch_ranks(count: int, folder: Path, module: str) -> Outcomes:
    """Run the marked functions of a module on `count` ranks in `folder`."""
    command = ("-m", f"{__package__}.run_on_rank", folder, module)
    tests = Path(__file__).parents[1]
    if count == 1:
        runs = [launch.alone(*command, PYTHONPATH=tests)]
    else:
        new = NEW_PYTHONS.get(module.rpartition(".")[2])
        runs = launch.ranks(*command, processes=count, new=new, PYTHONPATH=tests)
    assert launch.finish(runs) == [0] * count, "\n".join(run.stderr for run in runs)
    return Outcomes([torch.load(folder / f"rank-{rank}.pt") for rank in range(count)])


def threads() -> dict[int, str]:
    """Return the names of this process's threads by thread ID, or nothing without /proc."""
    names = {}
    for path in Path("/proc/self/task").glob("*/comm"):
        names[int(path.parent.name)] = path.read_text()
    return names
