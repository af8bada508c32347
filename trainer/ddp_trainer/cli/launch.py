"""Start any script under torchrun on a cluster of SageMaker or Slurm.

`python -m ddp_trainer launch --train-script SCRIPT …` runs on each node. The launchers start one
process per node and describe the cluster in its environment. This module derives torchrun's
arguments from it. All other arguments are passed to the script unchanged.
"""

import os
import sys
from collections.abc import Sequence

from ddp_trainer.cli.clusters import Cluster, find_cluster
from ddp_trainer.errors import UserError

OPTION = "--train-script"

# Seconds. The nodes of a job do not start at the same time.
JOIN_SECONDS = 1800

USAGE = f"""\
usage: ddp-trainer launch {OPTION} SCRIPT [ARGUMENT ...]

Run SCRIPT (a file or the name of a module) under torchrun, on the cluster that the environment
describes: SageMaker (SM_HOSTS, SM_CURRENT_HOST, SM_NUM_GPUS, SM_NUM_NEURONS, SAGEMAKER_JOB_NAME),
Slurm (SLURM_STEP_NODELIST, SLURM_NODEID, SLURM_GPUS_ON_NODE, SLURM_JOB_ID), or this machine alone.
Each node runs one process per GPU (on SageMaker also per NeuronCore), or one process without GPUs.
PET_NPROC_PER_NODE sets another number. RDZV_PORT sets the port of the rendezvous. Under torchrun,
as in a DDPJob, SCRIPT is run directly. All other arguments are passed to SCRIPT.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the script, and return its exit code.

    It is 128 + signal after a signal, and 2 for wrong use.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    try:
        script, rest = take_out_script(arguments)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            # Unbuffered, as under torchrun.
            os.execv(sys.executable, [sys.executable, "-u", *_python_arguments(script), *rest])
        found = find_cluster(os.environ)
        return _torchrun([*torchrun_arguments(found), *_torchrun_script(script)], rest)
    except UserError as error:
        print(f"ddp-trainer: {error}", file=sys.stderr)
        return 2


def take_out_script(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the script, and all other arguments unchanged.

    Raises UserError unless the script is given exactly once.
    """
    scripts = []
    rest = []
    words = iter(arguments)
    for word in words:
        if word == OPTION:
            scripts.append(next(words, ""))
        elif word.startswith(f"{OPTION}="):
            scripts.append(word.partition("=")[2])
        else:
            rest.append(word)
    if len(scripts) != 1 or not scripts[0]:
        raise UserError(
            f"launch: {OPTION} with a file or a module is required once, got {len(scripts)}"
        )
    return scripts[0], rest


def torchrun_arguments(cluster: Cluster | None) -> list[str]:
    """Return torchrun's own arguments, without the script.

    c10d sorts the nodes by their addresses as strings, and algo-10 comes before algo-2. Only the
    address of the first node is ever looked up. So the other nodes use addresses that sort in their
    order. torchrun does not have to guess the host of the store.
    """
    if cluster is None:
        return ["--standalone"]
    processes = []
    if cluster.processes:
        processes = [f"--nproc-per-node={cluster.processes}"]
    if len(cluster.nodes) == 1:
        return ["--standalone", *processes]
    first = cluster.nodes[0]
    is_host = cluster.index == 0
    conf = {
        "is_host": str(is_host).lower(),
        "join_timeout": JOIN_SECONDS,
        "read_timeout": JOIN_SECONDS,
    }
    return [
        f"--nnodes={len(cluster.nodes)}",
        *processes,
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        f"--rdzv-id={cluster.job}",
        f"--rdzv-endpoint={first}:{cluster.port}",
        f"--rdzv-conf={','.join(f'{key}={value}' for key, value in conf.items())}",
        f"--local-addr={first if is_host else f'{first}.{cluster.index:06}'}",
    ]


def _torchrun(arguments: list[str], rest: list[str]) -> int:
    """Run torchrun in this process, and return the exit code of the first failure.

    This process then receives the signals. torchrun's own exit code would be 1 for every failure.
    """
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import parse_args, run

    has_processes = any(word.startswith("--nproc") for word in arguments)
    if not has_processes and "PET_NPROC_PER_NODE" not in os.environ:
        arguments.insert(0, f"--nproc-per-node={max(1, torch.cuda.device_count())}")
    parsed = parse_args(arguments)  # type: ignore[no-untyped-call]
    # torchrun's parser would remove a leading `--`.
    parsed.training_script_args = rest
    try:
        run(parsed)  # type: ignore[no-untyped-call]
    except RendezvousError as error:
        raise UserError(
            f"the nodes did not meet ({error}); check that each node runs this command, that they "
            f"reach {parsed.rdzv_endpoint or 'each other'}, and that no other job uses that port "
            "(RDZV_PORT sets another one)"
        ) from error
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)
        code = failed.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def _python_arguments(script: str) -> list[str]:
    """Return Python's arguments for a file or a module."""
    is_file = script.endswith(".py") or os.path.isfile(script)
    return [script] if is_file else ["-m", script]


def _torchrun_script(script: str) -> list[str]:
    """Return torchrun's arguments for a file or a module."""
    words = _python_arguments(script)
    return words if len(words) == 1 else ["--module", script]
