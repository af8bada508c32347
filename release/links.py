"""Find the links of a page that lead nowhere.

The READMEs of the wheels and of the chart are shown where no other file of the repository is: by
PyPI, by Artifact Hub and by `helm show readme`. So their links are addresses below the repository,
which zensical.toml declares. On the site, docs/site/build.py turns them into links between pages.
"""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urldefrag

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
REPOSITORY: str = PROJECT["repo_url"]

# The addresses of files and folders. The branch is the one that the site is built from.
FILES = f"{REPOSITORY}/blob/main/"
FOLDERS = f"{REPOSITORY}/tree/main/"
PICTURES = REPOSITORY.replace("//github.com/", "//raw.githubusercontent.com/") + "/main/"

# A picture with a link around it has a link within the brackets.
INLINE = re.compile(r"\]\(<?([^)\s>]+)>?[^)]*\)")
REFERENCE = re.compile(r"^\[[^\]]+\]: (\S+)", re.MULTILINE)
HTML = re.compile(r"<(?:a|img)\b[^>]*?\b(?:href|src)=\"([^\"]+)\"")
CODE = re.compile(
    r"^(```|~~~).*?^\1|^(?: {4}|\t)(?![-*\d]).*?$|`[^`\n]+`", re.DOTALL | re.MULTILINE
)


def links(text: str) -> Iterator[str]:
    """Yield the targets of the links and pictures of a Markdown page, outside of its code."""
    text = CODE.sub("", text)
    for pattern in (INLINE, REFERENCE, HTML):
        yield from pattern.findall(text)


def anchors(text: str) -> set[str]:
    """Return the names in a Markdown page that a link can have after its `#`."""
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for title in re.findall(r"^#+ (.+?)$", re.sub(r"(?ms)^```.*?^```", "", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        # A second heading of the same text has a number.
        count = 0
        while f"{slug}-{count}".removesuffix("-0") in found:
            count += 1
        found.add(f"{slug}-{count}".removesuffix("-0"))
    return found


@cache
def anchors_of(page: Path) -> set[str]:
    return anchors(page.read_text())


def broken(text: str, folder: Path | None = None) -> Iterator[str]:
    """Yield the links of a page that lead nowhere, each with the reason.

    `folder` is where the page is read. Without it, a page has no files beside it.
    """
    for link in links(text):
        address, anchor = urldefrag(link)
        path = in_repository(link)
        if not address:
            if unquote(anchor) not in anchors(text):
                yield f"{link}: the page has no such heading"
            continue
        if (path is None and "://" in link) or link.startswith("mailto:"):
            continue
        if path is None and folder is None:
            yield f"{link}: is relative; write {FILES}PATH"
            continue
        place = ROOT / path if path is not None else (folder or ROOT) / unquote(address)
        if not place.exists():
            yield f"{link}: does not exist"
        elif anchor and place.suffix == ".md" and unquote(anchor) not in anchors_of(place):
            yield f"{link}: has no such heading"


def in_repository(link: str) -> str | None:
    """Return the path of the file or folder of the repository that an address names, or None."""
    address, _ = urldefrag(link)
    for base in (FILES, FOLDERS, PICTURES):
        if address.startswith(base):
            return unquote(address.removeprefix(base))
    return None
