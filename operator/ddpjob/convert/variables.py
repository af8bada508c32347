"""Follow the variables of a shell script: their values, and which of them the pods get."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ddpjob.convert.draft import Remark, reason_against_variable
from ddpjob.convert.expansions import without_defaults
from ddpjob.convert.launch import OWN_GPU, Launch, literals
from ddpjob.convert.shell import (
    ARRAY,
    ELEMENTS,
    HERE_DOCUMENT,
    NO_VALUE,
    VARIABLE,
    Assignment,
    Statement,
    assignment_of,
    expand,
    expand_arrays,
    expand_command,
    expand_known,
    has_only_a_shell,
    has_substitution,
    is_only_a_shell,
    join_elements,
    split_words,
    without_inner_quotes,
)
from ddpjob.convert.trainings import EXPORTS, LINE_END
from ddpjob.core.api.names import RESERVED_PREFIX
from ddpjob.core.api.readers import children, quoted
from ddpjob.core.api.torchrun_flags import advice_on_variable

# The option of declare that exports.
EXPORT_OPTION = re.compile(r"-\w*x\w*")

USED = re.compile(r"\$\{?[!#]?([A-Za-z_]\w*)")

# A variable set in a loop, a condition, a function or a calculation.
SET_IN_BLOCK = re.compile(
    r"(?:^|[\s;&|({])"
    r"(?:(export\s+)?([A-Za-z_]\w*)(?:\[[^\]]*\])?(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+)"
    r"|(?:for|select|read|mapfile|readarray|printf)\s+(?:-\w+\s+)*([A-Za-z_]\w*))"
)

# A statement that sets variables without an assignment to read.
SETS = re.compile(r"\(\(|(?:let|read|mapfile|readarray|printf\s+-v)\s|\w+\[")

# Variables with the GPUs of a process, and Slurm's number of a task on its node.
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
LOCAL_ID = "SLURM_LOCALID"

ONLY_A_SHELL = "only a shell knows the value"
UNKNOWN_PART = "a variable in it has no known value"

# Singularity sets a variable with this prefix in the container, without the prefix.
OF_CONTAINER = re.compile(r"^(?:SINGULARITY|APPTAINER)ENV_(?=[A-Za-z_])")

# Singularity adds the value of such a variable to PATH in the container.
PATH_OF_CONTAINER = re.compile(r"(?:SINGULARITY|APPTAINER)ENV_(?:PREPEND|APPEND)_PATH=")

# A home folder, as a shell expands it in a value.
HOME = re.compile(r"(?:^|[:=])~(?=[/:]|$)")
NO_HOME = "only a shell expands ~"
WRITE_PATH = "write the path"


@dataclass
class Variables:
    """The variables of a script while it is read.

    - `values`: those without an export. `arrays`: the elements of arrays, as text.
    - `definitions`: lines that set them, for a line of the setup with such a variable.
    - `exported`: names whose values the pods get. `exports_all`: as after `set -a`.
    - `unused`: the lines of arrays without a use yet, by their name. `awaited`: those that export a
      variable without a value yet.
    - `lost`: the values before a block that may change them. `changed_arrays`: arrays that a block
      may change, with its place.
    - `dropped`: the remarks on assignments, by the text of the line that sets the variable.
    - `has_setup`: a line of the setup has been read.
    - `in_folder`: returns a text with the current folder as a path.
    """

    launch: Launch
    in_folder: Callable[[str], str]
    values: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, str] = field(default_factory=dict)
    unused: dict[str, list[Statement]] = field(default_factory=dict)
    awaited: dict[str, Statement] = field(default_factory=dict)
    definitions: dict[str, str] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    exports_all: bool = False
    has_setup: bool = False
    lost: dict[str, str] = field(default_factory=dict)
    changed_arrays: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, list[Remark]] = field(default_factory=dict)

    @property
    def with_spaces(self) -> Mapping[str, str]:
        """Return the variables of the pods with several words: a shell splits them."""
        return {key: text for key, text in literals(self.launch.draft).items() if " " in text}

    def is_set(self, name: str) -> bool:
        """Return True for a variable of the pods, or of the environment of the script."""
        return name not in self.known and self.launch.is_set(name)

    @property
    def known(self) -> Mapping[str, str]:
        """Return the known values of variables. Those of the script come before others."""
        return {**self.launch.values, **self.values}

    def drop(self, statement: Statement, why: str, instead: str = "") -> Remark:
        """Remark on a dropped statement."""
        where = f"{self.launch.path}: line {statement.line}"
        return self.launch.draft.drop(where, statement.text, why, instead)

    def assign_all(self, statement: Statement, words: Sequence[str]) -> None:
        """Read a line of assignments, of declarations or of exports."""
        is_export = words[0] == "export" or any(map(EXPORT_OPTION.fullmatch, words))
        for word in words[1:] if words[0] in EXPORTS else words:
            if assignment_of(word):
                self.assign(statement, word, is_exported=is_export)
            elif is_export and word == "-f":
                self.drop(statement, "it exports a function of the shell")
                return
            elif word.startswith("-"):
                continue
            elif is_export:
                self._export(statement, word)
            else:
                self.drop(statement, "it sets no value")

    def _export(self, statement: Statement, name: str) -> None:
        """Read `export NAME`: it exports what was assigned before, and what is later."""
        value = self.values.get(name, NO_VALUE)
        self.exported.add(name)
        if value != NO_VALUE:
            self.assign(statement, f"{name}={value}", is_exported=True)
        elif name not in {**self.definitions, **literals(self.launch.draft)}:
            self.awaited[name] = statement

    def assign(self, statement: Statement, word: str, *, is_exported: bool) -> None:
        """Read an assignment. A variable once exported stays so."""
        found = assignment_of(OF_CONTAINER.sub("", word))
        assert found is not None
        name = found.name
        self.awaited.pop(name, None)
        where = f"{self.launch.path}: line {statement.line}"
        value = self._value(found)
        in_pods = {str(one.get("name")) for one in children(self.launch.draft.spec, "env")}
        is_exported = is_exported or self.exports_all or name in {*self.exported, *in_pods}
        if is_exported:
            self.exported.add(name)
        self.values.pop(name, None)
        names = [one[1] or one[2] for one in VARIABLE.finditer(value)]
        is_literal = not names and not has_only_a_shell(value)
        lost = self.lost.pop(name, None)
        if PATH_OF_CONTAINER.match(word):
            self.drop(
                statement, "Singularity adds it to PATH in the container", "set PATH in the image"
            )
            return
        if reason_against_variable(name):
            self.values[name] = value if is_literal else NO_VALUE
            # Without an export, torchrun does not get it.
            if is_exported or not (is_literal or name.startswith(RESERVED_PREFIX)):
                self.launch.add_variable(name, value, where)
            return
        if HOME.search(value):
            self.launch.draft.note(f"{where} {name}", NO_HOME, WRITE_PATH)
        self._note_change(name, value, where)
        if is_exported and is_literal:
            self.launch.draft.add_variable(name, value, where)
            return
        self.launch.draft.remove_variable(name)
        self._define(name, statement, found)
        if name in names and lost is not None and not is_exported:
            self.values[name] = NO_VALUE
            self.lost[name] = expand(value, {name: lost})
            return
        visible = name in VISIBLE_DEVICES and LOCAL_ID in names
        is_unknown = name in names or is_only_a_shell(value)
        # A command in it is read nevertheless, with its known parts.
        self.values[name] = NO_VALUE if is_unknown else value
        # One with several words is a command or arguments, and no variable for the script.
        instead = "" if " " in value.strip() else f"set {name} in spec.env"
        if not (has_only_a_shell(value) or is_exported or name in names):
            return
        why = ONLY_A_SHELL if has_only_a_shell(value) else UNKNOWN_PART
        if visible:
            why, instead = OWN_GPU
        if len(statement.words) == 1:
            remark = self.drop(statement, why, instead)
        else:
            remark = self.launch.draft.drop(f"{where} {name}", found.value, why, instead)
        self.dropped.setdefault(statement.text, []).append(remark)

    def _note_change(self, name: str, value: str, where: str) -> None:
        """Note a second value of a variable of the pods, if the setup ran with the first one."""
        before = literals(self.launch.draft).get(name)
        if self.has_setup and before not in (None, value):
            why = (
                f"lines of the setup had {quoted(before)}; a pod has one value for all of its life"
            )
            self.launch.draft.note(f"{where} {name}", why, f"set {name} in these lines")

    def _value(self, found: Assignment) -> str:
        """Return a value with known variables replaced. `NAME+=x` adds to the value before."""
        text = f"${{{found.name}}}{found.value}" if found.adds else found.value
        text = ELEMENTS.sub(self._joined_elements, text)
        text = without_inner_quotes(without_defaults(text, self.is_set))
        known = {**literals(self.launch.draft), **self.known}
        return self.in_folder(expand(text, known))

    def _define(self, name: str, statement: Statement, found: Assignment) -> None:
        """Keep the line that sets a variable, with the lines before if it adds to them."""
        before = self.definitions.get(name)
        needs_before = found.adds or name in USED.findall(found.value)
        lines = [before] if before and needs_before else []
        self.definitions[name] = "\n".join([*lines, statement.text])

    def assign_array(self, statement: Statement) -> None:
        """Keep the elements of an array, or remark on one made by a command such as scontrol."""
        found = ARRAY.fullmatch(statement.text)
        assert found is not None
        name, plus, elements = found.groups()
        words = split_words(elements)
        if len(words) == 1 and has_substitution(words[0]):
            self.dropped[statement.text] = [self.drop(statement, ONLY_A_SHELL)]
            self.definitions[name] = statement.text
            return
        before = self.arrays.get(name, "") if plus else ""
        self.unused.setdefault(name, []).append(statement)
        elements = without_defaults(elements, self.is_set)
        elements = expand_arrays(LINE_END.sub(" ", elements), self._known_elements)
        elements = expand_command(elements, {**literals(self.launch.draft), **self.known})
        self.arrays[name] = f"{before} {elements}".strip()
        self.definitions[name] = f"{name}=({self.arrays[name]})"

    def _joined_elements(self, found: re.Match[str]) -> str:
        """Return the elements of an array as one text. One without a known value stays."""
        return join_elements(self._use(found[1])) if found[1] in self.arrays else found[0]

    def _known_elements(self, name: str) -> str:
        """Return the elements of an array; its use if they are not known."""
        return self._use(name) if name in self.arrays else f"${{{name}[@]}}"

    def elements(self, name: str) -> str:
        """Return the elements of an array; none of one without a known value."""
        if name not in self.arrays:
            self.launch.draft.drop(self.launch.path, f"${{{name}[@]}}", ONLY_A_SHELL)
        return self._use(name)

    def _use(self, name: str) -> str:
        """Return the elements of an array for the training. Note a block that may change them."""
        self.unused.pop(name, None)
        if name in self.changed_arrays:
            where = f"{self.changed_arrays[name]} {name}"
            why = "the block may change it; the training has the elements before"
            self.launch.draft.note(where, why, "write them into args")
        return self.arrays.get(name, "")

    def drop_unused(self) -> None:
        """Remark on arrays without a use, and on exports of variables without a value."""
        for name, statement in self.awaited.items():
            self.drop(statement, "pods have nothing of the user's shell", f"set {name} in spec.env")
        for statement in chain.from_iterable(self.unused.values()):
            self.drop(statement, "neither the training nor the setup has all of its elements")

    def unset(self, statement: Statement, why: tuple[str, str]) -> None:
        """Read `unset NAME`: the pods do not get the variable."""
        where = f"{self.launch.path}: line {statement.line}"
        is_found = False
        for name in statement.words[1:]:
            is_found = is_found or name in self.values
            for place in (self.values, self.arrays, self.definitions):
                place.pop(name, None)
            self.exported.discard(name)
            self.launch.of_torchrun.pop(name, None)
            removed = self.launch.draft.remove_variable(name)
            if removed is not None:
                is_found = True
                self.launch.draft.drop(f"{where} {name}", removed, "it is unset there")
        if not is_found:
            self.drop(statement, *why)

    def forget(self, statement: Statement, *, defines: bool) -> None:
        """Forget the values of variables set in a block. Remark on those meant for the script.

        `defines`: a later line of the setup needs the block.
        """
        where = f"{self.launch.path}: line {statement.line}"
        exported = literals(self.launch.draft)
        for name, is_export in names_set_in(statement.text).items():
            value = self.values.get(name, NO_VALUE)
            if value != NO_VALUE:
                self.lost[name] = value
            self.values[name] = NO_VALUE
            if name in self.arrays:
                self.changed_arrays[name] = where
            before = self.definitions.get(name)
            if defines:
                self.definitions[name] = f"{before}\n{statement.text}" if before else statement.text
            reason = reason_against_variable(name)
            if reason:
                if is_export or name in self.exported or self.exports_all:
                    self.launch.draft.note(f"{where} {name}", reason, advice_on_variable(name))
            elif name in exported:
                why = f"the block may change it; the pods have {quoted(exported[name])}"
                self.launch.draft.note(f"{where} {name}", why, f"set {name} in spec.env")
            elif is_export or name in self.exported or self.exports_all:
                why = "the block may export it; the pods do not have it"
                self.launch.draft.note(f"{where} {name}", why, f"set {name} in spec.env")

    @property
    def lost_words(self) -> Mapping[str, str]:
        """Return the values before a block that are commands or arguments: several words."""
        return {name: value for name, value in self.lost.items() if " " in value.strip()}

    def note_lost(self, text: str, lost: Mapping[str, str]) -> None:
        """Note the variables in a command or an argument with such a value before a block."""
        for name in USED.findall(text):
            if name in lost:
                before = f"before, it is {quoted(self.lost[name])}"
                if name in self.lost_words:
                    before += ", as in the training"
                where = f"{self.launch.path}: {name} in args"
                self.launch.draft.note(where, f"a block may change it; {before}", "write its value")

    def with_definitions(self, line: str) -> list[str]:
        """Return a line of the setup after those that set its variables."""
        found = []
        for name in [*USED.findall(line), *names_set_in(line)]:
            definition = self.definitions.get(name)
            self.unused.pop(name, None)
            if definition:
                self._keep(definition)
                rest = self.definitions.items()
                self.definitions = {key: text for key, text in rest if text != definition}
                found += self.with_definitions(definition)
        return [*found, expand_known(line, self.launch.values)]

    def _keep(self, definition: str) -> None:
        """Note what the setup has of the assignments in a definition, of one line or several."""
        for text in [definition, *definition.split("\n")]:
            for remark in self.dropped.pop(text, ()):
                self.launch.draft.keep(remark, "the setup has it, the training does not")


def names_set_in(block: str) -> dict[str, bool]:
    """Return the variables set in a block, and whether it exports them."""
    is_subshell = block.startswith("(") and not block.startswith("((")
    if is_subshell or HERE_DOCUMENT.search(block):
        return {}
    found: dict[str, bool] = {}
    for export, assigned, read in SET_IN_BLOCK.findall(block):
        name = assigned or read
        found[name] = found.get(name, False) or bool(export)
    return found
