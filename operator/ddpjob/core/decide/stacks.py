"""The stacks of the ranks of a hung gang, and the probable culprit.

The ranks of a hung gang wait for the one that does something else. So ranks are grouped by equal
stacks outside of torch, and the smallest group is the probable culprit.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# A line of an agent's report on a hang: its ranks, such as `rank 3` or `ranks 0-2,4`, and a frame.
# A rank without a stack may hang in the kernel.
RANKS = r"ranks? (\d[\d,-]{0,200}): "
LINE = re.compile(RANKS + r'File "([^"]{1,300})", line (\d{1,9}) in (\S{1,100})')
NO_STACK = re.compile(RANKS + "no stack")

# The largest rank, and the most frames read from a report. Training code can forge its lines.
MAX_RANK = 999_999_999
MAX_FRAMES = 4096

# Files of torch, and those with code that waits for other ranks.
TORCH = re.compile(r"/torch/")
WAITS = re.compile(r"/torch/(?:distributed|autograd)/")


class Frame(NamedTuple):
    """One frame of a stack, as `faulthandler` prints it."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        file_name = self.file.rpartition("/")[2]
        return f"{self.function} ({file_name}, line {self.line})"


Stacks = Mapping[int, Sequence[Frame]]


@dataclass(frozen=True)
class Culprit:
    """The outlier ranks, in order, and one sentence on them and the others."""

    ranks: tuple[int, ...]
    message: str


def read_stacks(text: str) -> dict[int, list[Frame]]:
    """Return the stack of each rank in the report of a pod, the innermost frame first.

    It is empty for a rank that could not write it.
    """
    stacks: dict[int, list[Frame]] = {}
    left = MAX_FRAMES
    for ranks in NO_STACK.findall(text):
        found = read_ranks(ranks, left)
        left -= len(found)
        stacks |= {rank: [] for rank in found}
    for ranks, *frame in LINE.findall(text):
        found = read_ranks(ranks, left)
        left -= len(found)
        for rank in found:
            stacks.setdefault(rank, []).append(Frame(*frame))
    return stacks


def lines_of_rank(rank: int, lines: Iterable[str]) -> list[str]:
    """Return the lines about the stack of a rank."""
    found = []
    for line in lines:
        named = re.match(RANKS, line)
        if named and rank in read_ranks(named[1]):
            found.append(line)
    return found


def read_ranks(text: str, limit: int = MAX_FRAMES) -> tuple[int, ...]:
    """Return the ranks in a text such as `0-2,4`, at most `limit`."""
    ranks: list[int] = []
    for part in text.split(","):
        begin, _, end = part.partition("-")
        if not (begin.isdecimal() and (end or begin).isdecimal()):
            continue
        first, last = int(begin), min(int(end or begin), MAX_RANK)
        ranks += range(first, min(last + 1, first + limit - len(ranks)))
    return tuple(ranks)


def find_culprit(stacks: Stacks, steps: Mapping[int, int]) -> Culprit | None:
    """Return the outlier ranks, or None if there are none.

    Of two groups of equal size, choose the one that waits for no other rank, then the one in the
    lowest step. `steps` has the last step of ranks, as far as it is known.
    """
    groups = _group_ranks(stacks)
    if len(groups) < 2:
        return None

    def suspicion(ranks: Sequence[int]) -> tuple[int, bool, float]:
        waits = _waits(stacks[ranks[0]])
        known = [steps[rank] for rank in ranks if rank in steps]
        lowest_step = min(known, default=float("inf"))
        return len(ranks), waits, lowest_step

    first, second, *_ = sorted(groups, key=suspicion)
    if suspicion(first) == suspicion(second):
        return None
    others = max((ranks for ranks in groups if ranks is not first), key=len)
    stand = "stands" if len(first) == 1 else "stand"
    are = "is" if len(others) == 1 else "are"
    place = _place(stacks[first[0]])
    their_place = _place(stacks[others[0]])
    message = (
        f"{_named(first)} {stand} out, in {place}, while {_named(others)} {are} in {their_place}"
    )
    return Culprit(tuple(first), message)


def _group_ranks(stacks: Stacks) -> list[list[int]]:
    """Return the ranks by equal stacks outside of torch. Ranks without a stack are one group."""
    groups: dict[tuple[Frame, ...] | None, list[int]] = {}
    for rank in sorted(stacks):
        stack = stacks[rank]
        key = _own_frames(stack) if stack else None
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _own_frames(stack: Sequence[Frame]) -> tuple[Frame, ...]:
    return tuple(frame for frame in stack if not TORCH.search(frame.file))


def _waits(stack: Sequence[Frame]) -> bool:
    return any(WAITS.search(frame.file) for frame in stack)


def _place(stack: Sequence[Frame]) -> str:
    """Return the innermost frame outside of torch."""
    frames = _own_frames(stack) or stack
    if not frames:
        return "a call that does not return"
    return str(frames[0])


def _named(ranks: Sequence[int]) -> str:
    first = f"rank {ranks[0]}"
    more = len(ranks) - 1
    return f"{first} and {more} more" if more else first
