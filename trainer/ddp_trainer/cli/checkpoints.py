"""The commands for checkpoints: they read a folder, and do not disturb a job running in it."""

import argparse
import sys
from collections.abc import Sequence

from ddp_trainer.errors import UserError


def export(arguments: Sequence[str]) -> int:
    """Write a part of a checkpoint to a file for other programs. Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="ddp-trainer export",
        description="Write the weights in a checkpoint, whole also if they are in shards, to a "
        "file for other programs. A job may be running in the folder.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="file .pt or directory .sharded")
    parser.add_argument(
        "out",
        metavar="OUT",
        help="file that ends in .safetensors, or in .pt or .pth for a state dict by torch.save",
    )
    parser.add_argument("--part", default="model", metavar="NAME", help="default: model")
    options = parser.parse_args(arguments)

    # torch is imported from here on, so --help does not wait for it.
    from ddp_trainer.checkpoint.weights import export

    try:
        export(options.checkpoint, options.out, options.part)
    except UserError as error:
        return _fail(error)
    return 0


def list_checkpoints(arguments: Sequence[str]) -> int:
    """Print the checkpoints in a folder. Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="ddp-trainer checkpoints",
        description="List the checkpoints in a folder, the newest first: step, size, age, whether "
        "it is complete, and the best one. A job may be running in the folder.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER")
    options = parser.parse_args(arguments)

    from ddp_trainer.checkpoint.listing import describe, listed

    try:
        for line in describe(listed(options.folder)):
            print(line)
    except UserError as error:
        return _fail(error)
    return 0


def _fail(error: UserError) -> int:
    print(f"ddp-trainer: {error}", file=sys.stderr)
    return error.exit_code
