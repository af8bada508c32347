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

import json
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

import torch

from . import launch

RankFunction = Callable[[Any], Any]

TESTS = Path(__file__).parents[1]

# The marked functions of each module by their name.
FUNCTIONS: dict[str, dict[str, RankFunction]] = defaultdict(dict)

# If there are several ranks, this rank of these modules is a new Python. It shows that a process
# with a group ends well, and that nothing depends on the seed of hashes, which forks share.
NEW_PYTHONS = {"test_ranks": 0, "test_checkpoint_shards": 1}

# What torch imports at the first use of its compiler, which would take each rank three seconds.
COMPILER = (
    "torch._functorch.aot_autograd",
    "torch._functorch._activation_checkpointing.graph_info_provider",
    "torch._inductor.debug",
    "torch._inductor.pattern_matcher",
)

# What is imported once for all ranks of these modules.
PRELOADED = {"test_data_parallel": COMPILER}

# The threads of a rank before it joins its group. Its process sets them.
threads_before_the_group: dict[int, str] = {}

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


class Launcher:
    """A process with a test module imported. The ranks are forks of it."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.process = subprocess.Popen(
            [launch.python(), *self._command],
            env=launch.environment(PYTHONPATH=TESTS),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def _command(self) -> tuple[str, ...]:
        return "-m", f"{__package__}.run_on_rank", self.module

    def launch(self, count: int, folder: Path) -> Outcomes:
        """Run the marked functions of the module on `count` ranks in `folder`."""
        new = NEW_PYTHONS.get(self.module.rpartition(".")[2]) if count > 1 else None
        variables = launch.variables_of_ranks(count) if count > 1 else [{}]
        runs = []
        if new is not None:
            own = variables.pop(new)
            runs.append(launch.new_python(*self._command, folder, PYTHONPATH=TESTS, **own))
        codes = self._fork(variables, folder)
        codes += launch.finish(runs)
        errors = [(folder / "log").read_text(), *(run.stderr for run in runs)]
        assert codes == [0] * count, "\n".join(errors)
        return Outcomes([torch.load(folder / f"rank-{rank}.pt") for rank in range(count)])

    def _fork(self, variables: list[dict[str, str]], folder: Path) -> list[int]:
        """Return the exit codes of a fork for each of these sets of variables."""
        request = {"folder": str(folder), "variables": variables}
        limit = Timer(launch.DEADLINE, self.process.kill)
        limit.daemon = True
        limit.start()
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            limit.cancel()
        assert line, f"the launcher of {self.module} ended, or took {launch.DEADLINE} s"
        codes: list[int] = json.loads(line)
        return codes

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def threads() -> dict[int, str]:
    """Return the names of this process's threads by thread ID, or nothing without /proc."""
    names = {}
    for path in Path("/proc/self/task").glob("*/comm"):
        names[int(path.parent.name)] = path.read_text()
    return names
