"""Recognise syntax of bash. /bin/sh runs a setup, and is another shell in many images."""

import re
import shlex

from ddpjob.convert.marks import QUOTED

HERE_DOCUMENT = re.compile(
    r"(<<-?\s*\\?(['\"]?)(\w+)\2[^\n]*)\n.*?\n\s*\3\s*?$", re.DOTALL | re.MULTILINE
)

# Expansions, also in double quotes: an array, a replacement, a part of a value.
EXPANSION = re.compile(
    r"""\$\{[!\#]?\w+[\[/^,@]     # ${A[0]}, ${A/x/y}, ${A^^}
      | \$\{!                      # ${!A}
      | \$\{\w+:(?=[0-9\s$])       # ${A:0:3}
      | \$'                        # $'…'
      | \$\{?(?:BASH\w*|RANDOM|SECONDS)\b
    """,
    re.VERBOSE,
)

# Commands and operators, outside of quotes. A group is the part to name.
SYNTAX = re.compile(
    r"""(?:^|[;&|({!]|\b(?:then|do|else|if|while|until)\s)\s*
          (\[\[|function|source|pushd|popd|declare|typeset|shopt|mapfile|readarray|select|let)
          (?=\s|$)
      | (?:^|[;&|({]|\b(?:then|do|else|export)\s)\s*(\w+\+=)(?!\()
      | <<<
      | [<>]\(
      | &>
      | \|&
      | (?<![$\w])\(\(
      | \b\w+\+?=\(
      | \{\w+\.\.\w+\}
      | \bpipefail\b
      | (?<!\[)\[\s[^\]\n]*\s(==)\s
    """,
    re.VERBOSE | re.MULTILINE,
)


def bash_syntax(text: str) -> str:
    """Return the first syntax in a text that only bash knows, or an empty string."""
    without_documents = HERE_DOCUMENT.sub(r"\1", text)
    expanded = QUOTED.sub(_without_single_quotes, without_documents)
    plain = QUOTED.sub(_without_quotes, without_documents)
    for pattern, where in ((SYNTAX, plain), (EXPANSION, expanded)):
        found = pattern.search(where)
        if found:
            return found[found.lastindex or 0]
    return ""


def run_by_bash(text: str) -> str:
    """Return a command for /bin/sh: bash runs the text, up to the first command that fails."""
    return f"bash -ec {shlex.quote(text)}"


def without_bash(setup: str) -> str:
    """Return the text of a setup without the start of bash by `run_by_bash`."""
    try:
        words = shlex.split(setup)
    except ValueError:
        return setup
    return words[2] if len(words) == 3 and setup == run_by_bash(words[2]) else setup


def _without_single_quotes(found: re.Match[str]) -> str:
    return "''" if found[0].startswith("'") else found[0]


def _without_quotes(found: re.Match[str]) -> str:
    quote = found[0][0]
    return quote * 2 if quote in "'\"" else found[0]
