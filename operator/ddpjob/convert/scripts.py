"""Convert a shell script into fields of a DDPJob: the training command, variables, and the rest.

Lines before the training may become `spec.setup`. Lines without a use in a pod become remarks.
"""

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpjob.convert.draft import reason_against_variable
from ddpjob.convert.launch import (
    LAUNCH,
    SCRIPT,
    SHELLS,
    WRAPPERS,
    Launch,
    literals,
    read_command,
)
from ddpjob.convert.shell import (
    ARRAY,
    ASSIGNMENT,
    ELEMENTS,
    VARIABLE,
    Statement,
    expand,
    has_substitution,
    read_shell,
    split_words,
    without_redirections,
)
from ddpjob.core.api.readers import SpecError, quoted

# Commands of python other than a training.
NO_TRAINING = re.compile(
    r"(^|[\s/])python[0-9.]*\s+(-c|-V|--version|-m\s+(pip|venv|ensurepip)|(\S*/)?setup\.py)(\s|$)"
)

# A function as sent by Kubeflow's SDK. Its `read` fails, so it must not be in a setup.
FUNCTION_OF_SDK = re.compile(
    r"read -r -d '' (\w+) *<< *(\w+)\n(.*?)\n\2\s*\n\s*printf \"%s\" \"?\$\1\"? > *(\S+)",
    re.DOTALL,
)

LINE_END = re.compile(r"\s*\n\s*")
# Programs before a command, and programs to run a command in a container.
BEFORE_A_COMMAND = ("exec", "time", "nohup", "env")
CONTAINERS = "apptainer|singularity"

EXPORTS = ("export", "declare", "typeset", "readonly")

# The reason to drop a statement, and what to do instead, by its program.
Reasons = Mapping[str, tuple[str, str]]

PRINTS = "it only prints"

# Lines without a meaning in a pod, for every kind of script.
EVERYWHERE: Reasons = {
    "set|shopt": ("setup ends at the first command that fails, and nothing else reads it", ""),
    "echo|printf|env|date|hostname|pwd|ls|which|nvidia-smi|free|df|cat": (PRINTS, ""),
    "ulimit": ("the runtime of the containers sets the limits of a process", ""),
    "wait|sleep|true|:|exit": ("the operator waits for the processes", ""),
    "trap": ("torchrun gets the signals", "handle SIGTERM in the script"),
    "unset": ("the pods have only the variables of the job and of the image", ""),
    "source|[.]|conda|mamba|micromamba|activate": (
        "what it changes in the environment does not reach torchrun",
        "use an image that has the environment, or set torchrun.command to the torchrun in it",
    ),
    "module|ml|spack": (
        "modules are programs of the Slurm cluster",
        "use an image that has what the modules give",
    ),
}

BACKGROUND = "it ran in the background"
SIDECAR = "a sidecar in podTemplate.spec.containers"
AFTERWARDS = "it ran after the training"
AT_THE_END = "do it at the end of the script, on rank 0"
UNREADABLE = "ddpjob convert does not read loops, conditions, functions and here-documents"
ONLY_A_SHELL = "only a shell knows the value"
OUTPUT = "the agent reads the output of each rank; ddpjob logs prints it"


