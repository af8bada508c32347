"""The targets of the operator, each compared with the median of all runs."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .cases import FLOOR, INDEXED, OURS, Shape
from .measure import Sample
from .recovery import Recovery

MAX_MEMORY = 90  # units of 10^6 bytes


@dataclass(frozen=True)
class Target:
    """A limit, and the values for comparison with it, one for each run."""

    text: str
    values: Sequence[float]
    limit: float
    at_least: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def reached(self) -> bool:
        # Counts have a small error, because the share of an idle cluster was subtracted.
        found = round(self.median, 2)
        return found >= self.limit if self.at_least else found <= self.limit

    def row(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "reached" if self.reached else "**missed**"
        return f"| {self.text} | {sign} {self.limit:g} | {spread(self.values)} | {verdict} |"


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Return "median (minimum–maximum)"."""
    found = sorted(values)
    median = statistics.median(found)
    return f"{median:.{digits}f} ({found[0]:.{digits}f}–{found[-1]:.{digits}f})"


def select(samples: Iterable[Sample], case: str, shape: Shape) -> list[Sample]:
    return [sample for sample in samples if sample.case == case and sample.shape == str(shape)]


def targets(
    samples: Sequence[Sample],
    recoveries: Sequence[Recovery],
    large: Shape,
    many: Shape,
    peak_rss: float,
) -> list[Target]:
    """Return the targets with the measured values. Ratios are taken within each run."""

    def ratio(shape: Shape, over: str, under: str) -> list[float]:
        pairs = zip(select(samples, over, shape), select(samples, under, shape), strict=True)
        return [first.running / second.running for first, second in pairs]

    def per_job(shape: Shape, count: Callable[[Sample], float]) -> list[float]:
        return [count(sample) / shape.jobs for sample in select(samples, OURS, shape)]

    time_of_large = ratio(large, OURS, INDEXED)
    rate_of_many = ratio(many, INDEXED, OURS)
    time_over_floor = ratio(many, OURS, FLOOR)
    found = [
        Target(f"{large}: time until Running, over the Indexed Job's", time_of_large, 1.15),
        Target(f"{many}: rate of Running pods, over the Indexed Jobs'", rate_of_many, 1.25, True),
        Target(f"{many}: time until Running, over the bare client's", time_over_floor, 1.3),
    ]
    of_recovery = f"{large}: from a lost pod to the last write for the next attempt, s"
    found.append(Target(of_recovery, [one.seconds for one in recoveries], 1.0))
    over_bare = [one.seconds / one.bare for one in recoveries]
    found.append(Target(f"{large}: the same, over a bare client's patches", over_bare, 1.3))
    for shape in (large, many):
        reads = per_job(shape, Sample.reads)
        writes = per_job(shape, Sample.writes)
        found.append(Target(f"{shape}: GET and LIST per job", reads, 0))
        found.append(Target(f"{shape}: writes per job, at most N + 5", writes, shape.nodes + 5))
    found.append(Target("maximum resident memory of the operator, MB", [peak_rss], MAX_MEMORY))
    return found
