"""The entry: reads the command line, joins the process group, and turns errors into exit codes."""

import importlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ddp_trainer.cli import launch
from ddp_trainer.cli import options as command_line
from ddp_trainer.errors import Interrupted, UserError


def main() -> int:
    """Run one workload. Exit codes: 0 success, 2 wrong use, 128 + signal after a signal, 1 anything else."""
    if sys.argv[1:2] == [
        "launch"
    ]:  # everything else on its command line belongs to somebody's script
        return launch.main(sys.argv[2:])
    command = command_line.parse()
    options = command.options
    if (
        options.spawn is None
        and options.processes_alone > 1
        and not ({"RANK", "WORLD_SIZE"} & set(os.environ))
    ):
        _say(
            f"started alone; {command.workload} needs several processes and spawns {options.processes_alone}"
        )
        command = replace(command, options=replace(options, spawn=options.processes_alone))
    return run(command)


def run(command: command_line.Command) -> int:
    """Run the command; see `main` for the exit code."""
    began = (
        time.perf_counter()
    )  # after the command line: torch is imported below, so that --help need not wait for it

    # torchrun writes what is recorded here into its failure summary, which is how a launcher learns the reason.
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    error_handler = get_error_handler()
    error_handler.initialize()
    try:
        if command.options.spawn is None:
            _train(command, began)
            return 0
        from ddp_trainer.cli.spawn import spawn

        return spawn(run, command)
    except UserError as error:
        error_handler.record_exception(error)
        _say(str(error))
        return 2
    except Interrupted as interruption:
        error_handler.record_exception(interruption)
        return interruption.exit_code
    except (
        KeyboardInterrupt
    ):  # before the training began; from then on it is agreed among the ranks
        return 130
    except Exception as error:
        error_handler.record_exception(error)
        raise


def _train(command: command_line.Command, began: float) -> None:
    """Run the workload in this process, alone or as one of the ranks."""
    from ddp_trainer.runtime import Runtime, process_group

    workload = importlib.import_module(f"ddp_trainer.workloads.{command.workload}")
    train: Callable[[Any, Runtime], None] = workload.train
    options = command.options
    with process_group(
        seed=options.seed,
        threads=options.threads,
        timeout=options.timeout,
        local_rank=options.local_rank,
        device=options.device,
        init_method=options.init_method,
        devices=getattr(workload, "DEVICES", 1),
        import_seconds=time.perf_counter() - began,
    ) as runtime:
        train(options, runtime)


def _say(sentence: str) -> None:
    """Print the sentence once per node: every node has a log of its own."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"ddp-trainer: {sentence}", file=sys.stderr, flush=True)
