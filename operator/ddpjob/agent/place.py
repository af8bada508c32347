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
WORK, LAST, CODE, CACHE = "work", "work.last", "work.code", "cache"

# System V IPC: the tables in /proc of each kind, and numbers of C. GETPID is the process of the
# last operation on a semaphore.
SYSV, SHM, SEM, MSG = "/proc/sysvipc", "shm", "sem", "msg"
IPC_RMID, GETPID = 0, 11


def variables(options: Options, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a pod, and folders for temporary files and caches if it sets none."""
    if not options.own_files:
        return dict(given)
    found = {
        "TMPDIR": f"{options.work}/{WORK}",
        # By default they are below TMPDIR, or in a home folder, and that may not be writable.
        "TORCHINDUCTOR_CACHE_DIR": f"{options.work}/{CACHE}/inductor",
        "TRITON_CACHE_DIR": f"{options.work}/{CACHE}/triton",
        **given,
    }
    if options.setup and not os.access(os.path.expanduser("~"), os.W_OK):
        # pip installs here for a user without a home folder: modules, and programs such as ninja.
        base = found.setdefault("PYTHONUSERBASE", f"{options.work}/{CACHE}/python")
        found["PATH"] = os.pathsep.join([f"{base}/bin", found.get("PATH") or os.defpath])
    return found


def prepare(
    options: Options,
    environment: Mapping[str, str],
    *,
    is_first: bool,
    added: Collection[str] | None = None,
) -> None:
    """Prepare the pod for an attempt. No process of the last one runs.

    Before the first one, only an init container has written anything. `added` are the setup's new
    paths in the working directory; None if there was no setup.
    """
    folder = Path(options.work)
    if options.own_files or options.code:
        for name in (WORK, LAST):
            # Without it, as on a full disk, Python's `tempfile` takes another folder.
            with suppress(OSError):
                Path(folder, name).mkdir(parents=True, exist_ok=True)
    if not is_first:
        clean(options, environment)
    if added is not None:
        restore_setup(folder, added)
    elif options.code:
        unpack(Path(options.code), folder / WORK)
    if options.code:
        # torchrun and the zygote start there.
        os.chdir(folder / WORK)


def clean(options: Options, environment: Mapping[str, str]) -> None:
    """Remove the remains of the last attempt."""
    if options.clear:
        empty_folder(options.clear)
    if options.own_files or options.code:
        keep_last(Path(options.work))
    if options.own_files:
        remove_locks(environment)
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
            with suppress(OSError):
                path.rename(folder / LAST / path.name)
    # Remove what could not be moved, such as a folder that its owner may not change.
    empty_folder(folder / WORK)


def keep_setup(folder: Path, sent: Collection[str]) -> set[str]:
    """Keep the sent paths as a setup has left them, and return the paths it has added.

    So each attempt of the pod begins with the result of the setup.
    """
    found = paths_below(folder / WORK)
    for name in found.intersection(sent):
        source, target = folder / WORK / name, folder / CODE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if is_folder(source):
            target.mkdir(exist_ok=True)
        else:
            shutil.copy(source, target, follow_symlinks=False)
    return found.difference(sent)


def restore_setup(folder: Path, added: Collection[str]) -> None:
    """Fill `work` with the result of a setup. The paths added by it are in `work.last`."""
    if (folder / CODE).exists():
        shutil.copytree(folder / CODE, folder / WORK, symlinks=True, dirs_exist_ok=True)
    for name in added:
        target, last = folder / WORK / name, folder / LAST / name
        with suppress(OSError):
            target.parent.mkdir(parents=True, exist_ok=True)
            if is_folder(last):
                # It was empty.
                target.mkdir()
            else:
                last.rename(target)


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def remove_locks(environment: Mapping[str, str]) -> None:
    """Remove the locks of torch.utils.cpp_extension (FileBaton). Nobody else would release them."""
    cache = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    given = environment.get("TORCH_EXTENSIONS_DIR")
    locks = [
        *(Path(given).glob("*/lock") if given else ()),
        # Its folders are named by the versions of Python and CUDA.
        *Path(cache, "torch_extensions").glob("*/*/lock"),
    ]
    for path in locks:
        with suppress(OSError):
            path.unlink()


def remove_segments() -> None:
    """Remove segments of shared memory, semaphores and queues of ended processes.

    Those of other containers of the pod stay: their processes are not visible here, or run.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    for row in rows_of(SHM):
        if row["nattch"] == 0 and has_ended(row["cpid"]):
            libc.shmctl(row["shmid"], IPC_RMID, None)
    for row in rows_of(SEM):
        users = [libc.semctl(row["semid"], index, GETPID) for index in range(row["nsems"])]
        if has_ended(*users):
            libc.semctl(row["semid"], 0, IPC_RMID)
    for row in rows_of(MSG):
        if has_ended(row["lspid"], row["lrpid"]):
            libc.msgctl(row["msqid"], IPC_RMID, None)


def rows_of(kind: str) -> Iterator[dict[str, int]]:
    """Yield the rows of a table of /proc by the names of its columns."""
    names, *lines = read_file(f"{SYSV}/{kind}").decode().splitlines() or [""]
    for line in lines:
        # The permissions are octal.
        yield dict(zip(names.split(), (int(word) for word in line.split())))


def has_ended(*processes: int) -> bool:
    """Return True if some of these processes are known, and none of them runs.

    A process of another container without a common namespace is 0.
    """
    known = [process for process in processes if process > 0]
    return bool(known) and not any(os.path.exists(f"/proc/{process}") for process in known)
