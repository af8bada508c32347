"""The version of the project is the same in all places."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RELEASE = runpy.run_path(str(ROOT / "release" / "version.py"))
VERSION = RELEASE["current"]()


def test_every_place_has_the_same_version():
    assert {version for _, version in RELEASE["versions"]()} == {VERSION}
    assert {path for path, _ in RELEASE["versions"]()} == {path for path, _ in RELEASE["PLACES"]}


def test_no_other_file_names_an_image_of_a_version():
    known = {path for path, _ in RELEASE["PLACES"]}
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.yaml", "*.py", "Makefile", "*Dockerfile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    named = re.compile(r"ddpjob-operator:\d+\.\d+\.\d+")
    others = []
    for path in listed:
        file = ROOT / path
        if path not in known and file.exists() and named.search(file.read_text(errors="replace")):
            others.append(path)
    assert others == []


@pytest.mark.parametrize("version", ["1.2", "v1.2.3", "1.2.3.4", ""])
def test_what_is_no_version_is_refused(version):
    with pytest.raises(SystemExit, match="is no version"):
        RELEASE["set_version"](version)
