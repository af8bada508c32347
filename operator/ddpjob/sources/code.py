"""Put a user's script or folder into a ConfigMap as a job's code, so no image has to be built."""

import fnmatch
import hashlib
import io
import os
import re
import zipfile
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathspec import GitIgnoreSpec

from ddpjob.core.api import names
from ddpjob.core.api.readers import Dict, SpecError, child

# Bytes of code in a manifest. A client-side `kubectl apply` keeps a copy of it in an annotation of
# at most 256 KiB; an archive is a third larger there. Otherwise a ConfigMap has at most 1 MiB.
PRINTED_BYTES = 190_000
SUBMITTED_BYTES = 2**20 - 2**14

# Number of files named in an error about their size.
LISTED = 3

# More bytes than this probably contain data beside the code.
LARGE_BYTES = 2**18

# The key of an archive, and the limits of the agent for unpacking it. agent/code.py has the same
# values, since it is copied into pods alone. tests/unit/test_code.py compares them.
ARCHIVE = "code.zip"
MAX_ENTRIES, MAX_BYTES = 20_000, 64 * 2**20

# The characters of a key of a ConfigMap.
KEY = re.compile(r"[-._a-zA-Z0-9]+")

# Names never taken as code: folders, byte code, and the file at the root of a virtual environment.
LEFT_OUT = ("__pycache__", "node_modules", "*.pyc", "ddpjob-runs")
ENVIRONMENT = "pyvenv.cfg"

# Files with patterns for names to leave out.
IGNORE_FILES = (".gitignore", ".ddpjobignore")

# Names of files with keys and tokens. Users with the role `view` may read a ConfigMap.
SECRETS = (
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx", "id_rsa*", "id_ed25519*", "id_ecdsa*"),
    *("*.token", "token", "token.txt", "*kubeconfig*", "credentials", "credentials.*", "secrets.*"),
)


