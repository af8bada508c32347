"""Run the programs of a user (docker, kind, helm, kubectl) and wait for their effects."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]

# A Kubernetes object.
Object = dict[str, Any]
T = TypeVar("T")


class Unavailable(Exception):
    """This machine cannot run a cluster. The message says what to install."""


class CommandFailed(Exception):
    """A command ended with an error. The message is the command and what it printed."""


def run(*command: str | Path, stdin: str | None = None, **environment: str) -> str:
    """Run a command in the repository and return its standard output.

    Raises CommandFailed if it ends with an error.
    """
    result = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    if result.returncode:
        words = " ".join(str(word) for word in command)
        printed = result.stderr.strip() or result.stdout.strip()
        raise CommandFailed(f"{words}: {printed}")
    return result.stdout


def build_image(tag: str, *options: str, context: str = ".", stdin: str | None = None) -> None:
    """Build an image with the command in the variable BUILD, as `make images` does.

    With the context "-", `stdin` is the Dockerfile.
    """
    build = (os.environ.get("BUILD") or "docker build").split()
    run(*build, "--quiet", "--tag", tag, *options, context, stdin=stdin)


# Between two looks at a state, in seconds. Some states last for two seconds only.
FIRST_PAUSE = 0.3
LONGEST_PAUSE = 1.0


def wait_until(
    what: str, look: Callable[[], T | None], seconds: float, explain: Callable[[], str] = str
) -> T:
    """Call `look` until its answer is true, and return this answer.

    The pauses between two calls grow, because each look uses the CPU time of what it waits for.
    After `seconds`, raises AssertionError with `what` and the text of `explain()`.
    """
    deadline = time.monotonic() + seconds
    pause = FIRST_PAUSE
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}\n{explain()}")
        time.sleep(pause)
        pause = min(1.2 * pause, LONGEST_PAUSE)


def require_tools() -> None:
    """Raise Unavailable unless the programs are installed and the Docker engine answers."""
    for program in ("docker", "kind", "helm", "kubectl"):
        if not shutil.which(program):
            raise Unavailable(
                f"{program} is not installed: docs/users/quickstart-kind.md says where to get it"
            )
    try:
        run("docker", "info")
    except CommandFailed as error:
        raise Unavailable(
            "the Docker engine does not answer: start it (`docker info` prints the reason)"
        ) from error


def node_image() -> str:
    """Return the node image to use, or an empty string for the default of the kind release.

    Raises Unavailable if the Docker engine does not have the named image.
    """
    image = os.environ.get("KIND_NODE_IMAGE", "")
    named_in = ROOT.parent / "shared" / "lab" / "node-image-name"
    if not image and named_in.exists():
        image = named_in.read_text().strip()
    if image:
        try:
            run("docker", "image", "inspect", image)
        except CommandFailed as error:
            raise Unavailable(
                f"node image {image} not found: `docker pull {image}`, or set KIND_NODE_IMAGE"
            ) from error
    return image
