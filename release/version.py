"""Show or set the version of the project, in all its places.

python release/version.py            # print it
python release/version.py 1.2.3      # set it, and date the changelog's section
"""

import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART = "charts/ddpjob-operator/Chart.yaml"

# Files with the version, and a pattern around it. The version is read from the first one.
PLACES = (
    (CHART, r"(?m)^(appVersion: )(\S+)$"),
    (CHART, r"(?m)^(version: )(\S+)$"),
    ("operator/ddpjob/__init__.py", r'(?m)^(__version__ = ")([^"]+)'),
    ("trainer/ddp_trainer/__init__.py", r'(?m)^(__version__ = ")([^"]+)'),
    ("README.md", r"(ddpjob-operator:)(\d[^\s`]*)"),
    ("images/README.md", r"(ddpjob-operator:)(\d[^\s`]*)"),
    ("docs/users/quickstart-kind.md", r"(ddpjob-operator:)(\d[^\s`]*)"),
    ("Dockerfile", r"(ddpjob-operator:)(\d[^\s`]*)"),
)

VERSION = re.compile(r"\d+\.\d+\.\d+(-(alpha|beta|rc)\.\d+)?")
UNRELEASED = re.compile(r"(?m)^## \[(\S+)\] - Unreleased$")


def versions() -> Iterator[tuple[str, str]]:
    """Yield each file with the version, and the version in it."""
    for path, pattern in PLACES:
        for found in re.finditer(pattern, (ROOT / path).read_text()):
            yield path, found[2]


def current() -> str:
    return next(versions())[1]


def set_version(version: str) -> None:
    """Write a version to all places, and today's date into the changelog."""
    if not VERSION.fullmatch(version):
        sys.exit(f"{version!r} is no version such as 1.2.3 or 1.2.3-rc.1")
    for path, pattern in PLACES:
        file = ROOT / path
        file.write_text(re.sub(pattern, rf"\g<1>{version}", file.read_text()))
    changelog = ROOT / "CHANGELOG.md"
    section = f"## [{version}] - {datetime.now(UTC):%Y-%m-%d}"
    changelog.write_text(UNRELEASED.sub(section, changelog.read_text(), count=1))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        set_version(sys.argv[1])
    print(current())
