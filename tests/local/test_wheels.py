"""The wheels have all that the commands need."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Return the wheels of both distributions."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
    subprocess.run([*command, ROOT / "operator", ROOT / "trainer"], check=True, timeout=300)
    return sorted(folder.glob("*.whl"))


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def test_the_commands_run_from_the_wheels_alone(wheels, tmp_path):
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / "site")

    def python(*words, stdin=""):
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            input=stdin,
            cwd=tmp_path,
            # Before the packages of this repository.
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ddpjob(*words, stdin=""):
        return python("-m", "ddpjob.cli.main", *words, stdin=stdin)

    where = python("-c", "import ddpjob, ddp_trainer; print(ddpjob.__file__, ddp_trainer.__file__)")
    assert where.count(str(tmp_path / "site")) == 2
    manifest = ddpjob("init", "digits")
    assert ddpjob("validate", "-", stdin=manifest) == (
        "digits: ok, recovery: Recreate (default: without spec.checkpoint or a shared volume)\n"
    )
    assert "kind: Pod" in ddpjob("render", "-", stdin=manifest)
    short = manifest.replace("'20'", "'1'").replace("nodes: 2", "nodes: 1")
    assert "Complete" in ddpjob("run", "--local", "-", stdin=short)
    for path in ("ddpjob/ui/templates/job.html", "ddpjob/ui/static/live.js", "ddpjob/py.typed"):
        assert (tmp_path / "site" / path).exists()


def test_the_wheels_have_complete_metadata(wheels):
    for wheel in wheels:
        text = metadata(wheel)
        for field in ("License-Expression: Apache-2.0", "Project-URL: Documentation, https://"):
            assert field in text, (wheel.name, field)
        assert "Description-Content-Type: text/markdown" in text
        # Links to files of the repository would lead nowhere on PyPI.
        assert "](../" not in text
