"""What a setup installs with pip: packages without a version, and lists of requirements.

It is for advice. What the text does not show, such as `$LIST` or a list made by the setup itself,
is left out: a missing warning costs nothing, and a wrong one costs trust.
"""

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# A name with extras, and perhaps a marker, and no version or address. Not the name of a file.
PACKAGE = re.compile(
    r"(?!.*\.(?:whl|zip|gz|tgz|bz2|xz|txt|in|toml|cfg)$)"
    r"(?=[\w.-]*[A-Za-z])([A-Za-z0-9][\w.-]*)\s*(\[[^\]]*\])?\s*(;.*)?"
)
PIP = re.compile(r"(.*/)?pip[\d.]*")
LIST = re.compile(r"(?:-[qvU]*r|--requirements?=?)(.*)")
CONSTRAINT = re.compile(r"(?:-[qvU]*c|--constraints?=?)(.*)")

# Options without a value. After another one, the next word is its value.
ALONE = re.compile(
    r"-[qvUIy]+|--(quiet|verbose|upgrade|pre|user|system|no-deps|no-cache-dir|no-cache|no-input|"
    r"force-reinstall|ignore-installed|break-system-packages|no-build-isolation|prefer-binary|"
    r"require-hashes|dry-run|no-compile|no-warn-script-location|disable-pip-version-check|.*=.*)"
)

# They need no version: a setup only makes them new enough.
TOOLS = ("pip", "setuptools", "wheel", "uv")

PUNCTUATION = ";&|()<>"
COMMENT = re.compile(r"(^|\s)#.*")

# After these, a relative path may be anywhere, and a file may have come from anywhere.
MOVES = ("cd", "pushd", "git", "curl", "wget", "tar", "unzip")


@dataclass
class Installed:
    """What a setup installs: packages without a version, and lists of requirements."""

    unpinned: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)


def read_setup(setup: str) -> Installed:
    """Return what a setup installs, as far as its text shows it."""
    found = Installed()
    moves = False
    for words in _commands(setup):
        moves = moves or words[0] in MOVES
        installer = next((place for place, word in enumerate(words) if PIP.fullmatch(word)), None)
        if installer is not None and "install" in words[installer:]:
            is_pinned = any(word.startswith("PIP_CONSTRAINT=") for word in words[:installer])
            rest = words[words.index("install", installer) + 1 :]
            one = _read_words(rest)
            found.unpinned += [] if is_pinned else one.unpinned
            found.lists += [] if is_pinned else one.lists
    # A list named twice is probably made by the setup.
    known = [path for path in found.lists if _is_known(path) and setup.count(path) == 1]
    found.lists = [] if moves else [posixpath.normpath(path) for path in known]
    return found


def _commands(setup: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell text."""
    for line in setup.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(COMMENT.sub("", line), posix=True, punctuation_chars=PUNCTUATION)
        lexer.commenters = ""
        lexer.whitespace_split = True
        command: list[str] = []
        try:
            for word in lexer:
                if set(word) <= set(PUNCTUATION):
                    yield from [command] if command else []
                    command = []
                else:
                    command.append(word)
        except ValueError:
            # A quotation of several lines.
            continue
        yield from [command] if command else []


def _read_words(words: list[str]) -> Installed:
    """Read what follows `pip install`. With constraints, nothing is without a version."""
    found = Installed()
    rest = iter(words)
    for word in rest:
        if match := LIST.fullmatch(word):
            found.lists.append(match[1] or next(rest, ""))
        elif CONSTRAINT.fullmatch(word) or word == "--no-index":
            return Installed()
        elif word.startswith("-"):
            if not ALONE.fullmatch(word):
                next(rest, "")
        elif (match := PACKAGE.fullmatch(word)) and match[1] not in TOOLS:
            found.unpinned.append(match[1])
    return found


def _is_known(path: str) -> bool:
    """Return True for the path of a file of the job's code."""
    return bool(path) and path[0] not in "/~-" and "$" not in path and "://" not in path


def _unpinned_in(path: str, files: Mapping[str, bytes], seen: set[str]) -> list[str]:
    """Return the packages without a version in a list, and in the lists named by it."""
    seen.add(path)
    text = files.get(path, b"").decode(errors="replace").replace("\\\n", " ")
    found: list[str] = []
    for line in text.splitlines():
        words = COMMENT.sub("", line).strip()
        if CONSTRAINT.fullmatch(words):
            return []
        if match := LIST.fullmatch(words):
            other = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1].strip()))
            found += [] if other in seen else _unpinned_in(other, files, seen)
        elif match := PACKAGE.fullmatch(words):
            found.append(match[1])
    return found


def version_advice(names: list[str], where: str = "spec.setup") -> str:
    """Return what to do about packages without a version, or an empty string."""
    names = list(dict.fromkeys(names))
    if not names:
        return ""
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    verb = "has" if len(names) == 1 else "have"
    return (
        f"{where}: {listed} {verb} no version, so a pod that starts later may get another one; "
        f"write {names[0]}==VERSION"
    )


def code_advice(setup: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Yield advice on the lists of a setup. `files` are those of the job's code, by path."""
    for path in read_setup(setup).lists:
        if path not in files:
            yield (
                f"spec.setup: {path} is not among the files that are sent: it is not in the folder "
                "of --code, or .gitignore or .ddpjobignore leaves it out"
            )
        elif advice := version_advice(_unpinned_in(path, files, set()), path):
            yield advice
