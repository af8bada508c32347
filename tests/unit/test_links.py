"""The links of what is shown to people: on PyPI, on Artifact Hub, on the site and on GitHub."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ddpjob.core.api.yaml_text import load_yaml

ROOT = Path(__file__).parents[2]
LINKS = runpy.run_path(str(ROOT / "release" / "links.py"))
broken, links, in_repository = LINKS["broken"], LINKS["links"], LINKS["in_repository"]
REPOSITORY, FILES = LINKS["REPOSITORY"], LINKS["FILES"]
CHART = load_yaml((ROOT / "charts/ddpjob-operator/Chart.yaml").read_text())
WHEELS = ("operator", "trainer")
INSIDE = re.compile(r"decisions/|developers/design")
INSIDE_OF_USERS = re.compile(r"decisions/|developers/|CONTRIBUTING")


def listed(*patterns):
    """Return the files of the repository that match."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]


def project(wheel):
    return tomllib.loads((ROOT / wheel / "pyproject.toml").read_text())["project"]


# A page


def test_a_page_for_users_links_to_nothing_of_the_inside():
    pages = listed("README.md", "docs/library.md", "docs/users/*.md", "docs/workloads/*.md")
    pages += listed("operator/README.md", "trainer/README.md", "charts/*.md")
    for page in pages:
        inside = INSIDE_OF_USERS if page.parent.name == "users" else INSIDE
        inner = [link for link in links(page.read_text()) if inside.search(link)]
        assert inner == [], page


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](b.md) and [c](<d.md>)", ["b.md", "d.md"]),
        ("[![a](b.svg)](c.md)", ["b.svg", "c.md"]),
        ('<a href="x">y</a> <img alt="" src="z">', ["x", "z"]),
        ("[a]: b.md", ["b.md"]),
        ("`[a](b.md)`\n\n```\n[a](c.md)\n```\n\n    [a](d.md)\n", []),
        ("- a\n  [b](c.md)\n", ["c.md"]),
    ],
)
def test_the_links_of_a_page_are_found_outside_of_code(text, found):
    assert list(links(text)) == found


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("docs/README.md", "is relative"),
        (f"{FILES}docs/nowhere.md", "does not exist"),
        (f"{FILES}docs/README.md#nowhere", "has no such heading"),
        ("#nowhere", "the page has no such heading"),
        (f"{FILES}docs/README.md#for-users", ""),
        (f"{REPOSITORY}/tree/main/docs", ""),
        ("#a-heading", ""),
        (f"{REPOSITORY}/issues", ""),
        ("https://pytorch.org", ""),
    ],
)
def test_a_link_that_leads_nowhere_has_a_reason(link, reason):
    found = list(broken(f"# A heading\n\n[a]({link})\n"))
    assert len(found) == bool(reason)
    assert reason in "".join(found)


# What is shipped


def test_one_address_is_that_of_the_project_everywhere():
    assert CHART["home"] == REPOSITORY
    assert CHART["sources"] == [REPOSITORY]
    for wheel in WHEELS:
        urls = project(wheel)["urls"]
        assert urls["Homepage"] == REPOSITORY
        assert all(url.startswith(REPOSITORY) for url in urls.values())


@pytest.mark.parametrize("wheel", WHEELS)
def test_the_links_of_a_wheel_work_on_pypi(wheel):
    metadata = project(wheel)
    shown = (ROOT / wheel / metadata["readme"]).read_text()
    urls = "".join(f"[{name}]({url})\n" for name, url in metadata["urls"].items())
    assert list(broken(shown)) + list(broken(urls)) == []


def test_the_links_of_the_chart_work_on_artifact_hub():
    shown = (ROOT / "charts/ddpjob-operator/README.md").read_text()
    annotated = load_yaml(CHART["annotations"]["artifacthub.io/links"])
    urls = [CHART["icon"], *(link["url"] for link in annotated)]
    assert all(in_repository(url) for url in urls)
    assert list(broken(shown)) + list(broken("".join(f"[a]({url})" for url in urls))) == []


def test_the_links_of_the_site_work(tmp_path):
    """Stage the pages as docs/site/build.py does. Only the theme is missing then."""
    program = (
        "import sys, pathlib\n"
        f"sys.path.insert(0, {str(ROOT / 'docs/site')!r})\n"
        "import build\n"
        f"build.STAGE = pathlib.Path({str(tmp_path)!r})\n"
        "build.stage()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    pages = sorted(tmp_path.rglob("*.md"))
    assert len(pages) > 50
    found = []
    for page in pages:
        found += [
            f"{page.relative_to(tmp_path)}: {one}" for one in broken(page.read_text(), page.parent)
        ]
    assert found == []
    # A page of the site leads to another one on the site.
    chart = (tmp_path / "charts/ddpjob-operator/README.md").read_text()
    assert "(../../docs/users/queues.md)" in chart
    away = [one for page in pages for one in links(page.read_text()) if in_repository(one)]
    assert [one for one in away if (tmp_path / in_repository(one)).suffix == ".md"] == []


# The repository


@pytest.mark.parametrize("page", listed("*.md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_work_in_the_repository(page):
    assert list(broken(page.read_text(), page.parent)) == []


def test_addresses_in_programs_and_rules_lead_to_files():
    found = []
    for file in listed("*.py", "*.yaml", "*.toml", "*.tpl", "*.txt"):
        words = file.read_text(errors="replace").replace('"', " ").replace("'", " ").split()
        # The rest of an address may be a field of a template.
        urls = [word.rstrip(".,)") for word in words if word.startswith(FILES) and "{" not in word]
        found += list(broken("".join(f"[a]({url})" for url in urls if url != FILES)))
    assert found == []
