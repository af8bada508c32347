"""`--spawn N`: the ranks of one machine as children of this process, without torchrun."""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from ddp_trainer.cli.command_line import Command
from ddp_trainer.errors import UserError
from ddp_trainer.run.interrupt import GRACE, SIGNALS

Run = Callable[[Command], int]


def spawn(run: Run, command: Command) -> int:
    """Run the command in `--spawn` processes.

    Return the exit code of the first failure, or 0. Signals are passed on to the children. They
    stop after a checkpoint.

    Raises UserError under a launcher: each of its processes would start N more, with the same ranks
    and the same port.
    """
    launched = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ]
    if launched:
        raise UserError(
            f"--spawn cannot be used under a launcher, but {launched[0]} is set; remove --spawn, "
            "or start with plain python"
        )
    processes = command.options.spawn
    assert processes is not None
    # If each process used all cores, they would slow each other down. torchrun does the same.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    command = replace(command, options=replace(command.options, spawn=None))
    # The ranks meet at a store of this process. It has its port before they start, and keeps it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = start_processes(  # type: ignore[no-untyped-call]
        _child,
        args=(run, command, processes, store.port),
        nprocs=processes,
        join=False,
        start_method="spawn",
    )

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in context.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    try:
        while not context.join(grace_period=GRACE):
            pass
    except ProcessExitedException as error:
        if error.exit_code >= 0:
            return error.exit_code
        print(
            f"ddp-trainer: rank {error.error_index} was ended by {error.signal_name}; SIGKILL "
            "often means that the machine has no memory left",
            file=sys.stderr,
        )
        return 128 - error.exit_code
    except ProcessRaisedException as error:
        print(error.msg, file=sys.stderr)
        return 1
    return 0


def _child(rank: int, run: Run, command: Command, processes: int, port: int) -> None:
    """Run one rank, with torchrun's variables."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        # With this variable, torch_xla takes its core from the variables above.
        TORCHELASTIC_RUN_ID="spawn",
        # With these, rank 0 uses the store of its parent, as that of torchrun's agent.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    raise SystemExit(run(command))
