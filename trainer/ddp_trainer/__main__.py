"""`python -m ddp_trainer WORKLOAD`: reads the command line, joins the process group, and turns errors into exit codes."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from ddp_trainer import options as command_line
from ddp_trainer.errors import Interrupted, UserError


def main() -> int:
    """Run one workload. Exit codes: 0 success, 2 wrong use, 128 + signal after a signal, 1 anything else."""
    options = command_line.parse()
    began = time.perf_counter()  # after the command line: torch is imported below, so that --help need not wait for it

    # torchrun writes what is recorded here into its failure summary, which is how a launcher learns the reason.
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from ddp_trainer import runtime

    train = _workload(options)
    error_handler = get_error_handler()
    error_handler.initialize()
    try:
        with runtime.process_group(
            seed=options.seed, threads=options.threads, import_seconds=time.perf_counter() - began
        ) as this:
            train(options, this)
    except UserError as error:
        error_handler.record_exception(error)
        _say(str(error))
        return 2
    except Interrupted as interruption:
        error_handler.record_exception(interruption)
        return interruption.exit_code
    except KeyboardInterrupt:  # before the training began; from then on it is agreed among the ranks
        return 130
    except Exception as error:
        error_handler.record_exception(error)
        raise
    return 0


def _workload(options: command_line.Options) -> Callable[[Any, Any], None]:
    from ddp_trainer.workloads import cifar10, digits, toy

    if isinstance(options, command_line.ToyOptions):
        return toy.train
    if isinstance(options, command_line.DigitsOptions):
        return digits.train
    assert isinstance(options, command_line.Cifar10Options)
    return cifar10.train


def _say(sentence: str) -> None:
    """Print the sentence once per node: every node has a log of its own."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"ddp-trainer: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
