"""`--spawn N`: the ranks of one machine as children of this process, for a machine where nothing like torchrun starts them."""

import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from ddp_trainer.cli.options import Command
from ddp_trainer.errors import UserError
from ddp_trainer.interrupt import GRACE, SIGNALS

Run = Callable[[Command], int]


def spawn(run: Run, command: Command) -> int:
    """Run the command in `--spawn` processes; returns the exit code of the first that failed, or 0.

    Signals are passed on to the children, which stop after a checkpoint. Raises UserError under a launcher: there each
    of its processes would start N more, and all of them would claim the same ranks and the same port.
    """
    launched = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ]
    if launched:
        raise UserError(
            f"--spawn starts the processes itself, but {launched[0]} is set: something like torchrun has started this "
            "process as one of several already, and each of them would start as many again, all with the same ranks. "
            "Leave --spawn out, or start with plain python"
        )
    processes = command.options.spawn
    assert processes is not None
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # as torchrun does: N processes with all threads each would fight
    alone = replace(command, options=replace(command.options, spawn=None))
    context = start_processes(  # type: ignore[no-untyped-call]
        _child,
        args=(run, alone, processes, _free_port()),
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
        if error.exit_code < 0:
            print(
                f"ddp-trainer: rank {error.error_index} was ended by {error.signal_name}; "
                "by SIGKILL where the machine has no memory left",
                file=sys.stderr,
            )
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    except ProcessRaisedException as error:
        print(error.msg, file=sys.stderr)
        return 1
    return 0


def _child(rank: int, run: Run, command: Command, processes: int, port: int) -> None:
    here = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
    }
    os.environ.update(
        {name: str(value) for name, value in here.items()}, RANK=str(rank), LOCAL_RANK=str(rank)
    )
    # By this variable torch_xla sees that the others describe the processes, and takes its core from them.
    os.environ["TORCHELASTIC_RUN_ID"] = "spawn"
    raise SystemExit(run(command))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
