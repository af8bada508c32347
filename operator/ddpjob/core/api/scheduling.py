"""The part of a spec for the scheduling of an attempt's pods."""

from pydantic.dataclasses import dataclass as declared

from ddpjob.core.api.declare import CONFIG, Change, Declared, Text, entry
from ddpjob.core.api.pod_groups import GangChoice


@declared(frozen=True, slots=True, config=CONFIG)
class Topology(Declared):
    """Nodes near each other, with the same value of a label.

    Exactly one of the fields is set.
    """

    required: Text = entry(
        """Label of nodes, such as topology.kubernetes.io/zone. All pods of an attempt run on nodes
        with the same value, or wait.""",
        "",
        min_length=1,
        max_length=317,
    )
    preferred: Text = entry(
        """Label of nodes. Pods run on nodes with the same value if possible.""",
        "",
        min_length=1,
        max_length=317,
    )

    @property
    def kind(self) -> str:
        return "required" if self.required else "preferred"

    @property
    def key(self) -> str:
        return self.required or self.preferred


@declared(frozen=True, slots=True, config=CONFIG)
class Scheduling(Declared):
    """How the pods of an attempt get their nodes."""

    gang: GangChoice = entry(
        """Who starts all pods of an attempt or none. Auto: Kubernetes itself, if the cluster serves
        PodGroups of scheduling.k8s.io/v1beta1, and the job has several nodes and no queue. Volcano
        and Coscheduling are schedulers installed by an administrator.""",
        GangChoice.AUTO,
        change=Change.SUSPENDED,
    )
    topology: Topology | None = entry(default=None, change=Change.SUSPENDED)
