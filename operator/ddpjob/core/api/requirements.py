"""What a setup installs with pip: packages without a version, and lists of requirements."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# A name with extras, and perhaps a marker, and no version or address. It is no file.
UNPINNED = re.compile(r"(?!.*\.(?:whl|zip|gz)$)([A-Za-z0-9][\w.-]*)\s*(\[[^\]]*\])?\s*(;.*)?")

PIP = re.compile(r"(.*/)?pip[\d.]*")

# Options of pip that take a value which is no package. With `=`, the value is in the same word.
WITH_VALUE = {
    *("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--trusted-host", "--proxy"),
    *(
        "-t",
        "--target",
        "--prefix",
        "--root",
        "--python",
        "--python-version",
        "--platform",
        "--abi",
    ),
    *(
        "-e",
        "--editable",
        "--retries",
        "--timeout",
        "--cache-dir",
        "--log",
        "--progress-bar",
        "--src",
    ),
    *("--upgrade-strategy", "--root-user-action", "--no-binary", "--only-binary", "--report"),
    *("-C", "--config-settings", "--implementation", "--exists-action", "--cert", "--client-cert"),
}
LISTS = ("-r", "--requirement", "--requirements")
CONSTRAINTS = ("-c", "--constraint")

# What separates two commands of a shell, and where its output goes.
SEPARATORS = re.compile(r"&&|\|\||[;|&\n()]")
REDIRECTION = re.compile(r"\d*(?:>>?|<)&?\d*")


@dataclass
class Installed:
    """What a setup installs: packages without a version, and the lists that it names."""

    unpinned: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)


def read_setup(setup: str, files: Mapping[str, bytes] | None = None) -> Installed:
    """Return what a setup installs. `files` are those of the job's code, by path.

    Lists of requirements are read from there.
    """
    found = Installed()
    for command in SEPARATORS.split(setup.replace("\\\n", " ")):
        try:
            words = shlex.split(command, comments=True)
        except ValueError:
            # A quotation that is not closed, since it has a separator in it.
            continue
        installer = next((place for place, word in enumerate(words) if PIP.fullmatch(word)), None)
        if installer is not None and "install" in words[installer:]:
            rest = words[words.index("install", installer) + 1 :]
            _read_words(iter(rest), found)
    for path in found.lists:
        _read_list(path, files or {}, found)
    found.unpinned = list(dict.fromkeys(found.unpinned))
    return found


def _read_words(words: Iterator[str], found: Installed) -> None:
    """Read what follows `pip install`."""
    packages = []
    is_constrained = False
    for word in words:
        option, equals, value = word.partition("=")
        if option in LISTS:
            found.lists.append(value if equals else next(words, ""))
        elif word.startswith("-r"):
            found.lists.append(word.removeprefix("-r"))
        elif option in CONSTRAINTS:
            is_constrained = True
            if not equals:
                next(words, "")
        elif word in WITH_VALUE or REDIRECTION.fullmatch(word):
            next(words, "")
        elif match := UNPINNED.fullmatch(word):
            packages.append(match[1])
    # A list of constraints has the versions.
    found.unpinned += [] if is_constrained else packages


def _read_list(path: str, files: Mapping[str, bytes], found: Installed) -> None:
    """Read a list of requirements, which may name others."""
    folder, slash, _ = path.removeprefix("./").rpartition("/")
    text = files.get(path.removeprefix("./"), b"").decode(errors="replace")
    for line in text.replace("\\\n", " ").splitlines():
        words = line.partition("#")[0].strip()
        option, _, other = words.partition(" ")
        if option in LISTS and f"{folder}{slash}{other.strip()}" not in found.lists:
            # The caller goes on to it.
            found.lists.append(f"{folder}{slash}{other.strip()}")
        elif match := UNPINNED.fullmatch(words):
            found.unpinned.append(match[1])


def version_advice(names: list[str]) -> str:
    """Return what to do about packages without a version, or an empty string."""
    if not names:
        return ""
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    verb = "has" if len(names) == 1 else "have"
    return (
        f"spec.setup: {listed} {verb} no version, so a pod that starts later may get another one; "
        f"write {names[0]}==VERSION"
    )


def code_advice(setup: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Yield what to do about the lists of a setup that are, or are not, among a job's code."""
    in_text = read_setup(setup).unpinned
    found = read_setup(setup, files)
    missing = [path for path in found.lists if not path.startswith("/") and path not in files]
    missing = [path for path in missing if path.removeprefix("./") not in files]
    if missing:
        yield (
            f"spec.setup: {missing[0]} is not among the files that are sent; send its folder with "
            "--code FOLDER"
        )
    # Those of the text are in the advice on the spec.
    yield version_advice([name for name in found.unpinned if name not in in_text])