@dataclass(frozen=True)
class Code:
    """The files of a user's code: their bytes and whether they can be run, by path."""

    files: Mapping[str, tuple[bytes, bool]]

    @property
    def digest(self) -> str:
        """Return a hash of the content. It does not depend on the compression."""
        found = hashlib.sha256()
        for path, (content, runs) in sorted(self.files.items()):
            found.update(f"{path}\0{len(content)}\0{runs:d}\0".encode() + content)
        return found.hexdigest()[:16]

    def path_of(self, script: Path, folder: Path | None) -> str:
        """Return the path of the script among the files. In the folder, it may be a link."""
        if folder is None:
            return script.name
        target = script.resolve()
        return next(path for path in self.files if (folder / path).resolve() == target)

    @property
    def text(self) -> dict[str, str] | None:
        """Return a script by its name, if it can be read in a manifest. An archive has all else."""
        if len(self.files) != 1:
            return None
        ((path, (content, _)),) = self.files.items()
        try:
            return {path: content.decode()} if KEY.fullmatch(path) else None
        except UnicodeDecodeError:
            return None

    def archive(self) -> bytes:
        """Return the files as an archive: sorted, and with fixed times."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for path, (content, runs) in sorted(self.files.items()):
                entry = zipfile.ZipInfo(path)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = (0o100755 if runs else 0o100644) << 16
                archive.writestr(entry, content)
        return packed.getvalue()

    @property
    def content(self) -> dict[str, Any]:
        """Return the content of the ConfigMap."""
        if text := self.text:
            return {"data": text}
        return {"binaryData": {ARCHIVE: b64encode(self.archive()).decode()}}


def read_code(script: Path, folder: Path | None) -> Code:
    """Return a script, or all files of its folder.

    Hidden files, byte code, virtual environments and files named by .gitignore and .ddpjobignore
    are left out. Raises SpecError, also for a file with the name of a key or a token.
    """
    if folder is None:
        return Code({script.name: _read(script)})
    try:
        paths = sorted(_files(folder, []))
    except OSError as error:
        raise SpecError(f"{error.filename}: cannot read the folder: {error.strerror}") from error
    if script.resolve() not in [path.resolve() for path in paths]:
        raise SpecError(f"{script}: is not in the folder {folder}, or is left out as ignored")
    _refuse_secrets(paths)
    if len(paths) > MAX_ENTRIES:
        raise SpecError(
            f"{folder}: has {len(paths):,} files, and the limit is {MAX_ENTRIES:,}; name data in "
            ".ddpjobignore"
        )
    # A folder may have data by mistake, so the sizes come before the content.
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    size = sum(sizes.values())
    if size > MAX_BYTES:
        raise _too_large(folder, size, sizes, MAX_BYTES)
    return Code({path.relative_to(folder).as_posix(): _read(path) for path in paths})


# The patterns of folders, the outermost first.
Ignored = Sequence[tuple[Path, GitIgnoreSpec]]


def _files(folder: Path, above: Ignored) -> Iterator[Path]:
    """Yield the code files in a folder. `above` are the patterns of the folders above."""
    if (folder / ENVIRONMENT).exists():
        return
    ignored = [*above, *_patterns(folder)]
    for entry in os.scandir(folder):
        path = folder / entry.name
        is_hidden = entry.name.startswith(".")
        left_out = any(fnmatch.fnmatch(entry.name, pattern) for pattern in LEFT_OUT)
        is_folder = entry.is_dir(follow_symlinks=False)
        if is_hidden or left_out or _is_ignored(path, is_folder, ignored):
            continue
        if is_folder:
            yield from _files(path, ignored)
        elif path.is_file():
            yield path


def _patterns(folder: Path) -> Iterator[tuple[Path, GitIgnoreSpec]]:
    for name in IGNORE_FILES:
        if (folder / name).is_file():
            content, _ = _read(folder / name)
            yield folder, GitIgnoreSpec.from_lines(content.decode(errors="replace").splitlines())


def _is_ignored(path: Path, is_folder: bool, ignored: Ignored) -> bool:
    """Return True if the last matching pattern excludes a path. Folders below come later."""
    for folder, patterns in reversed(ignored):
        relative = path.relative_to(folder).as_posix() + ("/" if is_folder else "")
        found = patterns.check_file(relative).include
        if found is not None:
            return found
    return False


def _refuse_secrets(paths: Iterable[Path]) -> None:
    for path in paths:
        if any(fnmatch.fnmatch(path.name.lower(), pattern) for pattern in SECRETS):
            raise SpecError(
                f"{path}: looks like a key or a token, and users with the role view may read a "
                "ConfigMap; name it in .ddpjobignore, and give it to the job as a Secret"
            )


def _read(path: Path) -> tuple[bytes, bool]:
    try:
        return path.read_bytes(), os.access(path, os.X_OK)
    except OSError as error:
        raise SpecError(f"{path}: cannot read the file: {error.strerror}") from error


def _too_large(place: Path, size: int, sizes: Mapping[str, int], limit: int) -> SpecError:
    """Return the error for too much code. `sizes` are the bytes of its files."""
    what = f"{place}: has {size:,} bytes of code, and the limit is {limit:,}"
    if len(sizes) == 1:
        return SpecError(f"{what}; put data into a claim, or build an image")
    largest = sorted(sizes, key=lambda path: -sizes[path])[:LISTED]
    listed = ", ".join(f"{path} ({sizes[path]:,})" for path in largest)
    return SpecError(
        f"{what}; the largest of its {len(sizes):,} files: {listed}; name data in .ddpjobignore "
        "and put it into a claim, or build an image"
    )


def config_map_of(code: Code) -> dict[str, Any]:
    """Return the ConfigMap of a job's code.

    Its name has the hash of its content, and it is immutable: all attempts of a job run the same
    code, and jobs with the same code share it.
    """
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"code-{code.digest}", "labels": {names.LABEL_CODE: "sent"}},
        "immutable": True,
        **code.content,
    }


def check_size(config_map: Dict, place: Path, limit: int) -> None:
    """Raise SpecError for more than `limit` bytes of code. It comes from `place`."""
    size = size_of(config_map)
    if size > limit:
        raise _too_large(place, size, _sizes(config_map), limit)


def size_of(config_map: Dict) -> int:
    """Return the bytes of the code in a ConfigMap, as an API server counts them."""
    texts = child(config_map, "data").values()
    archives = child(config_map, "binaryData").values()
    return sum(len(one.encode()) for one in texts) + sum(len(b64decode(one)) for one in archives)


def _sizes(config_map: Dict) -> dict[str, int]:
    """Return the bytes of each file in a ConfigMap, packed as there, by its path."""
    sizes = {path: len(text.encode()) for path, text in child(config_map, "data").items()}
    for packed in child(config_map, "binaryData").values():
        with zipfile.ZipFile(io.BytesIO(b64decode(packed))) as archive:
            sizes |= {entry.filename: entry.compress_size for entry in archive.infolist()}
    return sizes


def size_note(config_map: Dict, place: Path) -> str:
    """Return advice on large code, or an empty string."""
    size = size_of(config_map)
    if size <= LARGE_BYTES:
        return ""
    return (
        f"{place}: the code has {size:,} bytes, which etcd keeps as long as the job; name what the "
        "job does not need in .ddpjobignore"
    )
