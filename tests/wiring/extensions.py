"""Extensions of Kubernetes in tests: what an operator knows of them."""

from dataclasses import dataclass
from typing import Any

from ddpjob.controller.cache import Cache
from ddpjob.controller.clock import wall_time
from ddpjob.controller.places import Places
from ddpjob.controller.pod_groups import PodGroups
from ddpjob.core.api.pod_groups import BY_NAME
from ddpjob.core.observe.observation import ApiState
from ddpjob.core.render.pod_context import Settings


@dataclass
class Known:
    """The watch of an extension, reduced to its known state."""

    state: ApiState

    def state_in(self, namespace: str) -> ApiState:
        """Return what is known of the objects of a namespace: the same of all."""
        return self.state

    async def wait_for_first_look(self) -> None:
        """Return at once: the test has decided the state."""


def without_extensions(writer: Any, cache: Cache) -> tuple[Places, PodGroups]:
    """Return the parts of an operator in a cluster without queues and PodGroups."""
    off: Any = Known(ApiState.OFF)
    return (
        Places(writer, cache, Settings(), wall_time, off),
        pod_groups(writer, cache),
    )


def pod_groups(writer: Any, cache: Cache, **states: ApiState) -> PodGroups:
    """Return the part with PodGroups. `states` are those of APIs; the others are absent."""
    known: Any = {name: Known(states.get(name, ApiState.ABSENT)) for name in BY_NAME}
    return PodGroups(writer, cache, Settings(), known)
