"""The entry point: it parses the command line, joins the process group, and sets the exit code."""

import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ddp_trainer.cli import checkpoints, launch
from ddp_trainer.cli.command_line import Command, parse
from ddp_trainer.cli.options import Options
from ddp_trainer.errors import Interrupted, UserError

# Commands other than workloads. They parse their own arguments.
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "launch": launch.main,
    "export": checkpoints.export,
    "checkpoints": checkpoints.list_checkpoints,
}


def main() -> int:
    """Run one workload, or another command, and return its exit code.

    0 is success, 2 is wrong use, 128 + signal is the end by a signal, 1 is anything else.
    """
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        return COMMANDS[sys.argv[1]](sys.argv[2:])
    command = parse()
    options = command.options
    has_launcher = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    processes = options.processes_alone
    if options.spawn is None and processes > 1 and not has_launcher:
        _print_once_per_node(f"{command.workload} needs several processes; spawning {processes}")
        command = replace(command, options=replace(options, spawn=processes))
    return run(command)


def run(command: Command) -> int:
    """Run a parsed command and return its exit code, as in `main`."""
    # torch is imported from here on, so --help does not wait for it.
    started = time.perf_counter()
    with _fast_imports():
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        if command.options.spawn is None and isinstance(command.options, Options):
            # The first optimizer would import it.
            importlib.import_module("torch._dynamo")

    # torchrun copies the recorded error into its failure summary. A launcher reads it there.
    error_handler = get_error_handler()
    error_handler.initialize()
    try:
        if command.options.spawn is None:
            _train(command, started)
            return 0
        from ddp_trainer.cli.spawn import spawn

        return spawn(run, command)
    except UserError as error:
        error_handler.record_exception(error)
        if error.is_common:
            _print_once_per_node(str(error))
        else:
            _print(f"{_rank_mark()}{error}")
        return error.exit_code
    except Interrupted as interruption:
        error_handler.record_exception(interruption)
        return interruption.exit_code
    except KeyboardInterrupt:
        # Ctrl-C before the training. During the training, the ranks agree to stop.
        return 130
    except Exception as error:
        error_handler.record_exception(error)
        raise


@contextmanager
def _fast_imports() -> Iterator[None]:
    """Import torch without searches for garbage. These take a third of the time.

    `gc.freeze` excludes the imported objects from later searches.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def _train(command: Command, started: float) -> None:
    """Run the workload in this process, alone or as one of the ranks."""
    import torch

    from ddp_trainer.ranks.group import process_group
    from ddp_trainer.ranks.runtime import Runtime

    workload = importlib.import_module(f"ddp_trainer.workloads.{command.workload}")
    train: Callable[[Any, Runtime], None] = workload.train
    options = command.options
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    # torch.distributed.launch passes the local rank as a flag only.
    if options.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(options.local_rank))
    import_seconds = time.perf_counter() - started
    with process_group(
        seed=options.seed,
        timeout=options.timeout,
        device=options.device,
        devices=getattr(workload, "DEVICES", 1),
        init_method=options.init_method,
        tune_cpu=True,
    ) as runtime:
        seconds = {"import": import_seconds, **runtime.seconds}
        train(options, replace(runtime, seconds=seconds))


def _print_once_per_node(message: str) -> None:
    """Print a message on local rank 0, because every node has its own log."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _print(message)


def _rank_mark() -> str:
    """Return the beginning of a message of this rank. The others may not have the message."""
    rank = os.environ.get("RANK")
    return f"rank {rank}: " if rank and os.environ.get("WORLD_SIZE") != "1" else ""


def _print(message: str) -> None:
    print(f"ddp-trainer: {message}", file=sys.stderr, flush=True)
