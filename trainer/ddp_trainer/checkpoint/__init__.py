"""Checkpoints: saving the parts of a run, choosing which files to keep, and loading them again.

`checkpoints` has Checkpoints, the class for scripts. A checkpoint is one file (`file`), or one
directory if FSDP2 shards the model (`shards`, `staging`). `folder` and `claim` decide what is in
the folder of a job. `weights` and `listing` read a folder without a process group.

A save passes through five modules, and each does one thing: `checkpoints` copies the state,
`folder` reads the new file as a check, `claim` refuses an outdated process, `file` knows the
format, and `ddp_trainer.files` renames the complete file.

May import `errors`, `files` and `ranks`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_trainer.checkpoint.checkpoints import Checkpoints as Checkpoints


def __getattr__(name: str) -> Any:
    # Programs that only read a folder do not need the imports for saving.
    if name != "Checkpoints":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ddp_trainer.checkpoint.checkpoints import Checkpoints

    return Checkpoints
