"""Write the locks of the images: every package with its version and its hashes, for Python 3.11.

    make locks

Each distribution has `requirements.lock`, for the packages of its image, and `build.lock`, for the
build of its wheel. torch is in neither: its build depends on the index, and the images name its
version.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The Python of the images. Markers of other versions would give other packages.
PYTHON = (3, 11)

# Each distribution with the extras in its image.
DISTRIBUTIONS = {"operator": ("controller",), "trainer": ("tensorboard",)}

RUN, BUILD = "requirements.lock", "build.lock"


def locks() -> Iterator[tuple[Path, Sequence[str]]]:
    """Yield the path of each lock, and the requirements to be locked."""
    for distribution, extras in DISTRIBUTIONS.items():
        folder = ROOT / distribution
        data = tomllib.loads((folder / "pyproject.toml").read_text())
        project = data["project"]
        needed = list(project["dependencies"])
        for extra in extras:
            needed += project["optional-dependencies"][extra]
        yield folder / RUN, [one for one in needed if not re.match(r"torch\b", one)]
        yield folder / BUILD, data["build-system"]["requires"]


def write(lock: Path, requirements: Sequence[str]) -> None:
    command = [sys.executable, "-m", "piptools", "compile", "-", "--output-file", str(lock)]
    command += ["--generate-hashes", "--allow-unsafe", "--upgrade", "--strip-extras", "--quiet"]
    # The lock is for every index and every machine.
    command += ["--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host"]
    command += ["--no-header", "--no-annotate"]
    subprocess.run(command, input="\n".join(requirements), text=True, check=True)


def main() -> None:
    if sys.version_info[:2] != PYTHON:
        sys.exit("make locks needs Python {}.{}, which the images have".format(*PYTHON))
    for lock, requirements in locks():
        write(lock, requirements)


if __name__ == "__main__":
    main()
