"""The folder of a job's checkpoints on global rank 0: what is read, written and kept."""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from ddp_trainer.checkpoint_file import (
    find_fault,
    find_structural_fault,
    first_line,
    read_structure,
    save_atomically,
)
from ddp_trainer.claim import FILE_NAME, SHARDED, Claim, checkpoint_path, version_of
from ddp_trainer.errors import RetryableError, UserError, path_error
from ddp_trainer.files import check_writable, write_atomically

# The file of a sharded checkpoint that has all that is not sharded.
INDEX = "index.pt"

# The file that says which checkpoint is the best.
BEST = "best.json"

# Number of tries to read a file, and seconds between them: storage may fail for a moment.
READ_TRIES = 3
RETRY_PAUSE = 0.5

Value = TypeVar("Value")


@dataclass(frozen=True)
class Fault:
    """Why a checkpoint cannot be read.

    With `is_damage`, its content is wrong. Otherwise the storage failed, or the checkpoint was
    removed, and it must not be set aside.
    """

    reason: str
    is_damage: bool = True


# The fault of a checkpoint that was removed after it was listed. An older process may be about to
# remove those that are not its newest.
GONE = Fault("it was removed", is_damage=False)


def read_with_patience(read: Callable[[], Value]) -> Value | Fault:
    """Return what `read` returns, or a fault if it raises OSError repeatedly.

    A file that is not found counts as damage. On a network file system it may become visible later.
    """
    for tries_left in reversed(range(READ_TRIES)):
        try:
            return read()
        except OSError as error:
            if tries_left:
                time.sleep(RETRY_PAUSE)
                continue
            is_damage = isinstance(error, FileNotFoundError)
            return Fault(error.strerror or str(error), is_damage)
    raise AssertionError


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept.

    - `newest`: so many of the newest. With two, one is left if the newest cannot be read.
    - `every`: also those whose step is a multiple of it.

    The one with the highest score is always kept. Raises ValueError if nothing would be kept.
    """

    newest: int = 2
    every: int | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        for name, value in (("newest", self.newest), ("every", self.every)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: must be an integer >= 1, got {value}")

    def find_superfluous(self, paths: list[Path], best: Path | None) -> list[Path]:
        """Return which of `paths`, sorted with the newest first, need not be kept."""
        # Of the checkpoints of a start at one step, the newest replaces the others.
        newest: dict[tuple[int, int], Path] = {}
        for path in paths:
            number, step, _ = version_of(path)
            newest.setdefault((number, step), path)
        kept = {*list(newest.values())[: self.newest], best}
        if self.every:
            kept |= {path for (_, step), path in newest.items() if step % self.every == 0}
        return [path for path in paths if path not in kept]


@dataclass(frozen=True)
class Best:
    """The checkpoint with the highest score: its step, its name in the folder, and the score."""

    step: int
    file: str
    score: float

    @classmethod
    def read(cls, folder: Path) -> "Best | None":
        """Return the best checkpoint in a folder, or None if there is none with a score."""
        try:
            found = json.loads((folder / BEST).read_text())
            best = cls(int(found["step"]), str(found["file"]), float(found["score"]))
        except (OSError, ValueError, TypeError, KeyError):
            # There is none yet, or somebody has changed it.
            return None
        return best if (folder / best.file).exists() else None


@dataclass(frozen=True)
class Target:
    """Where a checkpoint will be, and where a sharded one is until it is complete."""

    path: Path
    draft: Path | None = None


class CheckpointFolder:
    """The checkpoints of one start in the folder `path`. Only global rank 0 uses it.

    The methods raise UserError if the folder cannot be read or written, and TakenOver if a newer
    start has it.
    """

    def __init__(self, path: Path, retention: Retention) -> None:
        self.path = path
        self.best: Best | None = None
        self._retention = retention
        self._claim: Claim | None = None
        self._has_checked = False

    @property
    def claim(self) -> Claim:
        """This start's claim to the folder, which is taken when it is first needed."""
        with self.explained(f"cannot write the checkpoint to {self.path}"):
            if self._claim is None:
                self._claim = Claim.take(self.path)
                self.best = Best.read(self.path)
            elif not self.path.exists():
                # The user removed the folder during the run. Nobody else has a claim to it.
                self._claim = Claim.take(self.path, above=self._claim.number)
                self.best = None
        return self._claim

    def take_over(self) -> None:
        """Claim the folder before it is read.

        A start that claims at its first save only could take the folder over from one that began
        after it.
        """
        check_writable(self.path)
        self.claim.check()

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Raise an error that says what failed in the place of OSError."""
        try:
            yield
        except OSError as error:
            if self._claim is not None:
                self._claim.check()
            raise path_error(f"{what}: {error.strerror or error}", error) from error

    # Reading

    def candidates(self) -> list[Path]:
        """Return the checkpoints that may be read, the newest first."""
        with self.explained(f"cannot read the checkpoints in {self.path}"):
            return self.claim.list_files()

    def find_fault(self, path: Path) -> Fault | None:
        """Return why a checkpoint is not readable, or None.

        Of a sharded checkpoint it reads the index only.
        """
        file = path / INDEX if path.suffix == SHARDED else path
        if not path.exists():
            return GONE
        found = read_with_patience(lambda: find_fault(file))
        if isinstance(found, Fault):
            if not path.exists():
                return GONE
            return Fault(f"{file.name}: {found.reason}", found.is_damage)
        return Fault(found) if found else None

    def newest_identity(self) -> Mapping[str, str | int]:
        """Return whose the newest checkpoint is, without a claim to the folder.

        It is empty if there is none, or if it cannot be read.
        """
        with suppress(Exception):
            found = [path for path in self.path.iterdir() if FILE_NAME.fullmatch(path.name)]
            newest = max(found, key=version_of)
            saved = read_structure(newest / INDEX if newest.suffix == SHARDED else newest)
            return dict(saved["identity"])
        return {}

    def require_empty(self) -> None:
        """Raise UserError if the folder has checkpoints already."""
        if self.path.is_dir() and any(
            FILE_NAME.fullmatch(path.name) for path in self.path.iterdir()
        ):
            raise UserError(
                f"{self.path} has checkpoints of an earlier start; call restore() before the first "
                "save, or use another folder"
            )

    def open_to_read(self, path: Path) -> IO[bytes]:
        """Open a file of a checkpoint."""
        with self.explained(f"cannot read the checkpoint {path}"):
            return path.open("rb")

    def set_aside(self, paths: list[Path]) -> None:
        """Rename unreadable checkpoints, which must not take the place of good ones."""
        for path in paths:
            with suppress(OSError):
                path.rename(path.with_suffix(".unreadable"))

    # Writing

    def target(self, step: int, *, is_sharded: bool) -> Target:
        """Return where the checkpoint of a step goes. Make the directory of a sharded one."""
        claim = self.claim
        claim.check()
        if not is_sharded:
            return Target(checkpoint_path(claim.folder, claim.number, step))
        with self.explained(f"cannot write the checkpoint to {self.path}"):
            return Target(*claim.make_draft(step))

    def write(self, path: Path, state: Mapping[str, Any]) -> None:
        """Write a checkpoint that is one file."""
        with self.explained(f"cannot write the checkpoint {path}"):
            self.claim.write(path, state)
            self._require_readable(path, state)

    def commit(self, target: Target, state: Mapping[str, Any]) -> None:
        """Write the index of a sharded checkpoint, whose shards are written, and complete it."""
        assert target.draft is not None
        with self.explained(f"cannot write the checkpoint {target.path}"):
            save_atomically(target.draft / INDEX, state)
            self._require_readable(target.draft / INDEX, state)
            self.claim.commit(target.draft, target.path)

    def _require_readable(self, path: Path, state: Mapping[str, Any]) -> None:
        """Raise UserError if a file cannot be read again.

        This shows an unusable state when it is saved, not when it is needed. The first file is read
        as a whole. Of later ones only the structure is read, which takes less time.
        """
        reason = find_structural_fault(path) if self._has_checked else find_fault(path)
        self._has_checked = True
        if reason:
            path.unlink()
            raise UserError(
                f"the state of {', '.join(state['parts'])} can be written but not read again "
                f"({reason}); return only tensors, Python's own numbers and strings, and lists and "
                "dicts of them from state_dict()"
            )

    # Keeping

    def keep(self, path: Path, step: int, score: float | None) -> None:
        """Note the score of a new checkpoint, and remove those that it makes superfluous."""
        with self.explained(f"cannot write the checkpoint {path}"):
            claim = self.claim
            self._note_score(path, step, score)
            # An outdated process must not remove what the newer start may read. If it is taken over
            # after this check, it still keeps its newest files, and those are read first.
            claim.check()
            best = self.path / self.best.file if self.best else None
            for old in self._retention.find_superfluous(claim.list_files(), best):
                _remove(old, claim)

    def _note_score(self, path: Path, step: int, score: float | None) -> None:
        if self.best and not (self.path / self.best.file).exists():
            # It was set aside, or somebody has removed it.
            self.best = None
        if score is None or math.isnan(score) or (self.best and score <= self.best.score):
            return
        best = Best(step, path.name, float(score))
        data = json.dumps(asdict(best)).encode()
        write_atomically(
            self.path / BEST,
            lambda file: file.write(data),
            durable=True,
            partial_folder=self.claim.workspace,
        )
        self.best = best


def _remove(path: Path, claim: Claim) -> None:
    if path.suffix != SHARDED:
        path.unlink(missing_ok=True)
        return
    # Move it first, so that no start finds a part of it.
    removed = claim.workspace / path.name
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def write_and_report(write: Callable[[], None], report: Callable[[], None], path: Path) -> None:
    """Write a checkpoint. Raises UserError for every error, which the ranks can exchange."""
    try:
        write()
        report()
    except UserError:
        raise
    except Exception as error:
        # Storage and network may work in another attempt.
        kind = RetryableError if isinstance(error, OSError | RuntimeError) else UserError
        raise kind(f"cannot write the checkpoint {path}: {first_line(error)}") from error
