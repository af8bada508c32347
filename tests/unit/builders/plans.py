"""Decisions: what is observed, the plan for it, and what tests read from a plan."""

from dataclasses import replace

from ddpjob.core.api.job import Job
from ddpjob.core.api.status import Status
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.observation import Observation, observe
from ddpjob.core.plan import Plan

from .pods import read_pods
from .times import NOW


def observation(job: Job, *pods, **surroundings) -> Observation:
    return observe(job, read_pods(*pods), **surroundings)


def plan_for(job: Job, *pods, now=NOW, **surroundings) -> Plan:
    """Decide. Other fields of the Observation can be given by name, such as `nodes`."""
    return decide(observation(job, *pods, **surroundings), now)


def written(job: Job, plan: Plan) -> Job:
    """Return the job as the API server gives it back after the plan's status was written."""
    return replace(job, status=Status.from_dict(plan.status.to_dict()))


def deleted_pods(plan: Plan) -> list[str]:
    return [delete.name for delete in plan.delete]


def budgets_used(plan: Plan) -> tuple[int, int]:
    """Return (failures, unannounced disruptions)."""
    return plan.status.budget.failures, plan.status.budget.disruptions


def restarts_by_budget(plan: Plan) -> dict[str, int]:
    """Return the counted restarts by budget, without those that are 0."""
    budget = plan.status.to_dict()["budget"]
    return {name: restarts for name, restarts in budget.items() if restarts}
