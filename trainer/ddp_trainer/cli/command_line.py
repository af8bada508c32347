"""The parser of the command line. It does not import torch, so --help answers at once."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import NoReturn

from ddp_trainer.cli.flags import add_flag, default_of, flag_name, own_options_first
from ddp_trainer.cli.options import WORKLOADS, Common

DESCRIPTION = """\
Train a model with one process, with all processes of a machine, or as a DDPJob. The command line is
the same:

  python -m ddp_trainer digits --epochs 10
  torchrun --standalone --nproc-per-node 2 -m ddp_trainer digits --epochs 10
  args: [-m, ddp_trainer, digits, --epochs, "10"]        (in the DDPJob's spec)

`ddp-trainer launch --help` describes how to start any script on SageMaker or Slurm. `ddp-trainer
checkpoints --help` and `ddp-trainer export --help` describe how to list checkpoints, and how to
write their weights to a file for other programs.
"""

EPILOG = """\
Rank 0 prints its progress as one JSON object per line. A workload with --checkpoint-dir resumes
from its newest checkpoint if it is started again with the same flags. At SIGTERM and SIGINT it
writes a checkpoint and exits with 128 + signal. Wrong use exits with 2 (torchrun then exits with
1). The variables DDP_CHECKPOINT_DIR, DDP_RESULT_FILE, DDP_HEARTBEAT_FILE and DDP_TENSORBOARD_DIR
are used if they are set. Flags may have underscores: --batch_size is --batch-size.
"""

INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
UNKNOWN_FLAG = re.compile(r"unrecognized arguments: (--[^ =]*)")


@dataclass(frozen=True)
class Command:
    """A parsed command line."""

    workload: str
    options: Common


def parse(arguments: Sequence[str] | None = None) -> Command:
    """Parse the command line.

    If it is wrong, rank 0 prints a message, and the process exits with 2.
    """
    parser, by_name = _build_parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    words = _move_local_rank_last([_with_hyphens(word) for word in words])
    parsed, unknown = parser.parse_known_args(words)
    values = vars(parsed)
    workload = values["workload"].replace("-", "_")
    if unknown:
        # The parser of the workload knows the flags, and can suggest one.
        by_name[workload].error(f"unrecognized arguments: {' '.join(unknown)}")
    kind = WORKLOADS[workload]
    options = kind(**{option.name: values[option.name] for option in fields(kind)})
    useless = _find_useless_flags(options)
    if useless:
        reason = options.useless.reason
        by_name[workload].error(f"{', '.join(useless)}: no effect {reason}; remove it")
    return Command(workload, options)


def _build_parser() -> tuple["_Parser", dict[str, "_Parser"]]:
    """Return the parser, and those of the workloads by name."""
    parser = _Parser(
        prog="ddp-trainer",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    workloads = parser.add_subparsers(dest="workload", metavar="WORKLOAD", required=True)
    by_name = {}
    for name, kind in WORKLOADS.items():
        # The list of workloads shows the first line of the docstring.
        title, _, details = (kind.__doc__ or "").partition("\n")
        by_name[name] = workloads.add_parser(
            name,
            aliases=[name.replace("_", "-")] if "_" in name else [],
            help=title.rstrip("."),
            description=f"{title} {' '.join(details.split())}",
            allow_abbrev=False,
        )
        for option in own_options_first(kind):
            add_flag(by_name[name], option)
    return parser, by_name


def _find_useless_flags(options: Common) -> list[str]:
    """Return the given flags without effect.

    Values from the environment do not count: they may be meant for other runs.
    """
    names = options.useless.names
    return [
        flag_name(option.name)
        for option in fields(options)
        if option.name in names and getattr(options, option.name) != default_of(option)
    ]


class _Parser(argparse.ArgumentParser):
    """A parser with suggestions for misspelt names. It prints an error on rank 0 only."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            super().error(message + self._suggest(message))
        self.exit(2)

    def _suggest(self, message: str) -> str:
        """Return ` (did you mean …?)` for a misspelt name, or an empty string."""
        choice = INVALID_CHOICE.search(message)
        if choice:
            known = re.findall(r"[\w.-]+", choice[2])
            return _did_you_mean(choice[1], known)
        unknown = UNKNOWN_FLAG.search(message)
        if unknown:
            return _did_you_mean(unknown[1], self._option_string_actions)
        return ""


def _did_you_mean(name: str, known: Sequence[str] | dict[str, argparse.Action]) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _move_local_rank_last(words: list[str]) -> list[str]:
    """Move --local-rank behind the workload.

    torch.distributed.launch puts it before all other arguments.
    """
    if not words or words[0].partition("=")[0] != "--local-rank":
        return words
    count = 1 if "=" in words[0] else 2
    return words[count:] + words[:count]


def _with_hyphens(word: str) -> str:
    """Return a flag with hyphens instead of underscores."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
