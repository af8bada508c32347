"""The stacks of the ranks of a hung pod, in a few lines."""

import re

from . import PROGRAMS

# Limits of the lines of a report: their number, and characters of a frame. A path may be long.
LINES = 12
FRAME_LENGTH = 250

# A stack of faulthandler. No thread is the current one if all wait, as in a stopped process; then
# the last one is the main thread.
STACK = re.compile(r"(Current thread|Thread) [^\n]*\n((?:  File [^\n]*\n?)+)")

# Files of the frames below a program's own frames in its stack.
STARTER = re.compile(f'"{re.escape(PROGRAMS)}/|"<frozen runpy>"')


def stack_in(text: str) -> list[str]:
    """Return the frames of the interrupted thread, the innermost first.

    The frames of the agent are left out. In a fork, they are below those of the program.
    """
    stacks = STACK.findall(text)
    current = [stack for stack in stacks if stack[0] != "Thread"]
    chosen = current or stacks
    if not chosen:
        return []
    _, frames = chosen[-1]
    return [frame for frame in frames.splitlines() if not STARTER.search(frame)]


def stack_lines(groups: dict[tuple[str, ...], list[int]]) -> list[str]:
    """Return the lines about the stacks of ranks. Ranks with equal stacks share theirs.

    The smallest groups come first: the culprit is in one of them.
    """
    lines = []
    each = max(1, LINES // max(1, len(groups)))
    for stack in sorted(groups, key=lambda stack: len(groups[stack])):
        whose = name_ranks(groups[stack])
        for frame in choose(list(stack), each):
            lines.append(f"{whose}: {frame.strip()}"[:FRAME_LENGTH])
    return lines[:LINES]


def name_ranks(ranks: list[int]) -> str:
    """Return `rank 3`, or `ranks 0-2,4` for several."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    text = ",".join("-".join(map(str, part)) for part in parts)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def choose(frames: list[str], number: int) -> list[str]:
    """Return so many frames: the innermost ones, and the innermost one outside of torch."""
    own = [frame for frame in frames if "/torch/" not in frame]
    if not own or own[0] in frames[:number]:
        return frames[:number]
    return [*frames[: number - 1], own[0]]
