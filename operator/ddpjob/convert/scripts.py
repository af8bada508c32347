"""Convert a shell script into fields of a DDPJob: the training command, variables, and the rest.

Lines before the training may become `spec.setup`. Lines without a use in a pod become remarks.
"""

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpjob.convert.bash import bash_syntax, run_by_bash
from ddpjob.convert.chains import chooses, is_test, join_chains, may_fail
from ddpjob.convert.expansions import as_started, without_defaults
from ddpjob.convert.folders import MOVES, Folders
from ddpjob.convert.here_documents import rewrite
from ddpjob.convert.launch import SHELLS, Launch, literals, read_command
from ddpjob.convert.marks import unmark
from ddpjob.convert.programs import OTHER_PROGRAMS
from ddpjob.convert.settle import NO_SHELL
from ddpjob.convert.shell import (
    ARRAY,
    ASSIGNMENT,
    VARIABLE,
    Statement,
    expand,
    expand_arrays,
    expand_command,
    read_shell,
    split_words,
    without_redirections,
)
from ddpjob.convert.trainings import find_trainings, is_assignment, most_likely, rank_of
from ddpjob.convert.variables import HOME, NO_HOME, SETS, WRITE_PATH, Variables
from ddpjob.core.api.readers import SpecError, quoted

# The current folder. A pod begins in the working directory, as the script did.
CURRENT_FOLDER = re.compile(r"\$\(pwd\)|`pwd`|\$\{PWD\}|\$PWD\b")

# Words that only a shell replaces: names of files, several words, the number of its process.
SHELL_WORDS = re.compile(r"\*|(?<!\$)\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}|\$\$")

# All arguments of the script.
ALL_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*]\}")

# An option of a shell to stop at the first failure, and a first line with it.
STOPS = re.compile(r"-[a-zA-Z]*e[a-zA-Z]*|errexit")
FIRST_LINE = re.compile(r"#!.*\s-[a-zA-Z]*e[a-zA-Z]*\s*$", re.MULTILINE)

# `${NAME:=default}` sets the variable.
DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?=([^{}]*)\}")

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
    "scontrol|sinfo|squeue|scancel|sacct|sbcast": ("it is a command of Slurm", ""),
    "srun": ("it is a step beside the training", "a job of its own, or spec.setup"),
    "module|ml|spack": (
        "modules are programs of the Slurm cluster",
        "use an image that has what the modules give",
    ),
}

UNKNOWN_COMMAND = (
    "its command is not known, and what it changes in the environment does not reach torchrun",
    "write the command",
)
BACKGROUND = "it ran in the background"
SIDECAR = "a sidecar in podTemplate.spec.containers"
AFTERWARDS = "it ran after the training"
AT_THE_END = "do it at the end of the script, on rank 0"
UNREADABLE = "ddpjob convert does not read loops, conditions, functions and here-documents"
CHOOSES = "it chose one of two trainings, and a DDPJob runs the same one on all nodes"
ONLY_AFTER_FAILURE = "the training began only after its failure; in a DDPJob it always begins"
ANOTHER_TRAINING = "it could be the training too"
NO_INPUT = ("a process of a DDPJob has no input", "read the file in the script")
ARGUMENTS = ("the arguments of the script are not here", "spec.args")
OUTPUT = "the agent reads the output of each rank; ddpjob logs prints it"