@dataclass
class Script:
    """A script while it is read.

    - `reasons`: why lines are dropped, by their program. `keeps_rest`: other lines before the
      training become the setup; otherwise they are dropped for `rest`.
    - `setup`: the lines of the setup. `folder`: the part of the working directory added by `cd`.
    - `values`: variables of the shell without an export. `arrays`: elements of arrays, as text.
    """

    launch: Launch
    reasons: Reasons = field(default_factory=lambda: EVERYWHERE)
    keeps_rest: bool = True
    rest: tuple[str, str] = ("", "")
    setup: list[str] = field(default_factory=list)
    folder: str = ""
    values: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, str] = field(default_factory=dict)

    def read(self, text: str) -> None:
        """Read all statements of a text. Raises SpecError if none of them trains."""
        statements = read_shell(FUNCTION_OF_SDK.sub(r"cat > \4 << \2\n\3\n\2\n", text))
        index = _index_of_training(statements, self.launch.path, self.values)
        for number, statement in enumerate(statements):
            if number == index:
                self._train(statement)
            else:
                self._other(statement, is_after=number > index)
        if self.setup:
            self.launch.draft.set("setup", "\n".join(self.setup), self.launch.path)

    def drop(self, statement: Statement, why: str, instead: str = "") -> None:
        """Remark on a dropped statement."""
        where = f"{self.launch.path}: line {statement.line}"
        self.launch.draft.drop(where, statement.text, why, instead)

    # The training

    def _train(self, statement: Statement) -> None:
        position = max(
            range(len(statement.commands)), key=lambda at: _rank(self._text(statement, at))
        )
        for at, command in enumerate(statement.commands):
            if at != position:
                self._drop_part(statement, command)
        text = self._text(statement, position)
        words, redirections = without_redirections(split_words(text))
        for redirection in redirections:
            where = f"{self.launch.path}: line {statement.line}"
            self.launch.draft.drop(where, redirection, OUTPUT)
        while words and ASSIGNMENT.fullmatch(words[0]):
            self._assign(statement, words.pop(0), is_exported=True)
        launch = self.launch
        launch.values = {**launch.values, **self.values}
        read_command(launch, words)
        self._enter_folder()

    def _text(self, statement: Statement, position: int) -> str:
        """Return a command of a pipeline, with the variables of the shell replaced.

        Variables of the pods with spaces are replaced too, because their words must be split.
        """
        with_spaces = {
            key: text for key, text in literals(self.launch.draft).items() if " " in text
        }
        text = ELEMENTS.sub(self._elements, statement.commands[position])
        return expand(text, {**with_spaces, **self.values})

    def _elements(self, found: re.Match[str]) -> str:
        """Return the elements of an array; none of one without a known value."""
        if found[1] not in self.arrays:
            self.launch.draft.drop(self.launch.path, found[0], ONLY_A_SHELL)
        return self.arrays.get(found[1], "")

    def _drop_part(self, statement: Statement, command: str) -> None:
        where = f"{self.launch.path}: line {statement.line}"
        program = command.split()[0] if command else ""
        why = OUTPUT if program == "tee" else "a pipeline cannot be read, except for the training"
        self.launch.draft.drop(where, command, why)

    def _enter_folder(self) -> None:
        """Add the folder of `cd` to the script's path, if it cannot be the working directory."""
        draft = self.launch.draft
        args = draft.spec.get("args", [])
        if not self.folder or not args or args[0].startswith(("/", "-")):
            return
        args[0] = posixpath.join(self.folder, args[0])
        draft.note(
            f"{self.launch.path}: cd {self.folder}",
            "the script is started by its path in this folder; the working directory stays that of "
            "the image",
            f"set workingDir of the container trainer, if the script needs {self.folder}",
        )

    # Other lines

    def _other(self, statement: Statement, *, is_after: bool) -> None:
        if not statement.is_readable:
            if self.keeps_rest and not is_after:
                self.setup.append(expand(statement.text, self.values))
            else:
                self.drop(statement, UNREADABLE, "write the line that is needed by itself")
            return
        array = ARRAY.fullmatch(statement.text)
        if array:
            self._assign_array(statement, *array.groups())
            return
        words = statement.words
        if _is_assignment(words):
            self._assign_all(statement, words)
            return
        program = words[0].rpartition("/")[2]
        reason = next(
            (self.reasons[key] for key in self.reasons if re.fullmatch(key, program)), None
        )
        makes_a_file = statement.writes_a_file or len(statement.commands) > 1
        if reason and not (reason[0] == PRINTS and makes_a_file):
            self.drop(statement, *reason)
        elif statement.end == "&":
            self.drop(statement, BACKGROUND, SIDECAR)
        elif is_after:
            self.drop(statement, AFTERWARDS, AT_THE_END)
        elif program in ("cd", "pushd"):
            self._change_folder(words)
        elif self.keeps_rest or _installs(words):
            self.setup.append(expand(statement.text, self.values))
        else:
            self.drop(statement, *self.rest)

    def _change_folder(self, words: Sequence[str]) -> None:
        trainer = self.launch.draft.trainer
        target = self.launch.resolve(words[1]) if len(words) > 1 else "~"
        folder = posixpath.normpath(posixpath.join(trainer.get("workingDir", ""), target))
        # The setup may make the folder, and a working directory is there before the setup.
        is_known = folder.startswith("/") and "$" not in folder and not self.setup
        if is_known and not self.folder:
            trainer["workingDir"] = folder
        else:
            self.folder = posixpath.join(self.folder, target)

    # Variables

    def _assign_all(self, statement: Statement, words: Sequence[str]) -> None:
        is_exported = words[0] in EXPORTS
        for word in words[1:] if is_exported else words:
            if ASSIGNMENT.fullmatch(word):
                self._assign(statement, word, is_exported=is_exported)
            # `export NAME` exports what was assigned before.
            elif word in self.values:
                self._assign(statement, f"{word}={self.values[word]}", is_exported=True)

    def _assign_array(self, statement: Statement, name: str, plus: str, elements: str) -> None:
        """Keep the elements of an array, or remark on one made by a command such as scontrol."""
        words = split_words(elements)
        if len(words) == 1 and has_substitution(words[0]):
            self.drop(statement, ONLY_A_SHELL)
            return
        before = self.arrays.get(name, "") if plus else ""
        self.arrays[name] = f"{before} {LINE_END.sub(' ', elements)}".strip()

    def _assign(self, statement: Statement, word: str, *, is_exported: bool) -> None:
        name, value = ASSIGNMENT.fullmatch(word).groups()  # type: ignore[union-attr]
        where = f"{self.launch.path}: line {statement.line}"
        value = expand(value, {**literals(self.launch.draft), **self.values})
        reason = reason_against_variable(name)
        if reason:
            self.launch.draft.drop(f"{where} {name}", value, reason)
        elif has_substitution(value):
            self.drop(statement, ONLY_A_SHELL, f"set {name} in spec.env")
        elif not is_exported:
            self.values[name] = value
        elif VARIABLE.search(value):
            self.drop(statement, "a variable in it has no known value", f"set {name} in spec.env")
        else:
            self.launch.draft.add_variable(name, value, where)


