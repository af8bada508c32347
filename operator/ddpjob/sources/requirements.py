"""Packages that a setup installs without a version: each pod may get another one."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

# A name with extras, and perhaps a marker, and no version or address. It is no file.
UNPINNED = re.compile(r"(?!.*\.(?:whl|zip|gz)$)([A-Za-z0-9][\w.-]*)\s*(\[[^\]]*\])?\s*(;.*)?")

INSTALLER = re.compile(r"(.*/)?pip[\d.]*")

# Options of pip that take a value which is no package.
WITH_VALUE = {
    *("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--trusted-host", "--proxy"),
    *("-c", "--constraint", "-t", "--target", "--prefix", "--root", "--python", "--platform"),
    *("-e", "--editable", "--retries", "--timeout", "--cache-dir"),
}
LISTS = ("-r", "--requirement", "--requirements")

# What separates two commands of a shell.
SEPARATORS = re.compile(r"&&|\|\||[;|&\n]")


def unpinned(setup: str, files: Mapping[str, bytes]) -> list[str]:
    """Return the packages without a version that a setup installs with pip, in their order.

    `files` are those of the job's code, by path: lists of requirements are read from there.
    """
    found = (name for words in _installs(setup) for name in _packages(words, files))
    return list(dict.fromkeys(found))


def unpinned_advice(setup: str, files: Mapping[str, bytes]) -> str:
    """Return what to do about packages without a version, or an empty string."""
    names = unpinned(setup, files)
    if not names:
        return ""
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    verb = "has" if len(names) == 1 else "have"
    return (
        f"spec.setup: {listed} {verb} no version, so a pod that starts later may get another one; "
        f"write {names[0]}==VERSION"
    )


def _installs(setup: str) -> Iterator[Sequence[str]]:
    """Yield what follows `pip install` in each command of a shell text."""
    for command in SEPARATORS.split(setup.replace("\\\n", " ")):
        try:
            words = shlex.split(command, comments=True)
        except ValueError:
            # A quotation that is not closed, since it has a separator in it.
            continue
        for place, (installer, word) in enumerate(pairwise(words)):
            if INSTALLER.fullmatch(installer) and word == "install":
                yield words[place + 2 :]


def _packages(words: Sequence[str], files: Mapping[str, bytes]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option in LISTS:
            yield from _in_list(value if equals else next(rest, ""), files)
        elif word in WITH_VALUE:
            next(rest, "")
        elif found := UNPINNED.fullmatch(word):
            yield found[1]


def _in_list(path: str, files: Mapping[str, bytes]) -> Iterator[str]:
    text = files.get(path.removeprefix("./"), b"").decode(errors="replace")
    for line in text.splitlines():
        if found := UNPINNED.fullmatch(line.partition("#")[0].strip()):
            yield found[1]
