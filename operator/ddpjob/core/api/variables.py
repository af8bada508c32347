"""The variables of a pod for use in arguments, and advice on probable mistakes."""

from collections.abc import Sequence

from ddpjob.core.api import launcher, names, profiles
from ddpjob.core.api.readers import Dict, child, children
from ddpjob.core.api.spec import Checkpoint

# Variables of every pod. tests/unit/test_render.py compares them with a rendered pod.
OF_EVERY_POD = (
    *("DDP_JOB_NAME", "DDP_JOB_NAMESPACE", "DDP_NODE_INDEX", "DDP_NODE_NAME"),
    *("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
)
OF_RESTRICTED_PODS = ("HOME", "USER", "LOGNAME")

# Kubernetes itself gives them to every container.
OF_THE_API_SERVER = "KUBERNETES_"

# Variables set by the image or the agent before torchrun starts.
BEFORE_TORCHRUN = (
    *("PATH", "HOSTNAME", "PYTHONPATH", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
)

# Variables set by the image, the agent or torchrun: arguments cannot refer to them.
OF_PROCESSES = {
    *names.RESERVED_VARIABLES,
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("DDP_ATTEMPT", "DDP_RESULT_FILE", "DDP_HEARTBEAT_FILE"),
    *BEFORE_TORCHRUN,
}

# Variables of other launchers, and what a pod of a DDPJob has in their place.
NODE_INDEX = "write $(DDP_NODE_INDEX) for the number of the node"
SAME_IN_A_POD = {
    "PET_NODE_RANK": NODE_INDEX,
    "JOB_COMPLETION_INDEX": NODE_INDEX,
    "SLURM_NODEID": NODE_INDEX,
    "SLURM_JOB_ID": "write $(DDP_JOB_NAME) for the name of the job",
    "SLURM_JOBID": "write $(DDP_JOB_NAME) for the name of the job",
}
SAME_IN_A_PROCESS = {
    "SLURM_PROCID": "RANK",
    "SLURM_LOCALID": "LOCAL_RANK",
    "SLURM_NTASKS": "WORLD_SIZE",
}


def pod_variables(
    profile: profiles.Profile,
    checkpoint: Checkpoint | None,
    restricted: bool | None,
    pod_fields: Dict,
    pod_template: Dict,
) -> frozenset[str] | None:
    """Return the variables of the container trainer; None if a ConfigMap or Secret has others.

    Those of the image are not among them: Kubernetes does not expand them.
    """
    containers = children(child(pod_template, "spec"), "containers")
    trainers = [one for one in containers if one.get("name") == names.TRAINER]
    sources = [pod_fields, *trainers]
    if any(children(source, "envFrom") for source in sources):
        return None
    if child(pod_template, "spec").get("enableServiceLinks"):
        return None
    known = {*OF_EVERY_POD, *profile.env}
    if restricted is not False:
        # None: the operator's settings decide.
        known |= {*OF_RESTRICTED_PODS}
    if checkpoint:
        known.add(names.CHECKPOINT_VARIABLE)
        if profile.node_cache_variable:
            known.add(profile.node_cache_variable)
    return frozenset(known | {item["name"] for one in sources for item in children(one, "env")})


def variable_advice(
    args: Sequence[str],
    launcher_words: Sequence[str],
    known: frozenset[str] | None,
) -> str:
    """Return what to do about a variable that nothing expands, or an empty string.

    `known` are the variables of the pods; None if they are not known.
    """
    if launcher.starts_another_program(launcher_words):
        # It may be a shell.
        return ""
    found = launcher.shell_variable(args)
    if found:
        name = found.strip("${}")
        what = f"spec.args: {found} reaches the script as it is, since no shell reads args"
        if (known is None or name in known) and not is_of_a_process(name):
            return f"{what}; write $({name})"
        return f"{what}; {instead_of(name)}"
    for name in launcher.references(args):
        is_known = known is None or name in known or name.startswith(OF_THE_API_SERVER)
        if not is_known:
            return f"spec.args: $({name}) reaches the script as it is; {instead_of(name)}"
    return ""


def is_of_a_process(name: str) -> bool:
    """Return True for a variable set by the image, the agent or torchrun."""
    return name in OF_PROCESSES or name.startswith(names.RESERVED_PREFIX)


def instead_of(name: str) -> str:
    """Return what to do about a variable unknown to Kubernetes."""
    if name in SAME_IN_A_POD:
        return SAME_IN_A_POD[name]
    if name in BEFORE_TORCHRUN:
        return f'read os.environ["{name}"] in the script'
    if name.startswith(names.RESERVED_PREFIX):
        # torchrun takes it for a flag, and no process has it.
        return "write its value"
    if name in SAME_IN_A_PROCESS or name in OF_PROCESSES:
        variable = SAME_IN_A_PROCESS.get(name, name)
        return f'read os.environ["{variable}"] in the script: only the processes have it'
    if name == names.CHECKPOINT_VARIABLE:
        return f"set spec.checkpoint (--checkpoints CLAIM) and write $({name})"
    return f"set {name} in spec.env and write $({name})"
