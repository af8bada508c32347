"""`python -m ddp_trainer launch --train-script SCRIPT …`: torchrun on each node of a cluster that somebody else has started.

SageMaker and Slurm start one process a node and describe the cluster in its environment. From that this builds torchrun's
command, the same on every node but for the node's own number. What stands behind it is for the script, byte for byte.
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_trainer.errors import UserError

PORT = 29400  # torchrun's own default
PORTS = 3000  # up to 32,399: above begin the ports that Linux gives to outgoing connections
OPTION = "--train-script"
JOIN_SECONDS = 1800  # nodes of one job do not start at the same second
USAGE = f"""\
usage: ddp-trainer launch {OPTION} SCRIPT [ARGUMENT ...]

Run SCRIPT (a file, or a module's name) under torchrun, on the cluster that the environment describes: SageMaker
(SM_HOSTS, SM_CURRENT_HOST, SM_NUM_GPUS, SM_NUM_NEURONS, SAGEMAKER_JOB_NAME), Slurm (SLURM_STEP_NODELIST, SLURM_NODEID,
SLURM_GPUS_ON_NODE, SLURM_JOB_ID), or this machine alone. One process a GPU (on SageMaker also a NeuronCore), one where there
are none, or PET_NPROC_PER_NODE of them a node. RDZV_PORT is the port of the rendezvous. Under torchrun already, as in a
DDPJob, SCRIPT is run as it is. All other arguments are SCRIPT's.
"""


@dataclass(frozen=True)
class Cluster:
    """The nodes in the order of their ranks, which of them this is, processes a node, and the rendezvous."""

    nodes: tuple[str, ...]
    index: int
    processes: int | None  # None: what PET_NPROC_PER_NODE says, which torchrun reads itself
    job: str
    port: int = PORT


def main(arguments: Sequence[str]) -> int:
    """Run the script; returns its exit code, 128 + signal after a signal, 2 for wrong use."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    try:
        script, rest = take_out_script(arguments)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            os.execv(
                sys.executable, [sys.executable, "-u", *_python(script), *rest]
            )  # unbuffered, as torchrun does
        return _torchrun([*torchrun_arguments(cluster(os.environ)), *_script(script)], rest)
    except UserError as error:
        print(f"ddp-trainer: {error}", file=sys.stderr)
        return 2


def take_out_script(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The script and all other arguments as they are. Raises UserError unless the script is named exactly once."""
    script, rest, words = [], [], iter(arguments)
    for word in words:
        if word == OPTION:
            script.append(next(words, ""))
        elif word.startswith(f"{OPTION}="):
            script.append(word.partition("=")[2])
        else:
            rest.append(word)
    if len(script) != 1 or not script[0]:
        raise UserError(
            f"launch needs {OPTION} with a file or a module, once; it is there {len(script)} times"
        )
    return script[0], rest


def cluster(environment: Mapping[str, str]) -> Cluster | None:
    """What the environment says of the cluster; None where it says nothing. Raises UserError where it says half."""
    if "SM_HOSTS" in environment:
        return _sagemaker(environment)
    if "TRAINING_JOB_NAME" in environment:
        raise UserError(
            "this is a SageMaker job without SM_HOSTS, so every host would train alone: the image needs SageMaker's "
            "training toolkit, which sets it"
        )
    if "SLURM_STEP_NODELIST" in environment:
        return _slurm(environment)
    if len(expand(environment.get("SLURM_JOB_NODELIST", "one"))) > 1:
        raise UserError(
            "this is a Slurm job of several nodes, and only one of them runs this: start it on each with "
            "srun --ntasks-per-node=1"
        )
    return None


def _sagemaker(environment: Mapping[str, str]) -> Cluster:
    try:
        hosts = tuple(sorted(json.loads(environment["SM_HOSTS"]), key=_natural))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"SM_HOSTS is {environment['SM_HOSTS']!r}, no JSON list of names"
        ) from error
    current = environment.get("SM_CURRENT_HOST", "")
    if current not in hosts:
        raise UserError(
            f"SM_CURRENT_HOST is {current!r}, which is none of SM_HOSTS ({', '.join(hosts)})"
        )
    return Cluster(
        hosts,
        hosts.index(current),
        _processes(environment, "SM_NUM_GPUS", "SM_NUM_NEURONS"),
        environment.get("SAGEMAKER_JOB_NAME")
        or environment.get("TRAINING_JOB_NAME")
        or "sagemaker",
        _number(environment, "RDZV_PORT", PORT),
    )


def _slurm(environment: Mapping[str, str]) -> Cluster:
    nodes = expand(
        environment["SLURM_STEP_NODELIST"]
    )  # of the step, as SLURM_NODEID; a job may have more
    if len(nodes) > 1 and not environment.get("SLURM_NODEID"):
        raise UserError(
            "SLURM_STEP_NODELIST has several nodes and SLURM_NODEID is not set, so each would take itself for the first: pass "
            "Slurm's variables on to where this runs (in a container, too)"
        )
    index = _number(environment, "SLURM_NODEID", 0)
    if index >= len(nodes):
        raise UserError(f"SLURM_NODEID is {index}, and SLURM_STEP_NODELIST has {len(nodes)} nodes")
    if _number(environment, "SLURM_LOCALID", 0) > 0:
        raise UserError(
            "Slurm started several launchers on a node: start one (srun --ntasks-per-node=1), it starts the rest"
        )
    job = _number(environment, "SLURM_JOB_ID", 0)
    return Cluster(
        nodes,
        index,
        _processes(environment, "SLURM_GPUS_ON_NODE"),
        f"{job}-{environment.get('SLURM_RESTART_COUNT', '0')}",  # a requeued job keeps its id
        _number(environment, "RDZV_PORT", PORT + job % PORTS),  # jobs may share a node
    )


def _processes(environment: Mapping[str, str], *devices: str) -> int | None:
    """Processes a node: as many as the first of these variables that is above 0 says, else one; None if the user has chosen."""
    if environment.get("PET_NPROC_PER_NODE"):
        return None
    return next((number for name in devices if (number := _number(environment, name, 0))), 1)


def expand(nodes: str) -> tuple[str, ...]:
    """Slurm's node list as names: `gpu[08-10,12],login` are gpu08, gpu09, gpu10, gpu12 and login, as scontrol prints them.

    Written here because the one library that is kept up for this, python-hostlist, is under the GPL.
    Raises UserError where the brackets do not match.
    """
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes):
        names += _expand_one(part)
    if (
        not names
        or nodes.count("[") != nodes.count("]")
        or len(re.findall(r"\[[^\[\]]*\]", nodes)) != nodes.count("[")
    ):
        raise UserError(f"Slurm's node list is {nodes!r}, which is none")
    return tuple(names)


def _expand_one(part: str) -> list[str]:
    found = re.search(r"\[([^\]]*)\]", part)
    if found is None:
        return [part]
    before, after = part[: found.start()], part[found.end() :]
    middles = []
    for item in found[1].split(","):
        first, _, last = item.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise UserError(f"Slurm's node list has [{found[1]}], which are no numbers")
        middles += [
            str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)
        ]
    return (
        [before + middle + end for middle in middles for end in _expand_one(after)]
        if after
        else [before + middle for middle in middles]
    )


def torchrun_arguments(found: Cluster | None) -> list[str]:
    """torchrun's own arguments, up to the script. One node meets itself at a free port.

    c10d sorts the nodes by their addresses as strings, where algo-10 comes before algo-2. Only the first node's address is
    ever looked up, so the others say something that sorts in their order instead. And torchrun is not left to guess which
    node hosts the store.
    """
    if found is None:
        return ["--standalone"]
    processes = [f"--nproc-per-node={found.processes}"] if found.processes else []
    if len(found.nodes) == 1:
        return ["--standalone", *processes]
    first = found.nodes[0]
    return [
        f"--nnodes={len(found.nodes)}",
        *processes,
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        f"--rdzv-id={found.job}",
        f"--rdzv-endpoint={first}:{found.port}",
        f"--rdzv-conf=is_host={str(found.index == 0).lower()},join_timeout={JOIN_SECONDS},read_timeout={JOIN_SECONDS}",
        f"--local-addr={first if found.index == 0 else f'{first}.{found.index:06}'}",
    ]


def _torchrun(arguments: list[str], rest: list[str]) -> int:
    """Run torchrun in this process, which so gets the signals; its own exit code would be 1 for every failure."""
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import parse_args, run

    if (
        not any(word.startswith("--nproc") for word in arguments)
        and "PET_NPROC_PER_NODE" not in os.environ
    ):
        arguments.insert(0, f"--nproc-per-node={max(1, torch.cuda.device_count())}")
    parsed = parse_args(arguments)  # type: ignore[no-untyped-call]
    parsed.training_script_args = rest  # past its parser, which would take a leading `--` away
    try:
        run(parsed)  # type: ignore[no-untyped-call]
    except RendezvousError as error:
        raise UserError(
            f"the nodes did not meet ({error}): look whether each of them runs this, whether they reach "
            f"{parsed.rdzv_endpoint or 'each other'}, and whether another job has that port (RDZV_PORT names another)"
        ) from error
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)
        code = failed.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def _python(script: str) -> list[str]:
    return [script] if script.endswith(".py") or os.path.isfile(script) else ["-m", script]


def _script(script: str) -> list[str]:
    words = _python(script)
    return words if len(words) == 1 else ["--module", script]


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if text and (not text.isdecimal() or (name == "RDZV_PORT" and int(text) > 65535)):
        raise UserError(
            f"{name} is {text!r}, which is no number{' of a port' if name == 'RDZV_PORT' else ''}"
        )
    return int(text or default)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts algo-2 before algo-10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]
