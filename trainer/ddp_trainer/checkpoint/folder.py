"""The folder of a job's checkpoints on global rank 0: what is read, written and kept."""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ddp_trainer.checkpoint.claim import (
    SHARDED,
    Claim,
    checkpoint_path,
    list_checkpoints,
    version_of,
)
from ddp_trainer.checkpoint.file import (
    can_be_read_again,
    find_fault,
    find_structural_fault,
    first_line,
    read_structure,
    save_atomically,
)
from ddp_trainer.errors import RetryableError, UserError, path_error
from ddp_trainer.files import check_writable, write_atomically

# The file of a sharded checkpoint with everything outside its shards.
INDEX = "index.pt"

# The file with the step, the name and the score of the best checkpoint.
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


# The fault of a checkpoint removed after the listing. An older process may still remove all but its
# newest checkpoints.
GONE = Fault("it was removed", is_damage=False)

# The fault of a symbolic link to a missing file.
DANGLING = Fault("it is a symbolic link to a file that does not exist", is_damage=False)


def read_with_patience(read: Callable[[], Value]) -> Value | Fault:
    """Return the result of `read`, or a fault if it raises OSError repeatedly.

    A missing file counts as damage after the last try. On a network file system it may become
    visible between two tries.
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
    """The rule for keeping checkpoints.

    - `newest`: so many of the newest are kept. With two, one is left if the newest cannot be read.
    - `every`: every checkpoint at a multiple of so many steps is kept too.

    The one with the highest score is always kept. Raises ValueError if a number is below 1.
    """

    newest: int = 2
    every: int | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        for name, value in (("newest", self.newest), ("every", self.every)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: must be an integer >= 1, got {value}")

    def find_superfluous(self, paths: list[Path], best: Path | None) -> list[Path]:
        """Return the superfluous ones of `paths`. These are sorted by importance, highest first."""
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
    def read(cls, folder: Path | str) -> "Best | None":
        """Return the best checkpoint in a folder, or None if there is none with a score."""
        folder = Path(folder)
        try:
            found = json.loads((folder / BEST).read_text())
            best = cls(int(found["step"]), str(found["file"]), float(found["score"]))
        except (OSError, ValueError, TypeError, KeyError):
            # There is none yet, or somebody has changed it.
            return None
        is_usable = math.isfinite(best.score) and (folder / best.file).exists()
        return best if is_usable else None


@dataclass(frozen=True)
class Choice:
    """The checkpoints allowed for a restore: all, those of a step, or the best.

    It is false if all are allowed.
    """

    step: int | None = None
    best: bool = False

    def __bool__(self) -> bool:
        return self.best or self.step is not None

    def of(self, paths: list[Path]) -> list[Path]:
        """Return the allowed ones of `paths`, the checkpoints in a folder."""
        if self.step is not None:
            return [path for path in paths if version_of(path)[1] == self.step]
        if self.best:
            best = Best.read(paths[0].parent) if paths else None
            return [path for path in paths if best and path.name == best.file]
        return paths

    def require_any(self, found: list[Path], folder: Path) -> None:
        """Raise UserError if the folder does not have the requested checkpoint."""
        if not self or self.of(found):
            return
        if self.best:
            raise UserError(f"{folder} has no checkpoint with a score, so none is the best")
        steps = sorted({version_of(path)[1] for path in found})
        raise UserError(
            f"{folder} has no checkpoint of step {self.step}; it has "
            f"{'those of ' + ', '.join(map(str, steps)) if steps else 'none'}"
        )


ANY = Choice()


@dataclass(frozen=True)
class Target:
    """The path of a checkpoint, and the draft of a sharded one until it is complete.

    `number` counts the checkpoints of this start, from 1.
    """

    number: int
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
        # The checkpoint restored by this start, and the last one of its claim.
        self._origin: Path | None = None
        self._last: Path | None = None

    @property
    def claim(self) -> Claim:
        """Return this start's claim to the folder. It is taken at the first access."""
        with self.explained(f"cannot write the checkpoint to {self.path}"):
            if self._claim is None:
                self._claim = Claim.take(self.path)
                self.best = Best.read(self.path)
        return self._claim

    def take_over(self) -> None:
        """Claim the folder before it is read.

        If a start claimed the folder only at its first save, it could take it over from a later
        start.
        """
        if self._claim is None:
            check_writable(self.path)
        self.claim.check()

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Raise a UserError with the text `what` in the place of an OSError."""
        try:
            yield
        except OSError as error:
            if self._claim is not None:
                self._claim.check()
            has_worked = self._claim is not None
            message = f"{what}: {error.strerror or error}"
            raise path_error(message, error, has_worked=has_worked) from error

    # Reading

    def candidates(self, choice: Choice = ANY) -> list[Path]:
        """Return the allowed checkpoints, the newest first."""
        with self.explained(f"cannot read the checkpoints in {self.path}"):
            found = self.claim.list_files()
        choice.require_any(found, self.path)
        return choice.of(found)

    def find_fault(self, path: Path) -> Fault | None:
        """Return why a checkpoint is not readable, or None.

        Of a sharded checkpoint it reads the index only.
        """
        file = index_of(path)
        if not path.exists():
            # The storage behind a link may come back later.
            return DANGLING if path.is_symlink() else GONE
        found = read_with_patience(lambda: find_fault(file))
        if isinstance(found, Fault):
            if not path.exists():
                return GONE
            return Fault(f"{file.name}: {found.reason}", found.is_damage)
        return Fault(found) if found else None

    def look_ahead(self, choice: Choice) -> tuple[Path, Any] | None:
        """Return (the first allowed checkpoint, its structure), without a claim.

        Return None if there is none, or if it cannot be read. Raises UserError if the chosen one
        does not exist, or if a newer release has made it.
        """
        found: list[Path] = []
        with self.explained(f"cannot read the checkpoints in {self.path}"):
            # `take_over` makes a missing folder.
            if self.path.is_dir():
                found = list_checkpoints(self.path)
        choice.require_any(found, self.path)
        for path in choice.of(found)[:1]:
            file = index_of(path)
            with suppress(OSError):
                if find_structural_fault(file) is None:
                    return path, read_structure(file)
        return None

    def require_empty(self) -> None:
        """Raise UserError if the folder has checkpoints already."""
        with self.explained(f"cannot read the checkpoints in {self.path}"):
            has_some = self.path.is_dir() and list_checkpoints(self.path)
        if has_some:
            raise UserError(
                f"{self.path} has checkpoints of an earlier start; call restore() before the first "
                "save, or use another folder"
            )

    def set_aside(self, paths: list[Path]) -> None:
        """Rename unreadable checkpoints, so they do not take the place of good ones."""
        for path in paths:
            with suppress(OSError):
                path.rename(path.with_suffix(".unreadable"))

    def continue_from(self, path: Path) -> None:
        """Make the checkpoints from now on newer than `path` and all others.

        If this start has saved checkpoints after `path`, these would count as newer than the next
        ones. Then the start gets a new number.
        """
        self._origin = path
        with self.explained(f"cannot write the checkpoint to {self.path}"):
            claim = self.claim
            if any(version_of(other) > version_of(path) for other in self._own_files()):
                self._claim = claim.renew()
            is_own = version_of(path)[0] == self.claim.number
            self._last = path if is_own else None

    def _own_files(self) -> list[Path]:
        claim = self.claim
        return [path for path in claim.list_files() if version_of(path)[0] == claim.number]

    # Writing

    def target(self, number: int, step: int, *, is_sharded: bool) -> Target:
        """Return the target of this start's checkpoint `number`, saved after `step`.

        For a sharded one, make its directory.

        Raises UserError if the step is not above the last one: the checkpoint would count as older
        than the last one, and be removed, or take its place. If the checkpoint of a step could not
        be written, the step may be saved again.
        """
        last = version_of(self._last)[1] if self._last else None
        if last is not None and step <= last:
            raise UserError(
                f"save: step {step} is not above {last}, that of the last checkpoint; count the "
                "steps of the whole run, call save_once() if a loop may save a step twice, call "
                "restore(step=…) to go on from an earlier checkpoint, or use another folder for "
                "another phase"
            )
        claim = self.claim
        claim.check()
        if not is_sharded:
            return Target(number, checkpoint_path(claim.folder, claim.number, step))
        with self.explained(f"cannot write the checkpoint to {self.path}"):
            return Target(number, *claim.make_draft(step))

    def write(self, path: Path, state: Mapping[str, Any]) -> None:
        """Write a checkpoint in one file."""
        with self.explained(f"cannot write the checkpoint {path}"):
            self.claim.write(path, state)
            self._require_readable(path, state)

    def commit(self, target: Target, state: Mapping[str, Any]) -> None:
        """Write the index of a sharded checkpoint after its shards, and complete it."""
        assert target.draft is not None
        with self.explained(f"cannot write the checkpoint {target.path}"):
            save_atomically(target.draft / INDEX, state)
            self._require_readable(target.draft / INDEX, state)
            self.claim.commit(target.draft, target.path)

    def _require_readable(self, path: Path, state: Mapping[str, Any]) -> None:
        """Raise UserError if a file cannot be read again.

        This shows an unusable state when it is saved, not when it is needed. The first file is read
        as a whole. Of later ones only the structure is read, to save time.
        """
        reason = find_structural_fault(path) if self._has_checked else find_fault(path)
        self._has_checked = True
        if reason:
            path.unlink()
            guilty = _find_unreadable(state) or state["parts"]
            raise UserError(
                f"the state of {', '.join(guilty)} can be written but not read again "
                f"({reason}); return only tensors, Python's own numbers and strings, and lists and "
                "dicts of them from state_dict()"
            )

    # Keeping

    def keep(self, path: Path, step: int, score: float | None) -> None:
        """Note the score of a complete checkpoint, and remove superfluous ones."""
        self._last = path
        with self.explained(f"cannot write the checkpoint {path}"):
            claim = self.claim
            self._note_score(path, step, score)
            # An outdated process must not remove what the newer start may read. If it is taken over
            # after this check, it still keeps its newest files, and those are read first.
            claim.check()
            best = self.path / self.best.file if self.best else None
            files = sorted(claim.list_files(), key=self._rank_of, reverse=True)
            for old in self._retention.find_superfluous(files, best):
                _remove(old, claim)

    def keep_last(self, step: int, score: float | None) -> Path | None:
        """Note the score of this start's last checkpoint and return its path, if it is of `step`.

        Return None if it is of another step, or if there is none.
        """
        last = self._last
        if last is None or version_of(last)[1] != step:
            return None
        self.keep(last, step, score)
        return last

    def _rank_of(self, path: Path) -> tuple[Any, ...]:
        """Return a checkpoint's sort key for `keep`: those with the highest keys are kept.

        This start's checkpoints have the highest keys, then the one restored by it. Some of the
        others may be newer than the restored one, but are unreadable or given up.
        """
        is_own = version_of(path)[0] == self.claim.number
        return is_own, not is_own and path == self._origin, version_of(path)

    def _note_score(self, path: Path, step: int, score: float | None) -> None:
        if self.best and not (self.path / self.best.file).exists():
            # It was set aside, or somebody has removed it.
            self.best = None
        # JSON has neither NaN nor infinity, and nothing would be better than infinity.
        if score is None or not math.isfinite(score):
            return
        if self.best and score <= self.best.score:
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


def index_of(path: Path) -> Path:
    """Return the file of a checkpoint with everything outside its shards."""
    return path / INDEX if path.suffix == SHARDED else path


def _find_unreadable(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the unreadable parts in a checkpoint's state."""
    parts = {**state["parts"]}
    for rank, own in enumerate(state["rank_parts"]):
        parts |= {f"{name} of rank {rank}": part for name, part in own.items()}
    return [name for name, part in parts.items() if not can_be_read_again(part)]


def _remove(path: Path, claim: Claim) -> None:
    if path.suffix != SHARDED:
        path.unlink(missing_ok=True)
        return
    # Move it first, so no start finds a part of it.
    removed = claim.workspace / path.name
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def write_and_report(write: Callable[[], None], report: Callable[[], None], path: Path) -> None:
    """Write a checkpoint. Raises UserError for every error, so the ranks can exchange it."""
    try:
        write()
        report()
    except UserError:
        raise
    except Exception as error:
        # Storage and network may work in another attempt.
        kind = RetryableError if isinstance(error, OSError | RuntimeError) else UserError
        raise kind(f"cannot write the checkpoint {path}: {first_line(error)}") from error
