"""Claims: every start of a job takes the folder of its checkpoints over from the starts before it.

A process of an older attempt, or of an earlier job of the same name, may still run on a cut-off
node. It must not replace the checkpoints of a newer start. No check before a rename can prevent
this, because the process may be paused between the two. Instead:

- Each start claims a number above all numbers in the folder. The names of its checkpoints carry the
  number. The newest checkpoint has the highest number, and among these the highest step.
- A claim is a directory. It contains a directory of the process. Files are written there before
  they are renamed. A newer start moves the older claims away. From then on an older process can
  neither create nor rename a file.

The numbers alone keep the newest checkpoint. So it does no harm if a file system still shows an
older process its directory for a while.
"""

import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from ddp_trainer.checkpoint.file import save_atomically
from ddp_trainer.errors import RetryableError
from ddp_trainer.files import sync_folder

# The directory of a claim. `rm folder/*` leaves it, so the numbers continue.
CLAIM_NAME = re.compile(r"\.claim-g(\d{4,})")

# Checkpoints of releases without claims have no number. This counts as 0. Up to steps of ten
# digits, alphabetical order equals the order of numbers and steps, and old names come first. If a
# sharded checkpoint of a step exists already, the next one of this step has a number of its own.
FILE_NAME = re.compile(r"step-(?:g(\d{4,})-)?(\d{10,})(?:-(\d+))?\.(?:pt|sharded)")

# The suffix of a directory with a sharded checkpoint.
SHARDED = ".sharded"

# Every name with a number, also of an unreadable checkpoint after it was set aside.
NUMBERED = re.compile(r"(?:\.claim|step)-g(\d{4,}).*")


class TakenOver(RetryableError):
    """A newer start has claimed the folder. This process is outdated and must stop."""


