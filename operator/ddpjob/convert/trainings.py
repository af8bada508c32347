"""Find the command of a shell script that is the training."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ddpjob.convert.launch import LAUNCH, SCRIPT, SHELLS
from ddpjob.convert.marks import unmark
from ddpjob.convert.programs import WRAPPERS, is_prefix, split_prefix
from ddpjob.convert.shell import (
    ARRAY,
    ASSIGNMENT,
    VARIABLE,
    Assignment,
    Statement,
    assignment_of,
    expand,
    expand_arrays,
    expand_command,
    read_shell,
    split_words,
    without_redirections,
)
from ddpjob.core.api import launcher
from ddpjob.core.api.readers import SpecError

# Commands of python other than a training.
NO_TRAINING = re.compile(
    r"(^|[\s/])python[0-9.]*\s+(-c|-V|--version|-m\s+(pip|venv|ensurepip)|(\S*/)?setup\.py)(\s|$)"
)

# Programs that run a command in a container.
CONTAINERS = "apptainer|singularity"
SHIFTER = "shifter"

# The names of programs and modules that train, if several could be the training.
TRAINS = re.compile("train|tune|main", re.IGNORECASE)

# Between the commands in the text of a shell.
CHAINED = re.compile(r"&&|[;|\n]")

# The rank of a command that starts processes. One of srun has a higher rank, python a lower one.
RANK_OF_LAUNCHERS = 3

EXPORTS = ("export", "declare", "typeset", "readonly")

# The end of a line in an array of several lines.
LINE_END = re.compile(r"\s*\n\s*")


@dataclass(frozen=True)
class Candidate:
    """A statement that could be the training.

    - `program`: its script or module, or an empty string.
    - `rank`: how likely it is the training, as of `rank_of`.
    """

    statement: Statement
    program: str
    rank: int

    @property
    def starts_processes(self) -> bool:
        """Return True for a launcher such as torchrun: a setup must not start it."""
        return self.rank >= RANK_OF_LAUNCHERS


def find_trainings(
    statements: Sequence[Statement], path: str, values: Mapping[str, str]
) -> list[Candidate]:
    """Return the statements with the highest rank. Raises SpecError if there are none."""
    _require_whole(statements, path)
    known = dict(values)
    arrays: dict[str, str] = {}
    found = []
    for one in statements:
        array = ARRAY.fullmatch(one.text)
        if array:
            before = arrays.get(array[1], "") if array[2] else ""
            elements = _with_elements(LINE_END.sub(" ", array[3]), arrays)
            arrays[array[1]] = f"{before} {expand_command(elements, known)}".strip()
            continue
        for word in one.words if one.is_readable else ():
            assignment = assignment_of(word)
            if assignment:
                before = known.get(assignment.name, "") if assignment.adds else ""
                known[assignment.name] = before + _without_itself(assignment, known)
        if not one.is_readable or is_assignment(one.words):
            continue
        texts = [expand_command(_with_elements(text, arrays), known) for text in one.commands]
        ranks = [rank_of(text, known) for text in texts]
        program = _program(texts[ranks.index(max(ranks))])
        found.append(Candidate(one, program, max(ranks)))
    best = max((one.rank for one in found), default=0)
    if not best:
        raise _no_training(statements, path)
    return [one for one in found if one.rank == best]


def _without_itself(assignment: Assignment, known: Mapping[str, str]) -> str:
    """Return the value of an assignment with the value before in the place of its own name."""
    name = assignment.name
    before = known.get(name, "")
    return VARIABLE.sub(
        lambda found: before if name in found.groups() else found[0], assignment.value
    )


def most_likely(candidates: Sequence[Candidate]) -> Candidate:
    """Return the last candidate, if possible one with the name of a training."""
    named = [one for one in candidates if TRAINS.search(one.program)]
    return (named or candidates)[-1]


def _program(text: str) -> str:
    """Return the script or the module in a command, or an empty string."""
    words = re.split(r"[\s'\"]+", text)
    for before, word in pairwise(["", *words]):
        is_module = before == "-m" and word not in launcher.LAUNCHER_MODULES
        if is_module or SCRIPT.fullmatch(word):
            return word
    return ""


def _require_whole(statements: Sequence[Statement], path: str) -> None:
    """Raise SpecError for a training that ends at a backslash with a space after it."""
    for one in statements:
        if not one.is_readable and one.text.endswith("\\") and _mentions(one.text):
            raise SpecError(
                f"{path}: line {one.line}: a space after the backslash at the end of a line ends "
                "the command there; remove the space"
            )


def _no_training(statements: Sequence[Statement], path: str) -> SpecError:
    block = next((one for one in statements if not one.is_readable and _mentions(one.text)), None)
    if block:
        return SpecError(
            f"{path}: line {block.line}: the command that trains is in a loop, a condition, a "
            "function or a here-document, which ddpjob convert cannot read; write it by itself"
        )
    steps = [one for one in statements if one.is_readable and one.words[0] == "srun"]
    if steps:
        return SpecError(
            f"{path}: line {steps[-1].line}: srun starts a program that ddpjob convert does not "
            "know; write torchrun or python and the script in its place"
        )
    return SpecError(
        f"{path}: has no line that starts torchrun or python; write the command that starts the "
        "training"
    )


def _with_elements(text: str, arrays: Mapping[str, str]) -> str:
    return expand_arrays(text, lambda name: arrays.get(name, ""))


def _mentions(text: str) -> bool:
    return any(LAUNCH.fullmatch(word) for word in re.split(r"[\s'\"=]+", text))


def rank_of(text: str, values: Mapping[str, str]) -> int:
    """Return a rank for how likely a command is the training. 0 means it is not.

    `values` are for the text of a shell in it.
    """
    words, _ = without_redirections(split_words(text))
    while words and (ASSIGNMENT.fullmatch(words[0]) or is_prefix(words[0])):
        words = split_prefix(words)[1] if is_prefix(words[0]) else words[1:]
    if not words:
        return 0
    program = words[0].rpartition("/")[2]
    if program == "eval":
        inner = read_shell(unmark(" ".join(words[1:])))
        return max((rank_of(one, values) for each in inner for one in each.commands), default=0)
    shell_text = _text_of_shell(words)
    if shell_text:
        parts = CHAINED.split(expand(unmark(shell_text), values))
        starts = any(_mentions(one) and not NO_TRAINING.search(one) for one in parts)
    elif NO_TRAINING.search(text):
        return 0
    else:
        starts = any(LAUNCH.fullmatch(word) or SCRIPT.fullmatch(word) for word in words[1:])
    if program == "srun":
        return 4 if starts else 0
    if re.fullmatch(f"{SHELLS}|{CONTAINERS}|{SHIFTER}", program):
        return RANK_OF_LAUNCHERS if starts else 0
    if program.startswith("python"):
        return RANK_OF_LAUNCHERS if "torch.distributed" in text else 2
    if LAUNCH.fullmatch(program):
        return RANK_OF_LAUNCHERS
    return 2 if SCRIPT.fullmatch(program) or (re.fullmatch(WRAPPERS, program) and starts) else 0


def _text_of_shell(words: Sequence[str]) -> str:
    """Return the word after the option -c of a shell in a command, or an empty string."""
    rest = list(words)
    while rest and not re.fullmatch(rf"(.*/)?({SHELLS})", rest[0]):
        rest.pop(0)
    for option, word in pairwise(rest[1:]):
        if not option.startswith("-"):
            break
        if re.fullmatch(r"-\w*c", option):
            return word
    return ""


def is_assignment(words: Sequence[str]) -> bool:
    return bool(words) and (words[0] in EXPORTS or all(map(ASSIGNMENT.fullmatch, words)))
