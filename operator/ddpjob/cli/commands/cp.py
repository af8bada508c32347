"""`ddpjob cp`: copy a file or a folder out of the pod of a rank."""

import posixpath
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from ddpjob.cli.archive import CHUNK, ArchiveError, Ended, LinkOutside, Unpacker
from ddpjob.cli.connection import Connection
from ddpjob.cli.options import Context, Kubeconfig, Namespace
from ddpjob.cli.pods import find_pod, require_kubectl
from ddpjob.cli.session import INTERRUPTED, REFUSED, Output, note, print_error
from ddpjob.core.api.readers import quoted
from ddpjob.core.plan import counted

FORM = "JOB:RANK:PATH"
SOURCE = re.compile(r"([^:/]+):(\d+):(.*)", re.DOTALL)

# Files below this size are copied before a progress bar could be read.
LARGE = 8 * 2**20

# Exit codes of SCRIPT. Those of tar are 0 to 2.
NO_TAR, NO_FILE = 90, 91

# The arguments are the options of tar, the folder and the name of the file, and both together. A
# folder is sent as `.`. A link named by the user is followed.
SCRIPT = f"""
export LC_ALL=C
command -v tar > /dev/null || exit {NO_TAR}
if [ -d "$3" ]; then exec tar "$0" - -C "$3" .; fi
[ -e "$3" ] || exit {NO_FILE}
exec tar "h$0" - -C "$1" "./$2"
"""

# The start of kubectl's report of an exit code, after the output of the command.
KUBECTL_ENDS = "command terminated with exit code"

# After an incomplete archive: seconds for the sender to end and to report the cause.
LAST_SECONDS = 5.0

# Reports of GNU tar, with exit code 1, for files changed by a rank during the copy.
CHANGED = re.compile(
    r"tar: .*: (file changed as we read it|File .* before we read it|.* padding.*)"
)


class Source(NamedTuple):
    """What to copy: a path in the pod of a rank."""

    job: str
    rank: int
    path: str

    @property
    def name(self) -> str:
        """Return the name of the file or folder, or an empty string for one such as `..`."""
        name = posixpath.basename(self.path.rstrip("/"))
        return "" if name in (".", "..") else name

    def script(self, options: str) -> list[str]:
        """Return the command to send the archive."""
        whole = self.path if self.path.startswith("/") else f"./{self.path}"
        folder, name = posixpath.split(whole)
        return ["/bin/sh", "-c", SCRIPT, options, folder, name, whole]


