"""Write here-documents of a script in another form, so that their text can be read.

The number of lines stays the same, because remarks name them.
"""

import re

# The first line of a here-document up to its delimiter, its text, and a `)` after it. A document
# within another one is part of its text.
DOCUMENT = re.compile(
    r"^(?![ \t]*\#)(?P<before>[^\n]*?)(?<!<)<<-?[ \t]*"
    r"(?P<escape>\\?)(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)"
    r"(?P<rest>[^\n]*)\n(?P<text>.*?\n|)[ \t]*(?P=end)[ \t]*(?=\n|$)(?P<close>(?:\n[ \t]*\)\"?)?)",
    re.DOTALL | re.MULTILINE,
)

# The commands before it: `read -r -d '' NAME <<EOF`, which fails at the end of the text, and
# `NAME=$(cat <<EOF …)`. Another delimiter of read than '' takes one line.
READ = re.compile(
    r"(?P<indent>\s*)(?:IFS=\S*\s+)?read\s+(?=[^\n]*-\w*d\s+(?:''|\"\"))"
    r"(?:-\w+\s+|''\s+|\"\"\s+)+(?P<name>\w+)\s*"
)
CAT = re.compile(r"(?P<indent>.*?)\b(?P<name>\w+)=(?P<quoted>\"?)\$\(\s*cat\s*")
NO_FAILURE = re.compile(r"\s*(?:\|\|\s*(?:true|:)\s*)?")

# A function as sent by Kubeflow's SDK. Its `read` fails, so it must not be in a setup.
FUNCTION_OF_SDK = re.compile(
    r"read -r -d '' (\w+) *<< *(\w+)\n(.*?)\n\2\s*\n\s*printf \"%s\" \"?\$\1\"? > *(\S+)",
    re.DOTALL,
)

# The path of a launcher, as a shell finds it.
PATH_OF_LAUNCHER = re.compile(
    r"\$\((?:which|command -v) +(torchrun|accelerate|deepspeed)\)"
    r"|`(?:which|command -v) +(torchrun|accelerate|deepspeed)`"
)

# In a document and in double quotes, a backslash has a meaning before other characters. Within an
# expansion, a quote has the same meaning in both.
QUOTE = re.compile(r'(\\[\\$`\n])|(\\?)"')
QUOTE_IN_EXPANSION = re.compile(r'\$\([^)]*"|`[^`]*"|\$\{[^}]*"')


def rewrite(text: str) -> str:
    """Return a script with here-documents for variables as assignments, and as files of cat.

    A launcher has its name in place of a command that finds its path.
    """
    text = PATH_OF_LAUNCHER.sub(r"\1\2", text)
    text = FUNCTION_OF_SDK.sub(r"cat > \4 << \2\n\3\n\2\n", text)
    return DOCUMENT.sub(_rewritten, text)


def _rewritten(document: re.Match[str]) -> str:
    """Return a here-document as an assignment, or as it is."""
    before, rest, close = document["before"], document["rest"], document["close"]
    value = document["text"].rstrip("\n")
    read, cat = READ.fullmatch(before), CAT.fullmatch(before)
    if read and NO_FAILURE.fullmatch(rest):
        found, tail = read, close
    elif cat and not rest.strip() and close.strip() == f"){cat['quoted']}":
        found, tail = cat, ""
    else:
        return document[0]
    if document["quote"] or document["escape"]:
        quoted = "'" + value.replace("'", "'\\''") + "'"
    elif QUOTE_IN_EXPANSION.search(value):
        return document[0]
    else:
        quoted = f'"{QUOTE.sub(_escaped, value)}"'
    missing = document[0].count("\n") - value.count("\n") - tail.count("\n")
    # A command may follow the assignment in its line.
    is_end = document.string[document.end() :][:1] in ("", "\n") or tail
    lines = ("\n" if is_end else " \\\n") * missing
    return f"{found['indent']}{found['name']}={quoted}{lines}{tail}"


def _escaped(found: re.Match[str]) -> str:
    return found[1] or (r"\\\"" if found[2] else r"\"")