def read_shell_command(launch: Launch, words: list[str]) -> None:
    """Read `bash -c TEXT`. Raises SpecError for a shell with a script."""
    for index, word in enumerate(words[1:], 1):
        is_option = word.startswith("-") and not word.startswith("--")
        if is_option and word.endswith("c") and index + 1 < len(words):
            rest = words[index + 2 :]
            if rest:
                launch.draft.drop(launch.path, rest, "they are arguments of the shell's text")
            Script(launch).read(words[index + 1])
            return
    raise SpecError(
        f"{launch.path}: {quoted(' '.join(words))} runs a script of the image, whose lines are not "
        "here; write its line with torchrun or python in its place"
    )


# How a pod starts a shell. `Script` reads such commands within a script too.
SHELL_PROGRAMS: Sequence[tuple[str, Callable[[Launch, list[str]], None]]] = (
    (SHELLS, read_shell_command),
)


def _index_of_training(
    statements: Sequence[Statement], path: str, values: Mapping[str, str]
) -> int:
    """Return the index of the training: the last one of the best statements. Raises SpecError."""
    known = dict(values)
    arrays: dict[str, str] = {}
    ranks = []
    for one in statements:
        array = ARRAY.fullmatch(one.text)
        if array:
            arrays[array[1]] = LINE_END.sub(" ", array[3])
            ranks.append(0)
            continue
        for word in one.words if one.is_readable else ():
            assignment = ASSIGNMENT.fullmatch(word)
            if assignment:
                known[assignment[1]] = assignment[2]
        is_candidate = one.is_readable and not _is_assignment(one.words)
        ranks.append(
            max(_rank(expand(_with_elements(text, arrays), known)) for text in one.commands)
            if is_candidate
            else 0
        )
    best = max(ranks, default=0)
    if best:
        return max(index for index, rank in enumerate(ranks) if rank == best)
    block = next((one for one in statements if not one.is_readable and _mentions(one.text)), None)
    if block:
        raise SpecError(
            f"{path}: line {block.line}: the command that trains is in a loop, a condition or a "
            "function, which ddpjob convert cannot read; write it by itself"
        )
    raise SpecError(
        f"{path}: has no line that starts torchrun or python; write the command that starts the "
        "training"
    )


def _with_elements(text: str, arrays: Mapping[str, str]) -> str:
    return ELEMENTS.sub(lambda found: arrays.get(found[1], ""), text)


def _mentions(text: str) -> bool:
    return any(LAUNCH.fullmatch(word) for word in re.split(r"[\s'\"]+", text))


def _rank(text: str) -> int:
    """Return a rank for how likely a command is the training. 0 means it is not."""
    words = split_words(text)
    while words and (ASSIGNMENT.fullmatch(words[0]) or words[0] in BEFORE_A_COMMAND):
        words = words[1:]
    if not words or NO_TRAINING.search(text):
        return 0
    program = words[0].rpartition("/")[2]
    starts = any(LAUNCH.fullmatch(word) or SCRIPT.fullmatch(word) for word in words[1:])
    # The text of a shell is one word.
    starts = starts or (re.search(r"\s-\w*c\s", text) is not None and _mentions(words[-1]))
    if program == "srun":
        return 4 if starts else 0
    if re.fullmatch(f"{SHELLS}|{CONTAINERS}", program):
        return 3 if starts else 0
    if program.startswith("python"):
        return 3 if "torch.distributed" in text else 2
    if LAUNCH.fullmatch(program):
        return 3
    return 2 if SCRIPT.fullmatch(program) or (re.fullmatch(WRAPPERS, program) and starts) else 0


def _is_assignment(words: Sequence[str]) -> bool:
    return bool(words) and (words[0] in EXPORTS or all(map(ASSIGNMENT.fullmatch, words)))


def _installs(words: Sequence[str]) -> bool:
    """Return True for an installation of Python packages."""
    text = " ".join(words)
    return (
        re.match(r"(\S*/)?(pip[0-9.]*|uv pip|python[0-9.]* -m pip)\s+install\b", text) is not None
    )
