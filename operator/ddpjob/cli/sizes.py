"""Choose the number of nodes and GPUs for a new manifest."""

import typer

from ddpjob.core.api import profiles
from ddpjob.core.api.names import MAX_NODES
from ddpjob.core.api.readers import SpecError, either


def resolve_nodes(accelerator: str, nodes: int | None) -> int:
    """Return the number of nodes, or the default. Raises BadParameter."""
    # The default is two nodes, because jobs of several nodes are the purpose of DDP.
    if nodes is None:
        return 1 if profiles.catalog()[accelerator].one_node else 2
    if nodes > MAX_NODES:
        message = f"must be at most {MAX_NODES}, got {nodes}"
        raise typer.BadParameter(message, param_hint="--nodes")
    try:
        profiles.check_size(accelerator, nodes, None)
    except SpecError as error:
        message = str(error).removeprefix("spec.nodes: ")
        raise typer.BadParameter(message, param_hint="--nodes") from error
    return nodes


def resolve_gpus(accelerator: str, gpus: int | None, gpus_per_process: int) -> int:
    """Return the number of GPUs of each node, or the default. Raises BadParameter."""
    if gpus is None:
        return gpus_per_process
    fitting = profiles.profiles_per_device()
    if accelerator not in fitting:
        raise typer.BadParameter(f"requires --accelerator {either(fitting)}", param_hint="--gpus")
    if gpus % gpus_per_process:
        raise typer.BadParameter(
            f"must be a multiple of {gpus_per_process}, the GPUs of one process, got {gpus}",
            param_hint="--gpus",
        )
    return gpus
