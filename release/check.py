"""Check a release before anything is pushed: versions, names, links and digests.

python release/check.py                # what the files of the repository say
python release/check.py dist           # also what make dist has built; writes dist/SHA256SUMS
python release/check.py --tag v1.2.3   # also whether this commit can be released with that tag

`make dist` runs it with the Python into which it has installed the wheel of the operator.
"""

import argparse
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from email import message_from_string
from email.message import Message
from hashlib import sha256
from pathlib import Path

# The modules beside this one. Tests run it by its path.
sys.path.insert(0, str(Path(__file__).parent))
from links import broken
from version import ROOT, current, versions

SUMS = "SHA256SUMS"
CHART = "ddpjob-operator"

# The distributions, as the names of their wheels begin.
WHEELS = ("ddpjob", "ddp_trainer")


def check_files() -> Iterator[str]:
    """Yield what is wrong in the files of the repository."""
    found = {version for _, version in versions()}
    if len(found) != 1:
        yield f"the files have the versions {', '.join(sorted(found))}; run release/version.py"
    if section(current()) is None:
        yield f"CHANGELOG.md: has no section [{current()}]"
    pushed = images("Makefile", r"-t \$\(IMAGES\)(\S+)", "$(CURRENT)")
    signed = images(".github/workflows/release.yaml", r'sign .*"\$REGISTRY/(\S+)"', "$version")
    if pushed != signed:
        yield f"make images pushes {sorted(pushed)}, and release.yaml signs {sorted(signed)}"
    used = f"{value('repository')}:VERSION"
    if used not in pushed:
        yield f"the chart uses {used}, and make images pushes {sorted(pushed)}"


def section(version: str) -> str | None:
    """Return the date of a version in the changelog, or Unreleased. None if it has no section."""
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(rf"(?m)^## \[{re.escape(version)}\] - (.*)$", text)
    return found[1] if found else None


def images(path: str, pattern: str, version: str) -> set[str]:
    """Return the images that a file names, with VERSION in place of its variable."""
    text = (ROOT / path).read_text()
    return {name.replace(version, "VERSION") for name in re.findall(pattern, text)}


def value(name: str, text: str = "") -> str:
    """Return a value of `image` in the chart's values."""
    text = text or (ROOT / "charts" / CHART / "values.yaml").read_text()
    found = re.search(rf'(?m)^image:\n(?:  .*\n)*?  {name}: "?([^"\n]*)"?$', text)
    assert found, f"values.yaml: image.{name} not found"
    return found[1]


def check_tag(tag: str) -> Iterator[str]:
    """Yield what keeps this commit from being released with a tag."""
    if tag != f"v{current()}":
        yield f"the tag {tag} is not that of the version {current()}; run make release"
    if section(current()) == "Unreleased":
        yield f"CHANGELOG.md: the section [{current()}] has no date; run make release"


# What make dist has built


def expected_names(version: str) -> set[str]:
    """Return the names of the files of a version. Wheels write it as Python does."""
    python = re.sub(r"-(a|b|rc)[a-z]*\.", r"\1", version)
    wheels = {f"{name}-{python}-py3-none-any.whl" for name in WHEELS}
    return wheels | {f"{CHART}-{version}.tgz", f"ddpjob-{version}.cdx.json"}


def check_dist(folder: Path, agent: str) -> Iterator[str]:
    """Yield what is wrong with the files in a folder.

    `agent` is the name of the ConfigMap of the wheel's agent, the only one that the chart lets its
    operator read.
    """
    expected = expected_names(current())
    found = {file.name for file in folder.iterdir() if file.is_file()} - {SUMS}
    if found != expected:
        yield f"expected {sorted(expected)}, got {sorted(found)}"
        return
    for name in sorted(expected):
        if name.endswith(".whl"):
            yield from (f"{name}: {one}" for one in check_wheel(folder / name))
    chart = chart_files(folder / f"{CHART}-{current()}.tgz")
    yield from (f"{CHART}-{current()}.tgz: {one}" for one in check_chart(chart, agent))


def check_wheel(wheel: Path) -> Iterator[str]:
    """Yield what is wrong with the text of a wheel, which PyPI shows."""
    metadata = metadata_of(wheel)
    shown = metadata.get_payload()
    if not isinstance(shown, str) or not shown.strip():
        yield "has no README"
    else:
        yield from (f"README: {one}" for one in broken(shown))
    for url in metadata.get_all("Project-URL", []):
        yield from broken(f"[a]({url.partition(', ')[2]})")
    if not metadata.get_all("License-File"):
        yield "has no licence"


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as files:
        (name,) = (one for one in files.namelist() if one.endswith(".dist-info/METADATA"))
        return message_from_string(files.read(name).decode())


def chart_files(package: Path) -> Mapping[str, str]:
    """Return the text of each file of a chart's package by its path."""
    with tarfile.open(package) as files:
        members = [member for member in files.getmembers() if member.isfile()]
        texts = {member.name: files.extractfile(member) for member in members}
        return {
            name.removeprefix(f"{CHART}/"): text.read().decode()
            for name, text in texts.items()
            if text
        }


def check_chart(files: Mapping[str, str], agent: str) -> Iterator[str]:
    for name in ("version", "appVersion"):
        if not re.search(rf"(?m)^{name}: \"?{re.escape(current())}\"?$", files["Chart.yaml"]):
            yield f"Chart.yaml: {name} must be {current()}"
    yield from (f"README.md: {one}" for one in broken(files["README.md"]))
    if files["files/agent-config-map"].strip() != agent:
        yield f"files/agent-config-map: must be {agent}, that of the wheel"


def write_sums(folder: Path) -> str:
    """Write the digests of the files of a folder, for `sha256sum --check`, and return them."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != SUMS)
    text = "".join(f"{sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (folder / SUMS).write_text(text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="Check a release before anything is pushed.")
    parser.add_argument("folder", nargs="?", type=Path, help="what make dist has built")
    parser.add_argument("--tag", help="the tag of the release")
    chosen = parser.parse_args()
    problems = list(check_files())
    if chosen.tag:
        problems += check_tag(chosen.tag)
    if chosen.folder:
        from ddpjob.core.agent_files import config_map_name

        problems += check_dist(chosen.folder, config_map_name())
    for problem in problems:
        print(problem, file=sys.stderr)
    if chosen.folder and not problems:
        print(write_sums(chosen.folder), end="")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
