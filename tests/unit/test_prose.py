"""The prose of docstrings, comments and documents: few relative clauses, and a short README.

"The pods that the operator has created" is longer than "the operator's pods". A clause now and then
is fine, so a whole folder has a limit, and a file has none. Code blocks are no prose.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MAX_PER_1000_WORDS = 15
MAX_PER_1000_WORDS_OF_A_PAGE = 25

# The README is also the home page of the site. A reader looks at its first screen.
MAX_WORDS_OF_README = 600

FOLDERS = (
    "operator",
    "trainer",
    "bench",
    "tests",
    "examples",
    "release",
    "docs",
    "charts",
    "images",
)
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md")

WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
RELATIVE = re.compile(r"\b(?:which|that|whose)\b", re.IGNORECASE)
CODE = re.compile(r"```.*?```|^ {4}.*?$|`[^`\n]*`", re.DOTALL | re.MULTILINE)

WITH_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def prose_of_python(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, WITH_DOCSTRING):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def prose_of(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".md":
        return CODE.sub("x", text)
    return "\n".join(prose_of_python(text))


def files_of(folder: str) -> list[Path]:
    found = [path for suffix in ("py", "md") for path in (ROOT / folder).rglob(f"*.{suffix}")]
    return [path for path in found if not any(part.startswith(".") for part in path.parts)]


def per_1000_words(texts: list[str]) -> float:
    words = sum(len(WORD.findall(text)) for text in texts)
    relatives = sum(len(RELATIVE.findall(text)) for text in texts)
    return 1000 * relatives / max(words, 1)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_few_relative_clauses(folder):
    texts = {path: prose_of(path) for path in files_of(folder)}
    rate = per_1000_words(list(texts.values()))
    worst = sorted(texts, key=lambda path: -len(RELATIVE.findall(texts[path])))[:5]
    names = ", ".join(str(path.relative_to(ROOT)) for path in worst)
    assert rate <= MAX_PER_1000_WORDS, f"{rate:.1f} per 1,000 words, most of them in {names}"


@pytest.mark.parametrize(
    "page", [*PAGES, *(str(one.relative_to(ROOT)) for one in files_of("docs/users"))]
)
def test_a_page_has_few_relative_clauses(page):
    rate = per_1000_words([prose_of(ROOT / page)])
    assert rate <= MAX_PER_1000_WORDS_OF_A_PAGE, f"{rate:.1f} per 1,000 words"


def test_the_readme_is_short_and_says_early_why():
    text = (ROOT / "README.md").read_text()
    assert len(CODE.sub("x", text).split()) <= MAX_WORDS_OF_README
    headings = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert headings[:3] == ["Why this, and when something else", "How it works", "Two commands"]