@dataclass(frozen=True)
class Claim:
    """One start's claim to the folder of the checkpoints.

    The numbers begin again if the folder is removed. The token then still tells two starts with the
    same number apart.
    """

    folder: Path
    number: int
    token: str = field(default_factory=lambda: uuid4().hex)

    @classmethod
    def take(cls, folder: Path, above: int = 0) -> "Claim":
        """Create `folder`, and claim it with a number greater than `above` and all others.

        Raises OSError if the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        claim = cls._make(folder, above)
        sync_folder(folder)
        claim._evict_older()
        return claim

    @classmethod
    def _make(cls, folder: Path, above: int) -> "Claim":
        """Make the directory of a new claim with the highest number."""
        number = above
        while True:
            number = max(number, _highest_number(folder)) + 1
            claim = cls(folder, number)
            # The first fails if another start has this number, also on NFS. The second fails if a
            # newer start has already moved the first away.
            with suppress(FileExistsError, FileNotFoundError):
                claim.directory.mkdir()
                claim.workspace.mkdir()
                # Look again. If the first look was outdated, as it may be on NFS, a newer start may
                # have claimed a higher number and moved the directory of this one away.
                if _highest_number(folder) == number:
                    return claim

    def renew(self) -> "Claim":
        """Return a claim of the same start with a higher number, in the place of this one.

        Raises TakenOver if a newer start has the folder, and OSError if it cannot be written.
        """
        self.check()
        claim = Claim(self.folder, self.number + 1)
        # A newer start has a higher number. Its claim must not be evicted, so no free number above
        # it is looked for.
        try:
            claim.directory.mkdir()
            claim.workspace.mkdir()
        except (FileExistsError, FileNotFoundError) as error:
            raise self._taken_over() from error
        if _highest_number(self.folder) != claim.number:
            shutil.rmtree(claim.directory, ignore_errors=True)
            raise self._taken_over()
        sync_folder(self.folder)
        claim._evict_older()
        return claim

    def _evict_older(self) -> None:
        """Remove the directories of older claims with their partial files."""
        for directory in self.folder.iterdir():
            match = CLAIM_NAME.fullmatch(directory.name)
            if match and int(match[1]) < self.number:
                # Move it first. A removal takes several steps, and the older process could create
                # another file in between. If it cannot be moved, the numbers are enough.
                evicted = self.directory / directory.name
                with suppress(OSError):
                    directory.rename(evicted)
                shutil.rmtree(evicted, ignore_errors=True)

    @property
    def directory(self) -> Path:
        """Return the directory of the claim. Only one start can make it."""
        return self.folder / f".claim-g{self.number:04d}"

    @property
    def workspace(self) -> Path:
        """Return the directory for partial files. It exists as long as the claim is valid."""
        return self.directory / self.token

    def check(self) -> None:
        """Raise TakenOver if the claim is lost. This is for messages: `write` is safe without.

        Raises RetryableError if the folder or the claim is gone, and no other start has it.
        """
        try:
            if self.workspace.is_dir():
                return
            has_successor = self.folder.is_dir() and self._has_successor()
        except OSError:
            # The file system failed. The claim may still be valid.
            return
        if has_successor:
            raise self._taken_over()
        # Making the folder again would hide a missing volume. The rest of the run would be written
        # to the disk below it.
        raise RetryableError(
            f"{self.folder}: this folder was removed or emptied during the run, or its volume is "
            "no longer there; start again when the folder is back, or without its checkpoints"
        )

    def _has_successor(self) -> bool:
        """Return True if another start has claimed the folder."""
        matches = (CLAIM_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return any(int(match[1]) >= self.number for match in matches if match)

    def _taken_over(self) -> TakenOver:
        return TakenOver(
            f"{self.folder}: another start of this job has taken over this folder; this process "
            "is outdated and stops; jobs that run at the same time need different folders"
        )

    def write(self, path: Path, state: Mapping[str, Any]) -> None:
        """Write a state by torch.save to `path` in the folder, if the claim is not lost.

        Raises TakenOver if it is lost, and OSError if the file cannot be written.
        """
        try:
            # If the claim is lost, the partial file is gone, and the rename fails.
            save_atomically(path, state, partial_folder=self.workspace)
        except OSError:
            self.check()
            raise

    def make_draft(self, step: int) -> tuple[Path, Path]:
        """Make a directory in the workspace for a sharded checkpoint.

        Return (the later path of the checkpoint, the directory). Raises TakenOver if the claim is
        lost, and OSError if the directory cannot be made.
        """
        path = checkpoint_path(self.folder, self.number, step, SHARDED)
        # A directory cannot replace another one, and the newest has the highest number.
        versions = map(version_of, list_checkpoints(self.folder))
        numbers = [found[2] for found in versions if found[:2] == (self.number, step)]
        if numbers:
            path = path.with_name(f"{path.stem}-{max(numbers) + 1}{SHARDED}")
        draft = self.workspace / path.name
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
        except OSError:
            self.check()
            raise
        return path, draft

    def commit(self, draft: Path, path: Path) -> None:
        """Give a complete directory of the workspace its name in the folder.

        Raises TakenOver if the claim is lost, and OSError if the directory cannot be renamed.
        """
        try:
            sync_folder(draft)
            # If the claim is lost, the draft is gone.
            draft.rename(path)
            sync_folder(self.folder)
        except OSError:
            self.check()
            raise

    def list_files(self) -> list[Path]:
        """Return the checkpoints of this start and of older ones, the newest first.

        Those of newer starts are left out, so an outdated process does not remove them.
        """
        found = list_checkpoints(self.folder)
        return [path for path in found if version_of(path)[0] <= self.number]


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of all starts, the newest first. Raises OSError."""
    # File times would not help: they differ between nodes and copies.
    found = [path for path in folder.iterdir() if FILE_NAME.fullmatch(path.name)]
    return sorted(found, key=version_of, reverse=True)


def checkpoint_path(folder: Path, number: int, step: int, suffix: str = ".pt") -> Path:
    """Return the path of the checkpoint of the start with this number after `step`."""
    return folder / f"step-g{number:04d}-{step:010d}{suffix}"


def version_of(path: Path) -> tuple[int, int, int]:
    """Return the numbers in a checkpoint's name: of the start, of the step, and within the step."""
    match = FILE_NAME.fullmatch(path.name)
    assert match, path
    return int(match[1] or 0), int(match[2]), int(match[3] or 1)


def _highest_number(folder: Path) -> int:
    """Return the highest number of a claim or file in `folder`, or 0."""
    matches = (NUMBERED.fullmatch(path.name) for path in folder.iterdir())
    return max((int(match[1]) for match in matches if match), default=0)
