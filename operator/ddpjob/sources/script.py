"""A user's own script, as torchrun can start it."""

import re
from contextlib import suppress
from pathlib import Path

from ddpjob.core.api import names
from ddpjob.core.api.readers import SpecError

# Longest first line of a script read by Linux, in characters.
MAX_FIRST_LINE = 256

SHELL_SUFFIXES = (".sh", ".bash", ".zsh", ".ksh")
SHELL = re.compile(r"\b(ba|da|k|z)?sh\b")


def check_script(script: Path) -> None:
    """Raise SpecError unless a script is a file that torchrun can start with Python."""
    if not script.is_file():
        what = "is a folder" if script.is_dir() else "does not exist"
        raise SpecError(f"{script}: the file {what}; give the script that torchrun starts")
    _require_python(script)


def _require_python(script: Path) -> None:
    """Raise SpecError for a notebook, or for a script in another language than Python."""
    if script.suffix == ".py":
        return
    if script.suffix.lower() == ".ipynb":
        raise SpecError(
            f"{script}: is a notebook, and torchrun starts Python scripts; to make one of it: "
            f"jupyter nbconvert --to script {script.name}"
        )
    first_line = _first_line(script)
    words = first_line.removeprefix("#!") if first_line.startswith("#!") else ""
    if script.suffix.lower() in SHELL_SUFFIXES or SHELL.search(words):
        raise SpecError(
            f"{script}: is a shell script, and torchrun starts Python scripts; give the Python "
            "script that it starts, with its arguments"
        )
    if words and "python" not in words:
        message = f"{first_line} is not the first line of a Python script"
        raise SpecError(f"{script}: {message}; give the script that torchrun is to start")


def _first_line(script: Path) -> str:
    # An unreadable file is refused when its text is needed.
    with suppress(OSError), script.open(errors="replace") as file:
        return file.readline(MAX_FIRST_LINE).strip()
    return ""


def job_name(script: Path) -> str:
    """Return the name of a script as the name of a job."""
    name = re.sub(r"[^a-z0-9]+", "-", script.stem.lower()).strip("-")
    if not name or not name[0].isalpha():
        name = f"job-{name}".rstrip("-")
    return name[: names.MAX_JOB_NAME].rstrip("-")
