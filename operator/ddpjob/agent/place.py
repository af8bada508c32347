"""Give each attempt of a pod the same place: remove the files of the attempt before.

A killed program has no time to remove its files, locks and segments. The next attempt in the same
pod would find them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from .code import unpack
from .files import empty_folder, paths_below, read_file
from .options import Options

# In the folder of the option `work`: the files of the attempt, those of the attempt before, the
# code after the setup, and caches.
WORK = "work"
LAST = "work.last"
CODE = "work.code"
CACHE = "cache"

# The mounts of this process, and two columns of this table: see proc_pid_mountinfo(5). Kubernetes'
# paths of emptyDirs on disk have this part.
MOUNTS = "/proc/self/mountinfo"
SOURCE = 3
POINT = 4
EMPTY_DIR = b"/kubernetes.io~empty-dir/"

# System V IPC: the tables in /proc of each kind, and numbers of C. GETPID is the process of the
# last operation on a semaphore.
SYSV = "/proc/sysvipc"
SHM = "shm"
SEM = "sem"
IPC_RMID = 0
GETPID = 11


def variables(options: Options, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a pod, with folders for temporary files and caches."""
    if not options.own_files:
        return dict(given)
    cache = f"{options.work}/{CACHE}"
    found = {
        "TMPDIR": f"{options.work}/{WORK}",
        # By default they are below TMPDIR, or in a home folder, and that may not be writable.
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TRITON_CACHE_DIR": f"{cache}/triton",
        **given,
    }
    if options.setup and not os.access(os.path.expanduser("~"), os.W_OK):
        # pip installs modules here, and programs such as ninja.
        base = found.setdefault("PYTHONUSERBASE", f"{cache}/python")
        path = found.get("PATH") or os.defpath
        found["PATH"] = f"{base}/bin:{path}"
    return found


def prepare(
    options: Options,
    env: Mapping[str, str],
    *,
    is_first: bool,
    added: Collection[str] | None = None,
) -> None:
    """Prepare the pod for an attempt. No process of the last one runs.

    Before the first one, only an init container has written anything. `added`: the setup's new
    paths in the working directory, or None without a setup.
    """
    folder = Path(options.work)
    if options.own_files or options.code:
        for name in (WORK, LAST):
            # Without it, as on a full disk, Python's `tempfile` takes another folder.
            with suppress(OSError):
                Path(folder, name).mkdir(parents=True, exist_ok=True)
    if not is_first:
        clean(options, env)
    if added is not None:
        restore_setup(folder, added)
    elif options.code:
        unpack(Path(options.code), folder / WORK)
    if options.code:
        # torchrun and the zygote start there.
        os.chdir(folder / WORK)


def clean(options: Options, env: Mapping[str, str]) -> None:
    if options.clear:
        empty_folder(options.clear)
    if options.own_files or options.code:
        keep_last(Path(options.work))
    if options.own_files:
        remove_locks(env)
    if options.own_ipc:
        # The kernel may lack System V IPC.
        with suppress(OSError, ValueError, KeyError, AttributeError, ImportError):
            remove_segments()


def keep_last(folder: Path) -> None:
    """Move the content of `work` to `work.last`, in place of its old content.

    The folder `work` itself stays: it may be the working directory of the zygote.
    """
    empty_folder(folder / LAST)
    with suppress(OSError):
        for path in (folder / WORK).iterdir():
            target = folder / LAST / path.name
            with suppress(OSError):
                path.rename(target)
    # What cannot be moved is removed.
    empty_folder(folder / WORK)


def keep_setup(folder: Path, sent: Collection[str]) -> set[str]:
    """Keep the sent paths as a setup has left them, for each attempt. Return the added paths."""
    found = paths_below(folder / WORK)
    for name in found.intersection(sent):
        source = folder / WORK / name
        target = folder / CODE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if is_folder(source):
            target.mkdir(exist_ok=True)
        else:
            shutil.copy(source, target, follow_symlinks=False)
    return found.difference(sent)


def restore_setup(folder: Path, added: Collection[str]) -> None:
    """Fill `work` with the result of a setup. The paths added by it are in `work.last`."""
    work = folder / WORK
    if (folder / CODE).exists():
        shutil.copytree(folder / CODE, work, symlinks=True, dirs_exist_ok=True)
    for name in added:
        last = folder / LAST / name
        target = work / name
        with suppress(OSError):
            target.parent.mkdir(parents=True, exist_ok=True)
            if is_folder(last):
                # It was empty.
                target.mkdir()
            else:
                last.rename(target)


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def remove_locks(env: Mapping[str, str]) -> None:
    """Remove the locks of torch.utils.cpp_extension (FileBaton). No other process releases them.

    Those on a volume stay: another pod may hold them.
    """
    cache = env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # Its folders are named by the versions of Python and CUDA.
    locks = list(Path(cache, "torch_extensions").glob("*/*/lock"))
    given = env.get("TORCH_EXTENSIONS_DIR")
    if given:
        locks += Path(given).glob("*/lock")
    for path in locks:
        if is_own(path.parent):
            with suppress(OSError):
                path.unlink()


def is_own(folder: Path) -> bool:
    """Return True if a folder is in the container's own file system, or in an emptyDir on disk."""
    path = os.fsencode(os.path.realpath(folder))
    inner, source = b"", b""
    for line in read_file(MOUNTS).splitlines():
        fields = line.split(b" ")
        if len(fields) <= POINT:
            # The last line of a very long table is cut off.
            continue
        # Spaces and backslashes are written as octal numbers.
        point = fields[POINT].decode("unicode_escape").encode("latin-1")
        is_inside = (path + b"/").startswith(point.rstrip(b"/") + b"/")
        # Of several mounts at one point, the last one is visible.
        if is_inside and len(point) >= len(inner):
            inner, source = point, fields[SOURCE]
    return inner == b"/" or EMPTY_DIR in source


def remove_segments() -> None:
    """Remove shared memory and semaphores of ended processes.

    Those of other containers of the pod stay: their processes are not visible here, or run.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    for row in rows_of(SHM):
        if row["nattch"] == 0 and has_ended(row["cpid"]):
            libc.shmctl(row["shmid"], IPC_RMID, None)
    for row in rows_of(SEM):
        number = row["semid"]
        users = []
        for index in range(row["nsems"]):
            users.append(libc.semctl(number, index, GETPID))
        if has_ended(*users):
            libc.semctl(number, 0, IPC_RMID)


def rows_of(kind: str) -> Iterator[dict[str, int]]:
    """Yield the rows of a table of /proc by the names of its columns."""
    table = read_file(f"{SYSV}/{kind}").decode()
    rows = [line.split() for line in table.splitlines()]
    for row in rows[1:]:
        yield dict(zip(rows[0], map(int, row)))


def has_ended(*processes: int) -> bool:
    """Return True if some of these processes are known, and none of them runs.

    A process of another container without a common namespace is 0.
    """
    known = [process for process in processes if process > 0]
    running = [process for process in known if os.path.exists(f"/proc/{process}")]
    return bool(known) and not running