@dataclass
class Script:
    """A script while it is read.

    - `reasons`: why lines are dropped, by their program. `keeps_rest`: other lines before the
      training become the setup; otherwise they are dropped for `rest`.
    - `setup`: the lines of the setup. `may_end_false`: the last one may be a failed test.
    - `stops`: the script ends at the first failure, as its setup does. `ends_early`: only the setup
      does.
    - `folders`: the folder of the script. `moves`: lines with `cd` for the next line of the setup.
    """

    launch: Launch
    reasons: Reasons = field(default_factory=lambda: EVERYWHERE)
    keeps_rest: bool = True
    rest: tuple[str, str] = ("", "")
    setup: list[str] = field(default_factory=list)
    moves: list[str] = field(default_factory=list)
    may_end_false: bool = False
    stops: bool = False
    ends_early: bool = False
    folders: Folders = field(init=False)
    variables: Variables = field(init=False)

    def __post_init__(self) -> None:
        self.folders = Folders(self.launch.draft.trainer)
        self.variables = Variables(self.launch, self._in_folder)

    def read(self, text: str) -> None:
        """Read all statements of a text. Raises SpecError if none of them trains."""
        self.launch.is_in_script = True
        self.stops = self.stops or FIRST_LINE.match(text) is not None
        statements = read_shell(rewrite(text))
        known = {**literals(self.launch.draft), **self.variables.known}
        candidates = find_trainings(statements, self.launch.path, known)
        chosen = most_likely(candidates)
        apart = [one.statement for one in candidates if one.starts_processes or one is chosen]
        joined = join_chains(statements, apart)
        for index, statement in enumerate(joined):
            if chooses(joined[index : index + 3], apart):
                self.drop(statement, CHOOSES)
            elif statement == chosen.statement:
                self._note_others(statement, len(candidates))
                self._train(statement)
            elif statement in apart:
                self.drop(statement, ANOTHER_TRAINING)
            else:
                self._other(statement, is_after=statement.span > chosen.statement.span)
        self._set_setup()
        self.variables.drop_unused()

    def drop(self, statement: Statement, why: str, instead: str = "") -> None:
        """Remark on a dropped statement."""
        self.variables.drop(statement, why, instead)

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
            range(len(statement.commands)),
            key=lambda at: rank_of(self._text(statement, at), self.variables.known),
        )
        for at, command in enumerate(statement.commands):
            if at != position:
                self._drop_part(statement, command)
        text = self._text(statement, position)
        self.variables.note_lost(statement.commands[position], self.variables.lost_words)
        words, redirections = without_redirections(split_words(text))
        for redirection in redirections:
            where = f"{self.launch.path}: line {statement.line}"
            reads = redirection.lstrip("0123456789").startswith("<")
            self.launch.draft.drop(where, redirection, *(NO_INPUT if reads else (OUTPUT,)))
        for word in filter(ALL_ARGUMENTS.fullmatch, words):
            self.launch.draft.drop(self.launch.path, word, *ARGUMENTS)
        words = [word for word in words if not ALL_ARGUMENTS.fullmatch(word)]
        while words and ASSIGNMENT.fullmatch(words[0]):
            self.variables.assign(statement, words.pop(0), is_exported=True)
        self.launch.values = self.variables.known
        working = self.launch.draft.trainer.get("workingDir")
        read_command(self.launch, words)
        # A text of a shell within this one may have gone to another folder.
        if self.launch.draft.trainer.get("workingDir") == working:
            self._enter_folder()
        self._note_expansions()

    def _note_expansions(self) -> None:
        """Note words that a shell would replace by others."""
        for word in self.launch.draft.spec.get("args", ()):
            where = f"{self.launch.path}: {word} in args"
            if HOME.search(word):
                self.launch.draft.note(where, NO_HOME, WRITE_PATH)
            if SHELL_WORDS.search(word):
                self.launch.draft.note(where, *NO_SHELL)
            self.variables.note_lost(word, self.variables.lost)

    def _text(self, statement: Statement, position: int) -> str:
        """Return a command of a pipeline, with the variables of the shell replaced.

        Variables of the pods with spaces are replaced too, because their words must be split.
        """
        text = expand_arrays(statement.commands[position], self.variables.elements)
        variables = self.variables
        text = without_defaults(text, variables.is_set)
        known = {**variables.with_spaces, **variables.known, **variables.lost_words}
        return self._in_folder(expand_command(text, known))

    def _in_folder(self, text: str) -> str:
        """Return a text with the current folder as a path from the working directory."""
        return CURRENT_FOLDER.sub(lambda _: self.folders.folder or ".", text)

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
        if not folder or not args:
            return
        stays = draft.trainer.get("workingDir") or "that of the image"
        what = f"the working directory stays {stays}"
        if not args[0].startswith(("/", "-")):
            args[0] = posixpath.join(folder, args[0])
            what = f"the script is started by its path in this folder; {what}"
        draft.note(
            f"{self.launch.path}: cd {folder}",
            what,
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
        is_array = ARRAY.fullmatch(statement.text) is not None
        words = statement.words
        if is_after and (is_array or is_assignment(words)):
            self.drop(statement, AFTERWARDS)
            return
        if is_array:
            self.variables.assign_array(statement)
            return
        if is_assignment(words):
            self.variables.assign_all(statement, words)
            return
        program = words[0].rpartition("/")[2]
        if program == "unset" and not is_after:
            self.variables.unset(statement, self.reasons[program])
            return
        if program == ":" and not is_after and self._assign_defaults(statement):
            return
        if program == "set" and not is_after and self._set_options(words[1:]):
            return
        if SETS.match(statement.text) and not is_after:
            self.variables.forget(statement, defines=not self.keeps_rest)
        is_move = program in MOVES and not is_after
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

    def _set_options(self, options: Sequence[str]) -> bool:
        """Read `set -e`, `set -a` and their opposites. Return True if there is no other option."""
        opposites = [option.replace("+", "-", 1) for option in options if option.startswith("+")]
        if any(map(STOPS.fullmatch, [*options, *opposites])):
            self.stops = not opposites
        is_on = list(options) in (["-a"], ["-o", "allexport"])
        is_off = list(options) in (["+a"], ["+o", "allexport"])
        self.variables.exports_all = is_on or (self.variables.exports_all and not is_off)
        return is_on or is_off

    def _assign_defaults(self, statement: Statement) -> bool:
        """Read `: ${NAME:=default}`. Return False for another use of `:`."""
        found = [DEFAULT.fullmatch(word) for word in statement.words[1:]]
        for one in filter(None, found):
            name, default = one.groups()
            word = f"{name}=${{{name}:-{default}}}"
            self.variables.assign(statement, word, is_exported=False)
        return any(found)

    def _reason(self, statement: Statement) -> tuple[str, str] | None:
        """Return why a line has no use in a pod, and what to do instead; None if it may have one.

        A chain has no use if none of its commands has one, except for its tests.
        """
        if statement.parts:
            reasons = [self._reason(one) for one in statement.parts if not is_test(one)]
            return reasons[0] if all(reasons) and reasons else None
        if not statement.is_readable:
            return None
        known = {**literals(self.launch.draft), **self.variables.known}
        first = expand(statement.words[0], known)
        if len(statement.words) == 1 and self._is_lost(first):
            return UNKNOWN_COMMAND
        program = first.split()[0].rpartition("/")[2] if first.strip() else ""
        makes_a_file = statement.writes_a_file or len(statement.commands) > 1
        for programs, reason in self.reasons.items():
            if re.fullmatch(programs, program):
                return None if reason[0] == PRINTS and makes_a_file else reason
        return None

    def _is_lost(self, word: str) -> bool:
        """Return True for a variable that neither the setup nor the pods have."""
        found = VARIABLE.fullmatch(word)
        if not found or self.launch.draft.get("envFrom"):
            return False
        name = found[1] or found[2]
        return name not in self.variables.definitions and not self.launch.is_set(name)

    def _unreadable(self, statement: Statement, *, is_after: bool) -> None:
        """Keep a block or a chain whole in the setup, or drop it."""
        reason = self._reason(statement)
        if reason:
            self.drop(statement, *reason)
        elif statement.end == "&":
            self.drop(statement, BACKGROUND, SIDECAR)
        elif is_after and statement.parts:
            self.drop(statement, AFTERWARDS, AT_THE_END)
        elif not is_after and (self.keeps_rest or self._is_installation(statement)):
            self._add_to_setup(statement)
            self._note_block(statement)
        else:
            self.drop(statement, UNREADABLE, "write the line that is needed by itself")
        if not is_after:
            self.variables.forget(statement, defines=not self.keeps_rest)

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
        return expand(self.launch.resolve(words[0]), self.variables.values) if words else "~"

    def _change_folder(self, statement: Statement) -> None:
        is_first = not self.setup and not self.moves
        target = self._target(statement.words[1:])
        line = self.folders.change(statement, target, self.setup, is_first=is_first)
        if line:
            self.moves += self.variables.with_definitions(line)

    # The setup

    def _add_to_setup(self, statement: Statement) -> None:
        """Add a line to the setup, with the folder and the variables of the shell before it."""
        self.setup += [*self.moves, *self.variables.with_definitions(statement.text)]
        self.variables.has_setup = True
        self.moves = []
        # Of `a && training`, the script does not start the training after a failure either. A file
        # of the script is always written.
        writes = statement.text.startswith("cat >")
        if statement.end != "&&" and not self.stops and not writes and may_fail(statement):
            self.ends_early = True
        # A test in a block may fail without an end of the script.
        self.may_end_false = (
            not statement.is_readable and statement.end != "&&" and "&&" in statement.text
        )

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
        if self.ends_early:
            self.launch.draft.note(
                f"{self.launch.path}: setup",
                "it ends at the first command that fails, without a training; the script had no "
                "set -e, and went on",
                "|| true after a command that may fail",
            )
        if text:
            text = run_by_bash(text) if syntax else text
            self.launch.draft.set("setup", text, self.launch.path)


def read_shell_command(launch: Launch, words: list[str]) -> None:
    """Read `bash -c TEXT`. Raises SpecError for a shell with a script."""
    for index, word in enumerate(words[1:], 1):
        is_option = word.startswith("-") and not word.startswith("--")
        if is_option and word.endswith("c") and index + 1 < len(words):
            rest = words[index + 2 :]
            if rest:
                launch.draft.drop(launch.path, rest, "they are arguments of the shell's text")
            stops = any(map(STOPS.fullmatch, words[1 : index + 1]))
            text = unmark(words[index + 1])
            if not launch.is_in_script:
                text = as_started(text, literals(launch.draft))
            _read_text(launch, text, f"{words[0]} -c", stops=stops)
            return
    raise SpecError(
        f"{launch.path}: {quoted(' '.join(words))} runs a script of the image, whose lines are not "
        "here; write its line with torchrun or python in its place"
    )


def read_eval(launch: Launch, words: list[str]) -> None:
    """Read `eval TEXT`: a shell reads the words again, joined."""
    _read_text(launch, unmark(" ".join(words[1:])), "eval", stops=False)


def _read_text(launch: Launch, text: str, program: str, *, stops: bool) -> None:
    """Read the text that a program runs as a script. Remarks name its own lines."""
    path = launch.path
    if launch.is_in_script:
        launch.path = f"{path}: the text of {program}"
    Script(launch, stops=stops).read(text)
    launch.path = path


# How a pod starts a shell. `Script` reads such commands within a script too.
SHELL_PROGRAMS: Sequence[tuple[str, Callable[[Launch, list[str]], None]]] = (
    (SHELLS, read_shell_command),
    ("eval", read_eval),
    *OTHER_PROGRAMS,
)


def _installs(words: Sequence[str]) -> bool:
    """Return True for an installation of Python packages."""
    text = " ".join(words)
    return (
        re.match(r"(\S*/)?(pip[0-9.]*|uv pip|python[0-9.]* -m pip)\s+install\b", text) is not None
    )