def command(
    source: Annotated[str, typer.Argument(metavar=FORM, help="A file or folder of a rank.")],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A folder that exists, or the name of the copy.")
    ],
    dereference: Annotated[
        bool,
        typer.Option("--dereference", "-L", help="Copy what links in a folder lead to."),
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Copy a file or a folder out of the running pod of a rank.

    A relative PATH begins in the working directory of the job. The image needs `tar`. An existing
    file is replaced, and an existing folder is not.

    Examples: ddpjob cp train:0:out/model.pt .; ddpjob cp train:0:out results
    """
    wanted = read_source(source, target)
    final = final_path(wanted, target)
    require_kubectl()
    connection = Connection(namespace, context, kubeconfig)
    pod = connection.ask(lambda client: find_pod(client, wanted.job, rank=wanted.rank))
    script = wanted.script("chf" if dereference else "cf")
    raise typer.Exit(copy(pod.command(connection, script), wanted, final))


def read_source(source: str, target: str) -> Source:
    """Return what to copy. Raises BadParameter."""
    found = SOURCE.fullmatch(source)
    if found:
        if SOURCE.fullmatch(target):
            message = f"must be on this machine, got {quoted(target)}"
            raise typer.BadParameter(message, param_hint="TARGET")
        return Source(found[1], int(found[2]), found[3] or ".")
    if SOURCE.fullmatch(target):
        raise typer.BadParameter(
            "copies out of a pod only: the next attempt would not find what was copied into one. "
            "Send code with `ddpjob submit --code`, and put data on a volume",
            param_hint="ddpjob cp",
        )
    message = f"must be {FORM}, such as train:0:out/model.pt, got {quoted(source)}"
    raise typer.BadParameter(message, param_hint=FORM)


def final_path(source: Source, target: str) -> Path:
    """Return the path of the copy. Raises BadParameter."""
    final = Path(target)
    if final.is_dir():
        if not source.name:
            message = f"name the copy, such as {target.rstrip('/')}/copy, for {source.path}"
            raise typer.BadParameter(message, param_hint="TARGET")
        final /= source.name
    if final.is_dir():
        message = f"folder {final} exists; remove it, or give the copy another name"
        raise typer.BadParameter(message, param_hint="TARGET")
    if not final.parent.is_dir():
        raise typer.BadParameter(f"folder {final.parent} does not exist", param_hint="TARGET")
    return final


class CannotCopy(Exception):
    """The copy has failed, and left nothing. The message says why."""


def copy(program: Sequence[str], source: Source, final: Path) -> int:
    """Copy the archive from a program, print its size, and return the exit code."""
    try:
        with shown_progress() as progress:
            copied, notes = fetch(program, source, final, progress)
    except CannotCopy as error:
        print_error(str(error))
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    for line in notes:
        note(line)
    files = f"{counted(copied.count, 'file')}, " if final.is_dir() else ""
    Output().print(f"{final}: {files}{decimal(copied.size)}")
    return 0


def fetch(
    program: Sequence[str], source: Source, final: Path, progress: Progress
) -> tuple[Unpacker, list[str]]:
    """Write the archive from a program to a path, completely or not at all. Raises CannotCopy.

    Return the unpacked archive and the program's reports.
    """
    try:
        # A folder beside the copy's final place allows a rename. Only this user may enter it.
        with tempfile.TemporaryDirectory(prefix=".ddpjob-cp-", dir=final.parent) as folder:
            place = Path(folder, "copy")
            copied = Unpacker(place, *_shown_on(progress))
            notes = _receive(program, source, copied)
            if place.is_dir() and final.exists():
                raise CannotCopy(f"{final} is a file, and {source.path} is a folder")
            place.replace(final)
    except OSError as error:
        raise CannotCopy(f"cannot write {error.filename or final}: {error.strerror}") from error
    return copied, notes


def _receive(program: Sequence[str], source: Source, copied: Unpacker) -> list[str]:
    """Unpack the archive from a program, and return its reports. Raises CannotCopy or OSError."""
    problem = ""
    with tempfile.TemporaryFile() as errors:
        with _running(program, errors) as sender:
            assert isinstance(sender.stdout, BufferedReader)
            try:
                copied.unpack(sender.stdout)
            except Ended as error:
                problem = str(error)
                # In most cases the program has ended by now, and has reported the cause.
                with suppress(subprocess.TimeoutExpired):
                    sender.wait(LAST_SECONDS)
                sender.kill()
            except LinkOutside as error:
                raise CannotCopy(f"refused: {error}; -L copies what links lead to") from error
            except ArchiveError as error:
                raise CannotCopy(f"refused: {error}") from error
        errors.seek(0)
        lines = errors.read().decode(errors="replace").splitlines()
    lines = [line for line in lines if line and not line.startswith(KUBECTL_ENDS)]
    has_changed = sender.returncode == 1 and all(map(CHANGED.fullmatch, lines))
    if problem or not (sender.returncode == 0 or has_changed):
        raise CannotCopy(_explained(sender.returncode, lines, source) or problem)
    return lines


@contextmanager
def _running(program: Sequence[str], errors: IO[bytes]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program, and end it if the block fails. After the block it has an exit code."""
    try:
        sender = subprocess.Popen(
            program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, bufsize=CHUNK
        )
    except OSError as error:
        raise CannotCopy(f"cannot run {program[0]}: {error.strerror}") from error
    with sender:
        try:
            yield sender
        except BaseException:
            sender.kill()
            raise


def _explained(code: int, lines: Sequence[str], source: Source) -> str:
    """Return the cause of the program's failure, or an empty string without a report."""
    place = f"ddpjob exec {source.job} --rank {source.rank} --"
    if code == NO_TAR:
        return f"the image of job {source.job} has no tar; for one file: {place} cat PATH > FILE"
    if code == NO_FILE:
        path = repr(source.path)
        return (
            f"rank {source.rank} of job {source.job} has no {path}, or may not read it; {place} ls"
        )
    return lines[-1] if lines else ""


def shown_progress() -> Progress:
    """Return a progress bar for a terminal. It goes when the copy has ended."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _shown_on(progress: Progress) -> tuple[Callable[[str, int], None], Callable[[int], None]]:
    """Return two functions: one to show a new file, and one to show its copied bytes."""
    task = progress.add_task("", visible=False)

    def begin(name: str, size: int) -> None:
        # A name may contain control characters for a terminal.
        shown = "".join(letter if letter.isprintable() else "?" for letter in name)
        shown = shown.removeprefix("./")
        progress.reset(task, total=size, visible=size >= LARGE, description=shown)

    def advance(size: int) -> None:
        progress.advance(task, size)

    return begin, advance
