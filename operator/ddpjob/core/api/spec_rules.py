r"""The rules across fields of a spec: a row has our check, and the clauses of the API server.

A check names what it has found. A clause cannot: its message is a constant. Nothing translates one
into the other. tests/apiserver compares them on thousands of specs.

CEL has no list of words in a pattern, so words are joined with \x1f. No command has this character.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ddpjob.core.api import launcher, names, pod_fields, profiles
from ddpjob.core.api.pod_fields import OWNED_POD_FIELDS, OWNED_TRAINER_FIELDS, POD_TEMPLATE
from ddpjob.core.api.profiles import Profile
from ddpjob.core.api.queue import LABEL_QUEUE
from ddpjob.core.api.readers import SpecError, either, normal_path
from ddpjob.core.api.spec import MAX_PROCESSES, MOUNT_PATH, RDZV_NAME, RDZV_VALUE, Written
from ddpjob.core.api.torchrun_flags import FLAGS


@dataclass(frozen=True)
class Clause:
    """A sentence of the API server, and the expression that holds for a good spec.

    `field` is the path of the field in the sentence, below the object of the rule.
    """

    message: str
    cel: str
    field: str = ""


@dataclass(frozen=True)
class Rule:
    """A rule across fields. Its clauses are about the object `at`, a path below `spec`.

    `check` raises SpecError. It is None if reading the fields has already done so.
    """

    at: str
    clauses: tuple[Clause, ...]
    check: Callable[[Written], None] | None = None


def check_rules(written: Written) -> None:
    """Raise SpecError for the first broken rule of a spec."""
    for rule in RULES:
        if rule.check:
            rule.check(written)


# The words of torchrun

WORD = r"\x1f"
TORCHRUN = rf"^([^{WORD}]*/)?(torchrun|python[^/{WORD}]*{WORD}-m{WORD}torch[.]distributed[.]run)"
IS_TORCHRUN = f".join('{WORD}').matches('{TORCHRUN}({WORD}|$)')"
ALL_WORDS = "(self.torchrun.command + (has(self.torchrun.args) ? self.torchrun.args : []))"
NO_PYTHON = f"{ALL_WORDS}.exists(word, word in {list(launcher.NO_PYTHON)})"
STARTER = f"{launcher.LAUNCHERS}|{launcher.STARTERS}"
SET_FLAGS = [flag.name for flag in FLAGS if flag.is_set]
FIRST_FLAG = "self.args[0].split('=')[0]"


def _flags() -> str:
    """Return the pattern of a list of working flags, each word after a separator."""
    working = [flag for flag in FLAGS if not flag.instead]
    alone = "|".join(name for flag in working if not flag.takes_value for name in flag.spellings)
    with_value = "|".join(name for flag in working if flag.takes_value for name in flag.spellings)
    value = f"(=[^{WORD}]*|{WORD}([^-{WORD}][^{WORD}]*)?)"
    return f"({WORD}({alone}|({with_value}){value}))*$"


WORKING_FLAGS = [flag.name for flag in FLAGS if not flag.instead]
ONLY_FLAGS = (
    f"may have only these flags of torchrun: {', '.join(WORKING_FLAGS[:-1])} and "
    f"{WORKING_FLAGS[-1]}; the others have fields of their own, such as nodes or failurePolicy, or "
    "do not work in a DDPJob; the script belongs to args"
)

COMMAND = Rule(
    at="torchrun.command",
    clauses=(
        Clause(
            ONLY_FLAGS,
            f"!self{IS_TORCHRUN} || self.join('{WORD}').matches('{TORCHRUN}{_flags()}')",
        ),
    ),
    check=lambda written: launcher.check_command(written.gang.torchrun.command),
)

FLAGS_OF_TORCHRUN = Rule(
    at="torchrun",
    clauses=(
        Clause(
            ONLY_FLAGS,
            f"!has(self.args) || size(self.args) == 0 || !self.command{IS_TORCHRUN} || "
            f"('{WORD}' + self.args.join('{WORD}')).matches('^{_flags()}')",
            "args",
        ),
    ),
    check=lambda written: launcher.check_torchrun_args(
        written.gang.torchrun.args, written.gang.torchrun.command
    ),
)

ARGS = Rule(
    at="",
    clauses=(
        Clause(
            "begin with the script or -m and a module, since torchrun starts Python itself; to run "
            "another program, add --no-python to torchrun.args",
            f"{NO_PYTHON} || !(self.torchrun.command{IS_TORCHRUN} ? "
            f"self.args[0].matches('^(.*/)?({STARTER})$') : "
            f"self.args[0].matches('^(.*/)?{launcher.PYTHON}$'))",
            "args",
        ),
        Clause(
            "begin with the script or -m and a module; flags of torchrun belong to torchrun.args, "
            "unless fields set them, such as nodes, nprocPerNode, torchrun.rdzvConf and "
            "failurePolicy",
            f"self.torchrun.command{IS_TORCHRUN} ? !self.args[0].startsWith('-') || "
            f"self.args[0] in {list(launcher.MODULE_FLAGS)} : size({FIRST_FLAG}) <= 2 || "
            f"!{SET_FLAGS}.exists(flag, flag.startsWith({FIRST_FLAG}.replace('_', '-')))",
            "args",
        ),
        Clause(
            "begin with the script, or with -m and a module without --no-python, each word as an "
            "item of its own",
            f"!self.torchrun.command{IS_TORCHRUN} || (self.args[0] in "
            f"{list(launcher.MODULE_FLAGS)} ? size(self.args) > 1 && "
            f"self.args[1].matches('^{launcher.MODULE.pattern}$') && "
            f"!(self.args[1] in {list(launcher.LAUNCHER_MODULES)}) && !{NO_PYTHON} : "
            f"!self.args[0].matches('{launcher.COMMAND_LINE}'))",
            "args",
        ),
    ),
    check=lambda written: launcher.check_args(
        written.gang.args, written.gang.torchrun.command, written.gang.torchrun.args
    ),
)


def _check_rdzv_conf(written: Written) -> None:
    if "is_host" in written.gang.torchrun.rdzv_conf:
        raise SpecError(
            "spec.torchrun.rdzvConf.is_host: is set by the operator, which chooses the host; "
            "remove it"
        )


RDZV_CONF = Rule(
    at="torchrun.rdzvConf",
    clauses=(
        Clause(
            "is_host is set by the operator, which chooses the host; remove it",
            "!('is_host' in self)",
        ),
        Clause(
            'must have names of a-z and "_", and values without comma, equals sign and space',
            f"self.all(k, k.matches('^{RDZV_NAME.pattern}$') && (type(self[k]) == int || "
            rf"self[k].matches('^{RDZV_VALUE.pattern.replace(chr(92), chr(92) * 2)}$')))",
        ),
    ),
    check=_check_rdzv_conf,
)


# Sizes

PROCESSES = Rule(
    at="nprocPerNode",
    clauses=(
        Clause(
            f'must be "auto" or an integer from 1 to {MAX_PROCESSES}',
            f"type(self) == int ? self >= 1 && self <= {MAX_PROCESSES} : self == 'auto'",
        ),
    ),
)


def _size_clauses() -> Iterator[Clause]:
    """Yield the clauses for the supported sizes of accelerators, as `check_size` has them."""
    for profile in profiles.catalog().values():
        others = f"self.accelerator != '{profile.name}'"
        if profile.one_node:
            message = f"must be 1 with accelerator {profile.name}, which {profile.one_node}"
            alternatives = _with_several_nodes(profile)
            if alternatives:
                message += f"; for several nodes use {either(alternatives)}"
            yield Clause(message, f"{others} || self.nodes == 1", "nodes")
        if profile.process_counts:
            allowed = f"{list(profile.process_counts)}"
            choice = either((*profile.process_counts, "auto"))
            message = f"must be {choice} with accelerator {profile.name}"
            if not profile.one_node:
                allowed = f"(self.nodes == 1 ? {allowed} : [{profile.processes}])"
                message += f" on one node, {profile.processes} or auto on each of several nodes"
            cel = f"{others} || type(self.nprocPerNode) != int || self.nprocPerNode in {allowed}"
            yield Clause(message, cel, "nprocPerNode")


def _with_several_nodes(profile: Profile) -> list[str]:
    """Return the names of profiles with the same devices and support for several nodes."""
    same = {name for device in profile.all_devices for name in profiles.profiles_with(device)}
    return [name for name, one in profiles.catalog().items() if name in same and not one.one_node]


SIZES = Rule(
    at="",
    clauses=tuple(_size_clauses()),
    check=lambda written: profiles.check_size(
        written.gang.accelerator, written.gang.nodes, written.gang.requested_processes
    ),
)


# Mounts

MOUNT_OF_CHECKPOINT = Rule(
    at="checkpoint.mountPath",
    clauses=(
        Clause(
            'must be an absolute path other than "/" and without ":"',
            f"self.matches('^{MOUNT_PATH.pattern}$')",
        ),
    ),
)


def _check_mounts(written: Written) -> None:
    checkpoint = written.gang.checkpoint
    for mount in written.pod_fields.get("volumeMounts", ()):
        path = mount["mountPath"]
        if checkpoint and normal_path(path) == checkpoint.mount_path:
            raise SpecError(
                f"spec.volumeMounts: {path} is the mount path of spec.checkpoint; remove the mount "
                "or choose another path"
            )


MOUNTS = Rule(
    at="",
    clauses=(
        Clause(
            "a mount has the path of checkpoint.mountPath; remove the mount or choose another path",
            "!has(self.volumeMounts) || !has(self.checkpoint) || self.volumeMounts.all(m, "
            "!(self.checkpoint.mountPath in [m.mountPath, m.mountPath + '/']) && "
            "m.mountPath != self.checkpoint.mountPath + '/')",
            "volumeMounts",
        ),
    ),
    check=_check_mounts,
)


# Places


def _check_topology(written: Written) -> None:
    topology = written.gang.scheduling.topology
    if topology and bool(topology.required) == bool(topology.preferred):
        raise SpecError(f"spec.scheduling.topology: {ONE_TOPOLOGY}")


ONE_TOPOLOGY = "must have either required or preferred, with a label of nodes"

TOPOLOGY = Rule(
    at="scheduling.topology",
    clauses=(Clause(ONE_TOPOLOGY, "has(self.required) != has(self.preferred)"),),
    check=_check_topology,
)


# What the operator or torchrun sets

RESERVED = sorted(names.RESERVED_VARIABLES)
RESERVED_MESSAGE = (
    f"{', '.join(RESERVED)} and every {names.RESERVED_PREFIX}* are set by torchrun for each "
    "process; remove them from env"
)
NOT_RESERVED = (
    f"env.all(e, !e.name.startsWith('{names.RESERVED_PREFIX}') && !(e.name in {RESERVED}))"
)

ENV = Rule(
    at="",
    clauses=(Clause(RESERVED_MESSAGE, f"!has(self.env) || self.{NOT_RESERVED}", "env"),),
    check=lambda written: pod_fields.check_variables(written.pod_fields.get("env"), "spec.env"),
)


def _of_template(check: Callable[[Any], None], part: str) -> Callable[[Written], None]:
    return lambda written: check(written.pod_template.get(part, {}))


def _own_names(kind: str) -> str:
    return f"(!has(self.{kind}) || self.{kind}.all(k, !k.startsWith('{names.GROUP}/')))"


METADATA = Rule(
    at=f"{POD_TEMPLATE}.metadata",
    clauses=(
        # The fields of metadata are not pruned, so `dyn` also counts undeclared fields.
        Clause(
            "must have only labels and annotations; remove the rest",
            "size(dyn(self)) == (has(self.labels) ? 1 : 0) + (has(self.annotations) ? 1 : 0)",
        ),
        Clause(
            f'names that begin with "{names.GROUP}/" are reserved for the operator; choose another '
            "prefix",
            f"{_own_names('labels')} && {_own_names('annotations')}",
        ),
        Clause(
            pod_fields.QUEUE_OF_POD,
            f"!has(self.labels) || !('{LABEL_QUEUE}' in self.labels)",
            "labels",
        ),
    ),
    check=_of_template(pod_fields.check_metadata, "metadata"),
)


def _either_is_set(of: str, fields: tuple[str, ...]) -> str:
    return " || ".join(f"has({of}.{field})" for field in fields)


def _listed(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _trainer(condition: str) -> str:
    """Return the expression for a condition on the container trainer, if there is one."""
    is_other = f"c.name != '{names.TRAINER}'"
    return f"!has(self.containers) || self.containers.all(c, {is_other} || {condition})"


OWNED_BY_OPERATOR = Rule(
    at=f"{POD_TEMPLATE}.spec",
    clauses=(
        Clause(
            f"{_listed(OWNED_POD_FIELDS)} are set by the operator; remove them",
            f"!({_either_is_set('self', OWNED_POD_FIELDS)})",
        ),
    ),
    check=_of_template(pod_fields.check_owned_pod_fields, "spec"),
)

TRAINER = Rule(
    at=f"{POD_TEMPLATE}.spec",
    clauses=(
        Clause(
            f"{_listed(OWNED_TRAINER_FIELDS)} of the container {names.TRAINER} are set by the "
            "operator; use spec.args, spec.resources and spec.torchrun.command",
            _trainer(f"!({_either_is_set('c', OWNED_TRAINER_FIELDS)})"),
            "containers",
        ),
    ),
    check=_of_template(pod_fields.check_trainer, "spec"),
)

TRAINERS_ENV = Rule(
    at=f"{POD_TEMPLATE}.spec",
    clauses=(Clause(RESERVED_MESSAGE, _trainer(f"!has(c.env) || c.{NOT_RESERVED}"), "containers"),),
    check=_of_template(pod_fields.check_trainers_variables, "spec"),
)


IMAGES = Rule(
    at=f"{POD_TEMPLATE}.spec",
    clauses=(
        Clause(
            "a container has no image; to change the container that trains, name it "
            f"{names.TRAINER}, otherwise give it an image",
            "!has(self.containers) || self.containers.all(c, "
            f"c.name == '{names.TRAINER}' || (has(c.image) && c.image != ''))",
            "containers",
        ),
    ),
    check=_of_template(pod_fields.check_images, "spec"),
)


def _trainer_beside(field: str, message: str, condition: str, check: Callable[[Any], None]) -> Rule:
    """Return the rule that a condition holds for the trainer if a field of the spec is set."""
    pod = "self.podTemplate.spec"
    cel = (
        f"!has(self.{field}) || !has(self.podTemplate) || !has({pod}) || !has({pod}.containers) || "
        f"{pod}.containers.all(c, c.name != '{names.TRAINER}' || {condition})"
    )

    def check_beside(written: Written) -> None:
        if getattr(written.gang, field):
            check(written.pod_template.get("spec", {}))

    return Rule(at="", clauses=(Clause(message, cel, POD_TEMPLATE),), check=check_beside)


WORKING_DIR = _trainer_beside(
    "code",
    "workingDir of the container trainer cannot be set with code, which is in a working directory "
    "of its own; remove one of them",
    "!has(c.workingDir) || c.workingDir == ''",
    pod_fields.check_working_dir,
)

STARTUP_PROBE = _trainer_beside(
    "setup",
    "startupProbe of the container trainer cannot be set with setup, which uses it; remove one of "
    "them",
    "!has(c.startupProbe)",
    pod_fields.check_startup_probe,
)

# A rule for changes of a job. No check sees a change.
RETRIES = Rule(
    at="",
    clauses=(
        Clause(
            "can only grow; each larger number takes a Failed job up again",
            "self.retries >= oldSelf.retries",
            "retries",
        ),
    ),
)

# In the order of the checks. The first broken rule refuses a spec.
RULES = (
    *(PROCESSES, SIZES, COMMAND, FLAGS_OF_TORCHRUN, RDZV_CONF, ARGS),
    *(MOUNT_OF_CHECKPOINT, ENV, MOUNTS, TOPOLOGY),
    *(
        METADATA,
        OWNED_BY_OPERATOR,
        TRAINER,
        TRAINERS_ENV,
        IMAGES,
        WORKING_DIR,
        STARTUP_PROBE,
        RETRIES,
    ),
)
