"""Find connections blocked by NetworkPolicies: between the pods of a job, and to the DNS.

Policies add up. A pod without a policy is open. A pod with several policies is open to everything
admitted by any of them. A connection counts as admitted if the policies leave it uncertain: a block
of addresses may contain the pods, and any pods outside the namespace may be the DNS.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_network

from ddpjob.core.api import names
from ddpjob.core.api.readers import Dict, child, children, strings_or_empty

Labels = Mapping[str, str]

# The rendezvous has fixed ports. Workers connect to each other on ports chosen by the kernel.
FIRST_PORT = names.RENDEZVOUS_PORT
LAST_PORT = 60999

# The fields of each direction: its rules, and the peers of a rule.
RULES = {"Ingress": "ingress", "Egress": "egress"}
PEERS = {"Ingress": "from", "Egress": "to"}

# Stands for each job not named by a policy.
ANY_JOB = ""


@dataclass(frozen=True)
class Gap:
    """A connection needed by pods and not admitted by their policies.

    - `job`: the name of the job, or ANY_JOB for all jobs not named by a policy.
    - `target`: the unreachable peer. `policies`: the policies of the pods.
    """

    job: str
    target: str
    direction: str
    policies: tuple[str, ...]


def find_gaps(policies: Sequence[Dict], namespace: Labels) -> Sequence[Gap]:
    """Return the connections of jobs blocked by the NetworkPolicies of a namespace.

    `namespace` has the labels of the namespace. Policies may name a job. A connection blocked for
    all jobs is listed once.
    """
    found = list(_gaps_of(ANY_JOB, policies, namespace))
    common = {(gap.target, gap.direction) for gap in found}
    for job in sorted(_named_jobs(policies)):
        for gap in _gaps_of(job, policies, namespace):
            if (gap.target, gap.direction) not in common:
                found.append(gap)
    return found


def _gaps_of(job: str, policies: Sequence[Dict], namespace: Labels) -> Iterable[Gap]:
    pod = {
        names.LABEL_MANAGED_BY: names.MANAGER,
        # No job has a name with a space.
        names.LABEL_JOB: job or "any job",
    }
    for direction in RULES:
        selecting = [policy for policy in policies if _selects(policy, pod, direction)]
        if not selecting:
            continue
        by_name = tuple(sorted(map(_name, selecting)))
        rules: list[Dict] = []
        for policy in selecting:
            rules += _rules(policy, direction)
        peers = PEERS[direction]
        if not any(_admits_job(rule, peers, pod, namespace) for rule in rules):
            yield Gap(job, "each other", direction, by_name)
        if direction == "Egress" and not any(map(_leaves_namespace, rules)):
            yield Gap(job, "the cluster's DNS", direction, by_name)


def _named_jobs(policies: Sequence[Dict]) -> set[str]:
    """Return the names of jobs in the selectors of the policies."""
    found: set[str] = set()
    for policy in policies:
        found.update(_names_in(policy.get("spec")))
    return found


def _names_in(value: object) -> Iterable[str]:
    """Yield the values of the job's label in a part of a policy."""
    if isinstance(value, Mapping):
        if names.LABEL_JOB in value:
            yield str(value[names.LABEL_JOB])
        if value.get("key") == names.LABEL_JOB:
            yield from strings_or_empty(value.get("values"))
        for inner in value.values():
            yield from _names_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _names_in(inner)


def _name(policy: Dict) -> str:
    metadata = child(policy, "metadata")
    return str(metadata.get("name"))


def _selects(policy: Dict, pod: Labels, direction: str) -> bool:
    spec = child(policy, "spec")
    selector = child(spec, "podSelector")
    return direction in _types(spec) and _matches(selector, pod)


def _types(spec: Dict) -> Sequence[str]:
    """Return the directions limited by a policy."""
    types = strings_or_empty(spec.get("policyTypes"))
    if types:
        return types
    if spec.get("egress"):
        return ("Ingress", "Egress")
    return ("Ingress",)


def _rules(policy: Dict, direction: str) -> Sequence[Dict]:
    spec = child(policy, "spec")
    return children(spec, RULES[direction])


def _admits_job(rule: Dict, peers: str, pod: Labels, namespace: Labels) -> bool:
    """Return True if a rule admits the connections between pods of one job.

    `peers` is the rule's field of peers.
    """
    admitted = children(rule, peers)
    if admitted and not any(_is_job(peer, pod, namespace) for peer in admitted):
        return False
    ports = children(rule, "ports")
    return not ports or any(map(_has_all_ports, ports))


def _is_job(peer: Dict, pod: Labels, namespace: Labels) -> bool:
    block = child(peer, "ipBlock")
    if block:
        return _may_be_pods(block)
    # Without a selector of namespaces, a peer is in the namespace of its policy.
    if not _matches(child(peer, "namespaceSelector"), namespace):
        return False
    return _matches(child(peer, "podSelector"), pod)


def _may_be_pods(block: Dict) -> bool:
    """Return False for one address, and for a block with exceptions.

    A policy for the Internet commonly has an exception for private addresses, and so for the pods.
    """
    try:
        network = ip_network(str(block.get("cidr")), strict=False)
    except ValueError:
        return False
    return network.num_addresses > 1 and not block.get("except")


def _has_all_ports(entry: Dict) -> bool:
    if entry.get("protocol", "TCP") != "TCP":
        return False
    first = entry.get("port")
    if first is None:
        return True
    last = entry.get("endPort", first)
    # A port may also have a name.
    if not isinstance(first, int) or not isinstance(last, int):
        return False
    return first <= FIRST_PORT and last >= LAST_PORT


def _leaves_namespace(rule: Dict) -> bool:
    peers = children(rule, "to")
    if not peers:
        return True
    return any("ipBlock" in peer or "namespaceSelector" in peer for peer in peers)


def _matches(selector: Dict, labels: Labels) -> bool:
    """Return True if a label selector of Kubernetes matches these labels."""
    for key, value in child(selector, "matchLabels").items():
        if labels.get(key) != value:
            return False
    expressions = children(selector, "matchExpressions")
    return all(_holds(one, labels) for one in expressions)


def _holds(expression: Dict, labels: Labels) -> bool:
    key = str(expression.get("key"))
    values = strings_or_empty(expression.get("values"))
    match expression.get("operator"):
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    return False
