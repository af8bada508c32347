"""Translate a rendered pod into a command of this machine, without any decision or start."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddpjob.core.api import names
from ddpjob.core.api.readers import Dict, children
from ddpjob.local.env import expand, read_env
from ddpjob.local.mounts import Mounts, read_mounts
from ddpjob.local.run_files import RunFiles


@dataclass(frozen=True)
class Command:
    """A process to start.

    - `message`: the file for the termination message of the process.
    - `assignment`: the file with the assignment of its agent.
    - `folders`: folders to be created before the start.
    - `files`: the content of files to be written before the start, by path.
    - `cwd`: the working folder; None keeps the current one.
    - `environment`: the folder of a virtual environment to be made first; None uses this one.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    message: Path
    assignment: Path
    folders: tuple[Path, ...] = ()
    files: Mapping[Path, str | bytes] = field(default_factory=dict)
    cwd: Path | None = None
    environment: Path | None = None


def translate(pod: Dict, files: RunFiles) -> Command:
    """Return the command of a rendered pod's container `trainer`.

    Raises SpecError for a mount or a variable not available on this machine.
    """
    container = _trainer(pod)
    # Paths first: the values of variables may have paths in them.
    mounts = read_mounts(pod, container, files)
    env = read_env(pod, container, mounts, files)
    # The command may have paths and references to variables.
    words = [*container["command"], *container["args"]]
    cwd = _working_folder(container.get("workingDir"), mounts) or files.cwd
    return Command(
        argv=tuple(expand(mounts.place(word), env) for word in words),
        env=env,
        message=mounts.paths[names.MESSAGE_FILE],
        assignment=Path(mounts.place(names.ASSIGNMENT_FILE)),
        folders=_folders(pod, mounts, cwd, files),
        files=mounts.files,
        cwd=cwd,
    )


def _trainer(pod: Dict) -> Dict:
    (found,) = (
        container
        for container in children(pod["spec"], "containers")
        if container.get("name") == names.TRAINER
    )
    return found


def _working_folder(given: str | None, mounts: Mounts) -> Path | None:
    """Return the container's workingDir if it is below a mount or exists here, else None.

    Most often it is a folder of the image. This machine does not have it.
    """
    if not given:
        return None
    placed = mounts.place(given)
    folder = Path(placed)
    if placed != given:
        return folder
    try:
        return folder if folder.is_dir() else None
    # Its name is too long, or this user may not look at it.
    except OSError:
        return None


def _folders(pod: Dict, mounts: Mounts, cwd: Path | None, files: RunFiles) -> tuple[Path, ...]:
    folders = [files.pod(pod["metadata"]["name"])]
    for path, target in mounts.paths.items():
        # A ConfigMap's file mounted by subPath is written later.
        is_file = path == names.MESSAGE_FILE or target in mounts.files
        if not is_file:
            folders.append(target)
    if cwd:
        folders.append(cwd)
    return tuple(folders)
