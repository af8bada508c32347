"""The checks of a release, on the files of the repository and on a made-up `dist/`."""

import re
import runpy
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from ddpjob.core.agent_files import config_map_name

ROOT = Path(__file__).parents[2]
CHECK = runpy.run_path(str(ROOT / "release" / "check.py"))
VERSION = CHECK["current"]()
CHART = f"ddpjob-operator-{VERSION}.tgz"
PAGE = (ROOT / "docs/developers/publishing.md").read_text()


def a_wheel(path, folder, readme=None):
    """Write a wheel that has only its metadata, from the files of a distribution."""
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    lines = [f"Name: {project['name']}", f"Version: {VERSION}", "License-File: LICENSE"]
    lines += [f"Project-URL: {name}, {url}" for name, url in project["urls"].items()]
    text = (ROOT / folder / project["readme"]).read_text() if readme is None else readme
    with zipfile.ZipFile(path, "w") as wheel:
        name = path.name.rpartition("-py3")[0]
        wheel.writestr(f"{name}.dist-info/METADATA", "\n".join([*lines, "", text]))


def as_helm_packages(file):
    """Leave out what .helmignore names: tests import a module of the chart."""
    return None if "__pycache__" in file.name else file


@pytest.fixture
def dist(tmp_path):
    """Return a folder with the files of a release."""
    for name in CHECK["expected_names"](VERSION):
        if name.endswith(".whl"):
            a_wheel(tmp_path / name, "trainer" if name.startswith("ddp_trainer") else "operator")
        elif name.endswith(".tgz"):
            with tarfile.open(tmp_path / name, "w:gz") as package:
                package.add(
                    ROOT / "charts/ddpjob-operator", "ddpjob-operator", filter=as_helm_packages
                )
        else:
            (tmp_path / name).write_text("{}")
    return tmp_path


def problems(dist, agent=None):
    return list(CHECK["check_dist"](dist, agent or config_map_name()))


# The repository


def test_the_files_are_ready_for_a_release():
    assert list(CHECK["check_files"]()) == []


def test_a_tag_must_be_that_of_the_version_and_the_changelog_must_have_its_date(monkeypatch):
    check_tag = CHECK["check_tag"]
    monkeypatch.setitem(check_tag.__globals__, "section", lambda version: "2026-12-01")
    assert list(check_tag(f"v{VERSION}")) == []
    assert "is not that of the version" in "".join(check_tag("v9.9.9"))
    monkeypatch.setitem(check_tag.__globals__, "section", lambda version: "Unreleased")
    assert "has no date" in "".join(check_tag(f"v{VERSION}"))


def test_the_page_names_targets_and_files_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", PAGE):
        assert re.search(rf"(?m)^{target}:", makefile), target
    for path in re.findall(r"(?:release|tests)/[\w/]+\.py", PAGE):
        assert (ROOT / path).is_file(), path
    for name in CHECK["images"]("Makefile", r"-t \$\(IMAGES\)(\S+)", "$(CURRENT)"):
        assert f"`{name}`" in PAGE


# What make dist builds


def test_the_files_of_a_release_have_no_problem_and_get_digests(dist):
    assert problems(dist) == []
    sums = CHECK["write_sums"](dist)
    assert sorted(line.split()[1] for line in sums.splitlines()) == sorted(
        CHECK["expected_names"](VERSION)
    )
    assert problems(dist) == []


def test_a_version_before_a_release_has_the_wheels_of_python():
    names = CHECK["expected_names"]("1.2.3-rc.1")
    assert "ddpjob-1.2.3rc1-py3-none-any.whl" in names
    assert "ddpjob-operator-1.2.3-rc.1.tgz" in names


def test_a_missing_file_is_a_problem(dist):
    (dist / CHART).unlink()
    assert "expected" in problems(dist)[0]


@pytest.mark.parametrize(
    ("readme", "problem"), [("", "has no README"), ("[a](../docs/README.md)", "is relative")]
)
def test_the_readme_of_a_wheel_must_work_on_pypi(dist, readme, problem):
    a_wheel(dist / f"ddpjob-{VERSION}-py3-none-any.whl", "operator", readme)
    (found,) = problems(dist)
    assert problem in found


def test_the_chart_must_let_the_operator_read_the_agent_of_the_wheel(dist):
    (found,) = problems(dist, agent="ddpjob-agent-0")
    assert found == f"{CHART}: files/agent-config-map: must be ddpjob-agent-0, that of the wheel"
