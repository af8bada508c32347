"""Follow the folder of a shell script: what `cd`, `pushd` and `popd` do to it."""

import posixpath
import shlex
from dataclasses import dataclass, field
from typing import Any

from ddpjob.convert.shell import Statement

MOVES = ("cd", "pushd", "popd")
WORKING = "workingDir"


@dataclass
class Folders:
    """The folder of a script while it is read.

    - `trainer`: the container, whose working directory is the first absolute folder.
    - `folder`: the path from the working directory, or an absolute one. `stack`: those of `pushd`.
    - `last`: the folder before the last `cd`; None if it is not known. An empty one is the folder
      of the image.
    - `entered`: the `cd` that became the working directory. `home`: the folder before it.
    """

    trainer: dict[str, Any]
    folder: str = ""
    stack: list[str] = field(default_factory=list)
    last: str | None = None
    entered: str = ""
    home: str = ""

    def is_below(self, target: str) -> bool:
        """Return True if a change of the folder stays below the working directory."""
        if target == "-":
            return self.last is not None
        return not target.startswith(("/", "~", "$", "`"))

    def change(self, statement: Statement, target: str, setup: list[str], *, is_first: bool) -> str:
        """Change the folder. Return the line for a setup, or an empty string.

        `is_first`: the setup has no line yet. A line for a former working directory is put into it.
        """
        program = statement.words[0]
        here = self._here()
        if program == "cd" and target == "-":
            line = self._go_back(setup, is_first=is_first)
        elif program == "cd" and is_first and self._enter(target):
            line = ""
        else:
            line = statement.text
            self._go(program, target)
        self.last = here
        return line

    def forget_last(self) -> None:
        """Forget the folder before the last `cd`, which was dropped."""
        self.last = None

    def _here(self) -> str:
        path = posixpath.join(self.trainer.get(WORKING, ""), self.folder)
        return posixpath.normpath(path) if path else ""

    def _go(self, program: str, target: str) -> None:
        if program == "popd":
            self.folder = self.stack.pop() if self.stack else self.folder
            return
        if program == "pushd":
            self.stack.append(self.folder)
        joined = posixpath.normpath(posixpath.join(self.folder, target))
        self.folder = "" if joined == "." else joined

    def _enter(self, target: str) -> bool:
        """Make a folder the working directory, if its path is known.

        The setup may make a folder, and a working directory is there before the setup.
        """
        before = self.trainer.get(WORKING, "")
        folder = posixpath.normpath(posixpath.join(before, target))
        if not folder.startswith("/") or "$" in folder or "`" in folder:
            return False
        self.trainer[WORKING] = folder
        self.entered, self.home = f"cd {shlex.quote(folder)}", before
        return True

    def _go_back(self, setup: list[str], *, is_first: bool) -> str:
        """Go to the folder before the last `cd`."""
        target = self.last
        if target is None:
            return ""
        if self.entered and target == self.home and not self.folder:
            self._leave()
            if not is_first:
                setup.insert(0, self.entered)
            self.entered = ""
            return "" if is_first else "cd -"
        if is_first and target and self._enter(target):
            return ""
        working = self.trainer.get(WORKING, "")
        is_inside = working and (target + "/").startswith(working.rstrip("/") + "/")
        self.folder = target[len(working) :].strip("/") if is_inside else target
        return f"cd {shlex.quote(target)}" if target.startswith("/") else "cd -"

    def _leave(self) -> None:
        """Make the folder before the first `cd` the working directory again."""
        if self.home:
            self.trainer[WORKING] = self.home
        else:
            del self.trainer[WORKING]
