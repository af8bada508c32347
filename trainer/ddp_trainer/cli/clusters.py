"""Clusters as SageMaker and Slurm describe them in the environment of a process."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ddp_trainer.errors import UserError

# torchrun's default port of the rendezvous.
PORT = 29400

# Jobs on Slurm use ports from PORT on. Above PORT + PORTS Linux begins to assign ports to outgoing
# connections.
PORTS = 3000
HIGHEST_PORT = 65535

# A list in brackets, and one part of a comma-separated list, also with such brackets.
BRACKETS = re.compile(r"\[([^\[\]]*)\]")
PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")


@dataclass(frozen=True)
class Cluster:
    """The nodes of a job in the order of their ranks, and this node's `index`.

    `processes` per node is None if the user has set PET_NPROC_PER_NODE. torchrun reads it.
    """

    nodes: tuple[str, ...]
    index: int
    processes: int | None
    job: str
    port: int = PORT


def find_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """Return the cluster described by the environment, or None.

    Raises UserError if the description is incomplete.
    """
    if "SM_HOSTS" in environment:
        return _sagemaker(environment)
    if "TRAINING_JOB_NAME" in environment:
        raise UserError(
            "SM_HOSTS is not set in this SageMaker job, so every host would train alone; use an "
            "image with SageMaker's training toolkit, which sets it"
        )
    if "SLURM_STEP_NODELIST" in environment:
        return _slurm(environment)
    if len(expand_node_list(environment.get("SLURM_JOB_NODELIST", "one"))) > 1:
        raise UserError(
            "this Slurm job has several nodes, but only one of them runs this command; start it on "
            "each with srun --ntasks-per-node=1"
        )
    return None


def _sagemaker(environment: Mapping[str, str]) -> Cluster:
    text = environment["SM_HOSTS"]
    try:
        hosts = tuple(sorted(json.loads(text), key=_natural_order))
    except (ValueError, TypeError) as error:
        raise UserError(f"SM_HOSTS: must be a JSON list of names, got {text!r}") from error
    current = environment.get("SM_CURRENT_HOST", "")
    if current not in hosts:
        raise UserError(f"SM_CURRENT_HOST: must be one of {', '.join(hosts)}, got {current!r}")
    job = environment.get("SAGEMAKER_JOB_NAME") or environment.get("TRAINING_JOB_NAME")
    return Cluster(
        nodes=hosts,
        index=hosts.index(current),
        processes=_processes(environment, "SM_NUM_GPUS", "SM_NUM_NEURONS"),
        job=job or "sagemaker",
        port=_read_port(environment, PORT),
    )


def _slurm(environment: Mapping[str, str]) -> Cluster:
    # SLURM_NODEID refers to the nodes of the step. The job may have more.
    nodes = expand_node_list(environment["SLURM_STEP_NODELIST"])
    if len(nodes) > 1 and not environment.get("SLURM_NODEID"):
        raise UserError(
            "SLURM_NODEID is not set, although SLURM_STEP_NODELIST has several nodes; pass Slurm's "
            "variables on to this command, also into a container"
        )
    index = _read_integer(environment, "SLURM_NODEID", 0)
    if index >= len(nodes):
        raise UserError(
            f"SLURM_NODEID: must be less than {len(nodes)}, the number of nodes in "
            f"SLURM_STEP_NODELIST, got {index}"
        )
    if _read_integer(environment, "SLURM_LOCALID", 0) > 0:
        raise UserError(
            "Slurm started several launchers on one node; start one per node with "
            "srun --ntasks-per-node=1, and it starts the other processes"
        )
    job = _read_integer(environment, "SLURM_JOB_ID", 0)
    # A requeued job keeps its id.
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    return Cluster(
        nodes=nodes,
        index=index,
        processes=_processes(environment, "SLURM_GPUS_ON_NODE"),
        job=f"{job}-{restarts}",
        # Several jobs may share a node.
        port=_read_port(environment, PORT + job % PORTS),
    )


def _processes(environment: Mapping[str, str], *devices: str) -> int | None:
    """Return the processes per node: the first of the numbers of devices above 0, or 1.

    Return None if the user has set PET_NPROC_PER_NODE.
    """
    if environment.get("PET_NPROC_PER_NODE"):
        return None
    for name in devices:
        number = _read_integer(environment, name, 0)
        if number:
            return number
    return 1


def _read_integer(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if text and not text.isdecimal():
        raise UserError(f"{name}: must be an integer, got {text!r}")
    return int(text or default)


def _read_port(environment: Mapping[str, str], default: int) -> int:
    port = _read_integer(environment, "RDZV_PORT", default)
    if port > HIGHEST_PORT:
        raise UserError(f"RDZV_PORT: must be at most {HIGHEST_PORT}, got {port}")
    return port


def expand_node_list(text: str) -> tuple[str, ...]:
    """Return the names in Slurm's node list, as scontrol prints them.

    `gpu[08-10,12],login` has the nodes gpu08, gpu09, gpu10, gpu12 and login. The one maintained
    library for this, python-hostlist, has the GPL as its licence.

    Raises UserError if the brackets do not match.
    """
    groups = len(BRACKETS.findall(text))
    is_balanced = text.count("[") == text.count("]") == groups
    nodes: list[str] = []
    for part in PART.findall(text):
        nodes += _expand_part(part)
    if not nodes or not is_balanced:
        raise UserError(f"cannot parse Slurm's node list {text!r}")
    return tuple(nodes)


def _expand_part(part: str) -> list[str]:
    """Return the names of one part, such as `gpu[08-10,12]`."""
    found = BRACKETS.search(part)
    if found is None:
        return [part]
    before = part[: found.start()]
    after = part[found.end() :]
    names = []
    for middle in _expand_numbers(found[1]):
        for end in _expand_part(after):
            names.append(before + middle + end)
    return names


def _expand_numbers(text: str) -> list[str]:
    """Return the numbers in brackets, zero-padded: `08-10,12` is 08, 09, 10, 12."""
    numbers = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        last = last or first
        if not first.isdecimal() or not last.isdecimal():
            raise UserError(f"Slurm's node list: must have numbers in brackets, got [{text}]")
        for number in range(int(first), int(last) + 1):
            numbers.append(str(number).zfill(len(first)))
    return numbers


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts algo-2 before algo-10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]
