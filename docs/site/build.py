"""Build the documentation as a site: stage the pages, add the generated ones, build, check links.

    python docs/site/build.py            # into build/site; make docs does the same

The pages of the repository are staged with the folders that they are in, so links between them work
unchanged. Links to other files of the repository become links to its address, and the address of a
page becomes a link to it. The reference of the CRD, of the command line and of the client is
generated from them.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "release"))

from links import FILES, FOLDERS, in_repository
from reference import client_page, command_page, crd_page

ROOT = Path(__file__).resolve().parents[2]
STAGE = ROOT / "build" / "site-source"
SITE = ROOT / "build" / "site"

# The pages of the site, relative to the root of the repository.
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**/*.md",
    "bench/README.md",
    "charts/ddpjob-operator/README.md",
    "images/README.md",
    "trainer/README.md",
)
PICTURES = ("docs/**/*.svg", "docs/**/*.png", "examples/**/*.png", "examples/**/*.svg")
HOME = "README.md"

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def find(patterns: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files of the repository that match, as relative paths."""
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            yield path.relative_to(ROOT)


def stage() -> None:
    """Write the pages and pictures into the folder from which the site is built."""
    shutil.rmtree(STAGE, ignore_errors=True)
    pages = set(find(PAGES))
    for page in pages:
        rewrite = partial(rewritten, page=page, pages=pages)
        write(staged(page), LINK.sub(rewrite, (ROOT / page).read_text()))
    for picture in find(PICTURES):
        target = STAGE / picture
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / picture, target)
    write(Path("reference/ddpjob.md"), crd_page())
    write(Path("reference/commands.md"), command_page())
    write(Path("reference/client.md"), client_page())


def staged(page: Path) -> Path:
    return Path("index.md") if str(page) == HOME else page


def write(path: Path, text: str) -> None:
    target = STAGE / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def rewritten(found: "re.Match[str]", page: Path, pages: set[Path]) -> str:
    """Return a link of a page as a link of the site, or of the repository for other files."""
    text, target = found[1], found[2]
    address, anchor = urldefrag(target)
    path = in_repository(target)
    if path is None and ("://" in target or target.startswith(("#", "mailto:"))):
        return found[0]
    place = Path(path) if path else (ROOT / page.parent / address).resolve().relative_to(ROOT)
    if place in pages:
        # The home page is the only one that has another name on the site.
        between = os.path.relpath(staged(place), staged(page).parent)
        return f"[{text}]({between}{'#' + anchor if anchor else ''})"
    if path is not None or place.suffix in (".svg", ".png"):
        return found[0]
    base = FOLDERS if (ROOT / place).is_dir() else FILES
    return f"[{text}]({base}{place})"


class Page(HTMLParser):
    """The links of a page, and the anchors in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: "list[tuple[str, str | None]]") -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name in ("id", "name") and value:
                self.anchors.add(value)


def broken_links() -> Iterator[str]:
    """Yield the links within the site that lead nowhere."""
    pages = {path: Page(path.read_text(errors="replace")) for path in SITE.rglob("*.html")}
    for path, page in pages.items():
        if path.name == "404.html":
            continue
        for link in page.links:
            if "://" in link or link.startswith(("mailto:", "data:", "javascript:", "//")):
                continue
            address, anchor = urldefrag(link)
            target = (path.parent / unquote(address)).resolve() if address else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                yield f"{path.relative_to(SITE)}: {link}"
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                yield f"{path.relative_to(SITE)}: no anchor {link}"


def main() -> int:
    stage()
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--config-file", "zensical.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(built.stdout + built.stderr, end="")
    if built.returncode:
        return built.returncode
    broken = sorted(set(broken_links()))
    for link in broken:
        print(f"broken link: {link}")
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE.relative_to(ROOT)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
