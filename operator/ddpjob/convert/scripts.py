"""Convert a shell script into fields of a DDPJob: the training command, variables, and the rest.

Lines before the training may become `spec.setup`. Lines without a use in a pod become remarks.
"""

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpjob.convert.bash import bash_syntax, run_by_bash
from ddpjob.convert.chains import is_test, join_chains
from ddpjob.convert.draft import reason_against_variable
from ddpjob.convert.folders import MOVES, Folders
from ddpjob.convert.launch import SHELLS, Launch, literals, read_command
from ddpjob.convert.shell import (
    ARRAY,
    ASSIGNMENT,
    ELEMENTS,
    HERE_DOCUMENT,
    VARIABLE,
    Statement,
    expand,
    expand_command,
    expand_known,
    has_substitution,
    is_substitution,
    read_shell,
    split_words,
    without_redirections,
)
from ddpjob.convert.trainings import (
    EXPORTS,
    LINE_END,
    find_trainings,
    is_assignment,
    most_likely,
    rank_of,
)
from ddpjob.core.api.readers import SpecError, quoted

# A function as sent by Kubeflow's SDK. Its `read` fails, so it must not be in a setup.
FUNCTION_OF_SDK = re.compile(
    r"read -r -d '' (\w+) *<< *(\w+)\n(.*?)\n\2\s*\n\s*printf \"%s\" \"?\$\1\"? > *(\S+)",
    re.DOTALL,
)

# The current folder. A pod begins in the working directory, as the script did.
CURRENT_FOLDER = re.compile(r"\$\(pwd\)|`pwd`|\$\{PWD\}|\$PWD\b")
USED = re.compile(r"\$\{?[!#]?([A-Za-z_]\w*)")

# A variable set in a loop, a condition or a function.
SET_IN_BLOCK = re.compile(
    r"(?:^|[\s;&|({])"
    r"(?:(export\s+)?([A-Za-z_]\w*)\+?=(?!=)|(?:for|select|read)\s+(?:-\w+\s+)*([A-Za-z_]\w*))"
)

# Commands in a block with an effect on the script after it.
MOVE_IN_BLOCK = re.compile(r"(?:^|[\n;&|{]|\b(?:then|do|else)\s)\s*(?:cd|pushd|popd)\b")
EXIT_IN_BLOCK = re.compile(r"(?:^|[\n;&|{]|\b(?:then|do|else)\s)\s*exit(?:\s+0)?\s*(?:[\n;&|}]|$)")

# The reason to drop a statement, and what to do instead, by its program.
Reasons = Mapping[str, tuple[str, str]]

PRINTS = "it only prints"

