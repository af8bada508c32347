"""Read the pod of a node: its template, and the command of the training in it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddpjob.convert.draft import Draft
from ddpjob.convert.launch import OF_EVERY_SHELL, Launch, read_command
from ddpjob.convert.pods import (
    choose_accelerator,
    drop_lost_mounts,
    find_trainer,
    note_selectors,
    read_template,
)
from ddpjob.convert.scripts import SHELL_PROGRAMS
from ddpjob.convert.settle import refer_to_variables, settle_processes
from ddpjob.core.api import launcher
from ddpjob.core.api.readers import Dict, SpecError, quoted, require_object

# Variables of torchrun that other operators set for its flags.
OF_TORCHRUN = r"PET_(NNODES|NPROC_PER_NODE|NODE_RANK|MASTER_ADDR|MASTER_PORT)"


class Origin(NamedTuple):
    """The pods of another operator: the container that trains, and the variables set there.

    `variables` is a pattern for their names. `of_nodes` are those with the number of a node.
    """

    container: str
    variables: str
    of_nodes: Sequence[str] = ()


def read_node(draft: Draft, template: Any, path: str, origin: Origin) -> Launch:
    """Read the template of a node's pod. Raises SpecError."""
    fields = require_object(template, path)
    trainer, where = find_trainer(fields.get("spec"), f"{path}.spec", origin.container)
    read_template(draft, fields, path, origin.container)
    drop_lost_mounts(draft, f"{path}.spec")
    launch = Launch(
        draft,
        f"{where}.command",
        programs=SHELL_PROGRAMS,
        set_before=f"{OF_EVERY_SHELL}|{origin.variables}",
        of_nodes=origin.of_nodes,
    )
    read_command(launch, _words(trainer, where))
    devices = choose_accelerator(draft)
    settle_processes(launch, devices)
    refer_to_variables(launch)
    note_selectors(draft, f"{path}.spec")
    return launch


def _words(trainer: Mapping[str, Any], path: str) -> list[str]:
    """Return the words of a container. Raises SpecError if the image has the first ones."""
    command = _strings(trainer, "command", path)
    args = _strings(trainer, "args", path)
    if command:
        return [*command, *args]
    if args and _begins_a_program(args[0]):
        return args
    what = f"only args, {quoted(args)}" if args else "no command"
    raise SpecError(
        f"{path}: has {what}, so its image starts a program that is not known here; write the "
        "ENTRYPOINT of the image into command, such as [python, train.py]"
    )


def _strings(fields: Dict, key: str, path: str) -> list[str]:
    value = fields.get(key) or []
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise SpecError(f"{path}.{key}: must be a list of strings, got {quoted(value)}")
    return value


def _begins_a_program(word: str) -> bool:
    """Return True if a word is a program rather than an argument."""
    program = word.rpartition("/")[2]
    known = program.startswith("python") or program in (
        *launcher.LAUNCHERS.split("|"),
        "bash",
        "sh",
    )
    return known or word.endswith(".py")
