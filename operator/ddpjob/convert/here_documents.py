"""Write here-documents of a script in another form, so that their text can be read.

The number of lines stays the same, because remarks name them.
"""

import re

# The document after `<<EOF`, `<<-EOF` or `<<'EOF'`: the quote, the delimiter, the rest of the first
# line, and the text.
DOCUMENT = r"<<-?\s*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote){rest}\n(?P<text>.*?\n)\s*(?P=end)[ \t]*"

# A function as sent by Kubeflow's SDK. Its `read` fails, so it must not be in a setup.
FUNCTION_OF_SDK = re.compile(
    rf"read -r -d '' (\w+) *{DOCUMENT.format(rest='')}\n\s*printf \"%s\" \"?\$\1\"? > *(\S+)",
    re.DOTALL,
)

# `read -r -d '' NAME <<EOF`, which fails at the end of the text, and `NAME=$(cat <<EOF …)`.
READ = re.compile(
    r"^[ \t]*read\s+(?:-\w+\s+|''\s+|\"\"\s+)*(?P<name>\w+)\s*"
    + DOCUMENT.format(rest=r"(?:\s*\|\|\s*(?:true|:))?[ \t]*")
    + "$",
    re.DOTALL | re.MULTILINE,
)
CAT = re.compile(
    r"(?P<name>\b\w+)=(?P<quoted>\"?)\$\(\s*cat\s*"
    + DOCUMENT.format(rest="[ \t]*")
    + r"\n\s*\)(?P=quoted)",
    re.DOTALL,
)

# In a document and in double quotes, a backslash has a meaning before other characters.
QUOTE = re.compile(r'(\\[\\$`\n])|(\\?)"')


def rewrite(text: str) -> str:
    """Return a script with here-documents for variables as assignments, and as files of cat."""
    text = FUNCTION_OF_SDK.sub(r"cat > \5 << \g<quote>\g<end>\g<quote>\n\g<text>\g<end>\n", text)
    for pattern in (READ, CAT):
        text = pattern.sub(_assignment, text)
    return text


def _assignment(found: re.Match[str]) -> str:
    value = found["text"].rstrip("\n")
    if found["quote"]:
        quoted = "'" + value.replace("'", "'\\''") + "'"
    else:
        quoted = f'"{QUOTE.sub(_escaped, value)}"'
    missing = found[0].count("\n") - value.count("\n")
    return f"{found['name']}={quoted}" + "\n" * missing


def _escaped(found: re.Match[str]) -> str:
    return found[1] or (r"\\\"" if found[2] else r"\"")