# Lines without a meaning in a pod, for every kind of script.
EVERYWHERE: Reasons = {
    "set|shopt": ("setup ends at the first command that fails, and nothing else reads it", ""),
    "echo|printf|env|date|hostname|pwd|ls|which|nvidia-smi|free|df|cat": (PRINTS, ""),
    "ulimit": ("the runtime of the containers sets the limits of a process", ""),
    "wait|sleep": ("the operator waits for the processes", ""),
    "true|:": ("it does nothing", ""),
    "exit": ("a pod ends when its processes do, with their exit code", ""),
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
ONLY_AFTER_FAILURE = "the training began only after its failure; in a DDPJob it always begins"
ONLY_A_SHELL = "only a shell knows the value"
ANOTHER_TRAINING = "it could be the training too"
OUTPUT = "the agent reads the output of each rank; ddpjob logs prints it"


@dataclass
class Script:
    """A script while it is read.

    - `reasons`: why lines are dropped, by their program. `keeps_rest`: other lines before the
      training become the setup; otherwise they are dropped for `rest`.
    - `setup`: the lines of the setup. `definitions`: lines that set the variables of the shell, for
      a line of the setup with such a variable. `may_end_false`: the last one may be a failed test.
    - `folders`: the folder of the script. `moves`: lines with `cd` for the next line of the setup.
    - `values`: variables of the shell without an export. `arrays`: elements of arrays, as text.
    """

    launch: Launch
    reasons: Reasons = field(default_factory=lambda: EVERYWHERE)
    keeps_rest: bool = True
    rest: tuple[str, str] = ("", "")
    setup: list[str] = field(default_factory=list)
    definitions: dict[str, str] = field(default_factory=dict)
    moves: list[str] = field(default_factory=list)
    may_end_false: bool = False
    values: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, str] = field(default_factory=dict)
    folders: Folders = field(init=False)

    def __post_init__(self) -> None:
        self.folders = Folders(self.launch.draft.trainer)

    def read(self, text: str) -> None:
        """Read all statements of a text. Raises SpecError if none of them trains."""
        statements = read_shell(FUNCTION_OF_SDK.sub(r"cat > \4 << \2\n\3\n\2\n", text))
        candidates = find_trainings(statements, self.launch.path, self.known)
        chosen = most_likely(candidates)
        apart = [one.statement for one in candidates if one.starts_processes or one is chosen]
        for statement in join_chains(statements, apart):
            if statement == chosen.statement:
                self._note_others(statement, len(candidates))
                self._train(statement)
            elif statement in apart:
                self.drop(statement, ANOTHER_TRAINING)
            else:
                self._other(statement, is_after=statement.span > chosen.statement.span)
        self._set_setup()

    @property
    def known(self) -> Mapping[str, str]:
        """Return the known values of variables. Those of the script come before others."""
        return {**self.launch.values, **self.values}

    def drop(self, statement: Statement, why: str, instead: str = "") -> None:
        """Remark on a dropped statement."""
        where = f"{self.launch.path}: line {statement.line}"
        self.launch.draft.drop(where, statement.text, why, instead)

    # The training

    def _note_others(self, statement: Statement, count: int) -> None:
        if count == 1:
            return
        self.launch.draft.note(
            self.launch.path,
            f"{count} commands could be the training; that of line {statement.line} was taken, "
            f"{quoted(statement.text)}",
            "remove the others, or convert each of them by itself",
            is_first=True,
        )

    def _train(self, statement: Statement) -> None:
        position = max(
            range(len(statement.commands)), key=lambda at: rank_of(self._text(statement, at))
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
        self.launch.values = self.known
        read_command(self.launch, words)
        self._enter_folder()

    def _text(self, statement: Statement, position: int) -> str:
        """Return a command of a pipeline, with the variables of the shell replaced.

        Variables of the pods with spaces are replaced too, because their words must be split.
        """
        with_spaces = {
            key: text for key, text in literals(self.launch.draft).items() if " " in text
        }
        text = ELEMENTS.sub(self._elements, statement.commands[position])
        return self._in_folder(expand_command(text, {**with_spaces, **self.known}))

    def _in_folder(self, text: str) -> str:
        """Return a text with the current folder as a path from the working directory."""
        return CURRENT_FOLDER.sub(lambda _: self.folders.folder or ".", text)

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
        folder = self.folders.folder
        args = draft.spec.get("args", [])
        if not folder or not args or args[0].startswith(("/", "-")):
            return
        args[0] = posixpath.join(folder, args[0])
        draft.note(
            f"{self.launch.path}: cd {folder}",
            "the script is started by its path in this folder; the working directory stays that of "
            "the image",
            f"set workingDir of the container trainer, if the script needs {folder}",
        )

    # Other lines

    def _other(self, statement: Statement, *, is_after: bool) -> None:
        if statement.end == "||" and not is_after:
            self.drop(statement, ONLY_AFTER_FAILURE)
            return
        if not statement.is_readable:
            self._unreadable(statement, is_after=is_after)
            return
        array = ARRAY.fullmatch(statement.text)
        if array:
            self._assign_array(statement, *array.groups())
            return
        words = statement.words
        if is_assignment(words):
            self._assign_all(statement, words)
            return
        is_move = words[0].rpartition("/")[2] in MOVES and not is_after
        reason = self._reason(statement)
        if is_move and self._is_below(words[1:]):
            self._change_folder(statement)
        elif reason:
            self.drop(statement, *reason)
            if is_move:
                self.folders.forget_last()
        elif statement.end == "&":
            self.drop(statement, BACKGROUND, SIDECAR)
        elif is_after:
            self.drop(statement, AFTERWARDS, AT_THE_END)
        elif is_move:
            self._change_folder(statement)
        elif self.keeps_rest or _installs(words):
            self._add_to_setup(statement)
        else:
            self.drop(statement, *self.rest)

    def _reason(self, statement: Statement) -> tuple[str, str] | None:
        """Return why a line has no use in a pod, and what to do instead; None if it may have one.

        A chain has no use if none of its commands has one, except for its tests.
        """
        if statement.parts:
            reasons = [self._reason(one) for one in statement.parts if not is_test(one)]
            return reasons[0] if all(reasons) and reasons else None
        if not statement.is_readable:
            return None
        program = statement.words[0].rpartition("/")[2]
        makes_a_file = statement.writes_a_file or len(statement.commands) > 1
        for programs, reason in self.reasons.items():
            if re.fullmatch(programs, program):
                return None if reason[0] == PRINTS and makes_a_file else reason
        return None

    def _unreadable(self, statement: Statement, *, is_after: bool) -> None:
        """Keep a block or a chain whole in the setup, or drop it."""
        reason = self._reason(statement)
        if reason:
            self.drop(statement, *reason)
        elif statement.end == "&":
            self.drop(statement, BACKGROUND, SIDECAR)
        elif not is_after and (self.keeps_rest or self._is_installation(statement)):
            self._add_to_setup(statement)
            self._note_block(statement)
        else:
            self.drop(statement, UNREADABLE, "write the line that is needed by itself")
        if not is_after:
            self._forget_variables(statement)

    def _is_installation(self, statement: Statement) -> bool:
        """Return True for a chain of tests, installations of packages and commands of no use."""
        return bool(statement.parts) and all(
            is_test(one) or self._reason(one) or (one.is_readable and _installs(one.words))
            for one in statement.parts
        )

    def _note_block(self, statement: Statement) -> None:
        """Note what a block in the setup does to the script, but not to a DDPJob."""
        where = f"{self.launch.path}: line {statement.line}"
        if statement.text.startswith("("):
            return
        if MOVE_IN_BLOCK.search(statement.text):
            self.launch.draft.note(
                where,
                "it may change the folder for the setup, not for the script",
                "set workingDir of the container trainer",
            )
        if EXIT_IN_BLOCK.search(statement.text):
            self.launch.draft.note(
                where, "exit 0 ends only the setup, and the training starts after it"
            )

    def _is_below(self, words: Sequence[str]) -> bool:
        """Return True if a change of the folder stays below the working directory."""
        if not words:
            return bool(self.folders.stack)
        return self.folders.is_below(self._target(words))

    def _target(self, words: Sequence[str]) -> str:
        return expand(self.launch.resolve(words[0]), self.values) if words else "~"

    def _change_folder(self, statement: Statement) -> None:
        is_first = not self.setup and not self.moves
        target = self._target(statement.words[1:])
        line = self.folders.change(statement, target, self.setup, is_first=is_first)
        if line:
            self.moves += self._with_definitions(line)

    # The setup

    def _add_to_setup(self, statement: Statement) -> None:
        """Add a line to the setup, with the folder and the variables of the shell before it."""
        self.setup += [*self.moves, *self._with_definitions(statement.text)]
        self.moves = []
        # A test in a block may fail without an end of the script.
        self.may_end_false = (
            not statement.is_readable and statement.end != "&&" and "&&" in statement.text
        )

    def _with_definitions(self, line: str) -> list[str]:
        """Return a line of the setup after those that set its variables."""
        found = []
        for name in [*USED.findall(line), *_names_set_in(line)]:
            definition = self.definitions.get(name)
            if definition:
                rest = self.definitions.items()
                self.definitions = {key: text for key, text in rest if text != definition}
                found += self._with_definitions(definition)
        return [*found, expand_known(line, self.launch.values)]

    def _set_setup(self) -> None:
        """Set spec.setup. /bin/sh runs it, so bash is started for syntax of its own."""
        # The exit code of the setup is that of its last line.
        text = "\n".join([*self.setup, *(["true"] if self.may_end_false else [])])
        syntax = bash_syntax(text)
        if syntax:
            self.launch.draft.note(
                f"{self.launch.path}: setup",
                f"the setup has syntax of bash, {quoted(syntax)}, so it starts bash, which the "
                "image must have",
            )
        if text:
            text = run_by_bash(text) if syntax else text
            self.launch.draft.set("setup", text, self.launch.path)

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
            self.definitions[name] = statement.text
            return
        before = self.arrays.get(name, "") if plus else ""
        self.arrays[name] = f"{before} {LINE_END.sub(' ', elements)}".strip()
        self.definitions[name] = f"{name}=({self.arrays[name]})"

    def _forget_variables(self, statement: Statement) -> None:
        """Forget the values of variables set in a block. Remark on those meant for the script."""
        where = f"{self.launch.path}: line {statement.line}"
        exported = literals(self.launch.draft)
        for name, is_export in _names_set_in(statement.text).items():
            self.values.pop(name, None)
            self.arrays.pop(name, None)
            before = self.definitions.get(name)
            if not self.keeps_rest:
                self.definitions[name] = f"{before}\n{statement.text}" if before else statement.text
            if name in exported:
                why = f"the block may change it; the pods have {quoted(exported[name])}"
                self.launch.draft.note(f"{where} {name}", why, f"set {name} in spec.env")
            elif is_export:
                why = "the block may export it; the pods do not have it"
                self.launch.draft.note(f"{where} {name}", why, f"set {name} in spec.env")

    def _assign(self, statement: Statement, word: str, *, is_exported: bool) -> None:
        name, value = ASSIGNMENT.fullmatch(word).groups()  # type: ignore[union-attr]
        where = f"{self.launch.path}: line {statement.line}"
        value = self._in_folder(expand(value, {**literals(self.launch.draft), **self.known}))
        reason = reason_against_variable(name)
        if reason:
            self.launch.draft.drop(f"{where} {name}", value, reason)
            return
        self.values.pop(name, None)
        names = [found[1] or found[2] for found in VARIABLE.finditer(value)]
        if is_exported and not names and not has_substitution(value):
            self.launch.draft.add_variable(name, value, where)
            return
        self.definitions[name] = statement.text
        # A command in it is read nevertheless, with its known parts.
        if name not in names and not is_substitution(value):
            self.values[name] = value
        # One with several words is a command or arguments, and no variable for the script.
        instead = "" if " " in value.strip() else f"set {name} in spec.env"
        if has_substitution(value):
            self.drop(statement, ONLY_A_SHELL, instead)
        elif is_exported:
            self.drop(statement, "a variable in it has no known value", instead)


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


def _names_set_in(block: str) -> dict[str, bool]:
    """Return the variables set in a block, and whether it exports them."""
    if block.startswith("(") or HERE_DOCUMENT.search(block):
        return {}
    found: dict[str, bool] = {}
    for export, assigned, read in SET_IN_BLOCK.findall(block):
        name = assigned or read
        found[name] = found.get(name, False) or bool(export)
    return found


def _installs(words: Sequence[str]) -> bool:
    """Return True for an installation of Python packages."""
    text = " ".join(words)
    return (
        re.match(r"(\S*/)?(pip[0-9.]*|uv pip|python[0-9.]* -m pip)\s+install\b", text) is not None
    )
