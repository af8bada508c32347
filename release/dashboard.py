"""Write the Grafana dashboard of the chart: `python release/dashboard.py`.

The panels are the tables below. The SDK writes Grafana's JSON. Edit the tables, not the JSON.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

OUT = Path(__file__).parents[1] / "charts" / "ddpjob-operator" / "files" / "dashboard.json"

# The identity of the dashboard: an upgrade replaces it.
UID = "ddpjob"

# Grafana's units.
COUNT, SECONDS, PART, PER_SECOND = "short", "s", "percentunit", "cps"

COLUMNS = 24
HEIGHT = 8

# The jobs chosen at the top of the dashboard.
CHOSEN = '{namespace=~"$namespace", ddpjob=~"$ddpjob"}'
BY_JOB = "namespace, ddpjob"
JOB = "{{namespace}}/{{ddpjob}}"
RATE = "$__rate_interval"


class Query(NamedTuple):
    """A query in PromQL, and the name of each of its series."""

    expression: str
    legend: str


class Graph(NamedTuple):
    """A panel with curves over time."""

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    is_stacked: bool = False
    may_be_negative: bool = False


class Number(NamedTuple):
    """A panel with one number of now."""

    title: str
    description: str
    unit: str
    query: str
    is_alarming_at_0: bool = False


Panel = Graph | Number


def chosen(metric: str, **labels: str) -> str:
    """Return a metric of the chosen jobs."""
    more = "".join(f', {name}="{value}"' for name, value in labels.items())
    return f"{metric}{CHOSEN[:-1]}{more}}}"


def latency(name: str, part: float) -> Query:
    buckets = f"sum by (le) (rate(ddpjob_{name}_seconds_bucket[{RATE}]))"
    return Query(f"histogram_quantile({part}, {buckets})", f"{name}, {part:.0%}")


NUMBERS: Sequence[Panel] = (
    Number(
        "Operators that lead",
        "1 if the operator works. At 0, jobs go on, and nothing restarts.",
        COUNT,
        "sum(ddpjob_leader) or vector(0)",
        is_alarming_at_0=True,
    ),
    Number(
        "Jobs that run",
        "Jobs in the phase Running.",
        COUNT,
        'sum(ddpjob_jobs{phase="Running"}) or vector(0)',
    ),
    Number(
        "Jobs that wait",
        "Jobs whose gang is incomplete, or that restart.",
        COUNT,
        'sum(ddpjob_jobs{phase=~"Pending|Starting|Restarting"}) or vector(0)',
    ),
    Number(
        "Restarts within a day",
        "New attempts of all jobs, of every cause.",
        COUNT,
        "round(sum(increase(ddpjob_restarts_total[1d])))",
    ),
    Number(
        "Goodput",
        "The part of the time of all jobs that exist that was training.",
        PART,
        'sum(ddpjob_job_activity_seconds{activity="training"}) / sum(ddpjob_job_activity_seconds)',
    ),
    Number(
        "Nodes in use",
        "Pods of jobs that are ready.",
        COUNT,
        'sum(ddpjob_job_nodes{state="ready"})',
    ),
)

ALL_JOBS: Sequence[Panel] = (
    Graph(
        "Jobs by phase",
        "Jobs of all namespaces.",
        COUNT,
        [Query("sum by (phase) (ddpjob_jobs)", "{{phase}}")],
        is_stacked=True,
    ),
    Graph(
        "Restarts within an hour",
        "New attempts, by their cause.",
        COUNT,
        [Query("sum by (cause) (increase(ddpjob_restarts_total[1h]))", "{{cause}}")],
        is_stacked=True,
    ),
)

CHOSEN_JOBS: Sequence[Panel] = (
    Graph(
        "Loss",
        "The training loss that the trainer has printed last.",
        COUNT,
        [Query(f"max by ({BY_JOB}) ({chosen('ddpjob_agent_loss')})", JOB)],
        may_be_negative=True,
    ),
    Graph(
        "Speed",
        "Samples or tokens per second.",
        COUNT,
        [
            Query(
                f"max by ({BY_JOB}) ({chosen('ddpjob_agent_samples_per_second')} "
                f"or {chosen('ddpjob_agent_tokens_per_second')})",
                JOB,
            )
        ],
    ),
    Graph(
        "Step",
        "Optimizer steps. A restart goes back to the last checkpoint.",
        COUNT,
        [Query(f"max by ({BY_JOB}) ({chosen('ddpjob_agent_step')})", JOB)],
    ),
    Graph(
        "Age of heartbeats",
        "The time since the last heartbeat of each node. spec.hangTimeoutSeconds limits it.",
        SECONDS,
        [
            Query(
                f"max by ({BY_JOB}, node) ({chosen('ddpjob_agent_heartbeat_age_seconds')})",
                f"{JOB} node {{{{node}}}}",
            )
        ],
    ),
    Graph(
        "Nodes that are ready",
        "The pods of the current attempt whose workers have met.",
        COUNT,
        [
            Query(
                f"max by ({BY_JOB}) ({chosen('ddpjob_job_nodes', state=state)})", f"{JOB} {state}"
            )
            for state in ("ready", "desired")
        ],
    ),
    Graph(
        "Restarts",
        "Restarts that have used a budget.",
        COUNT,
        [
            Query(
                f"max by ({BY_JOB}, budget) ({chosen('ddpjob_job_restarts')})",
                f"{JOB} {{{{budget}}}}",
            )
        ],
    ),
    Graph(
        "Time by activity",
        "What the chosen jobs have spent their time on so far.",
        SECONDS,
        [
            Query(
                f"sum by (activity) ({chosen('ddpjob_job_activity_seconds')})",
                "{{activity}}",
            )
        ],
        is_stacked=True,
    ),
    Graph(
        "Goodput of each job",
        "The part of its time that a job has trained.",
        PART,
        [Query(f"max by ({BY_JOB}) ({chosen('ddpjob_job_goodput_ratio')})", JOB)],
    ),
)

OPERATOR: Sequence[Panel] = (
    Graph(
        "Latency",
        "For how long jobs wait for a worker, and how long a reconcile takes with its writes.",
        SECONDS,
        [latency(name, part) for name in ("queue", "reconcile") for part in (0.5, 0.99)],
    ),
    Graph(
        "Reconciles",
        "Reconciles of jobs, by their result.",
        PER_SECOND,
        [Query(f"sum by (result) (rate(ddpjob_reconciles_total[{RATE}]))", "{{result}}")],
    ),
    Graph(
        "Jobs that are due",
        "The length of the work queue.",
        COUNT,
        [Query("sum(ddpjob_queue_depth)", "jobs")],
    ),
    Graph(
        "Requests to the API server",
        "Requests of the operator, without its watches. Status 0: no answer.",
        PER_SECOND,
        [
            Query(
                f"sum by (method, resource, status) (rate(ddpjob_api_requests_total[{RATE}]))",
                "{{method}} {{resource}} {{status}}",
            )
        ],
    ),
)

ROWS = {"All jobs": ALL_JOBS, "Chosen jobs": CHOSEN_JOBS, "Operator": OPERATOR}


def build() -> str:
    """Return the dashboard as JSON."""
    board = (
        dashboard.Dashboard("DDPJobs")
        .uid(UID)
        .description("Training jobs, their restarts and goodput, and the operator.")
        .tags(["ddpjob", "kubernetes", "pytorch"])
        .time("now-6h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(choice("namespace", "label_values(ddpjob_job_info, namespace)"))
        .with_variable(
            choice("ddpjob", 'label_values(ddpjob_job_info{namespace=~"$namespace"}, ddpjob)')
        )
    )
    for number in NUMBERS:
        board.with_panel(built(number, COLUMNS // len(NUMBERS), HEIGHT // 2))
    for title, panels in ROWS.items():
        board.with_row(dashboard.Row(title))
        for panel in panels:
            board.with_panel(built(panel, COLUMNS // 2, HEIGHT))
    return json.dumps(board.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def choice(name: str, query: str) -> dashboard.QueryVariable:
    """Return a variable with the values found in the metrics. Several may be chosen, or all."""
    return (
        dashboard.QueryVariable(name)
        .datasource(source())
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def source() -> models.DataSourceRef:
    return models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def built(panel: Panel, width: int, height: int) -> stat.Panel | timeseries.Panel:
    """Return a panel of `width` columns of 24 and `height` rows."""
    made = number_panel(panel) if isinstance(panel, Number) else graph_panel(panel)
    made.title(panel.title).description(panel.description).unit(panel.unit).datasource(source())
    made.span(width).height(height)
    for name, query in zip("ABCDEFGH", queries(panel), strict=False):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend)
        if isinstance(panel, Number):
            # An ended series must not show its last value.
            target.instant()
        made.with_target(target.ref_id(name).datasource(source()))
    return made


def number_panel(number: Number) -> stat.Panel:
    calculation = common.ReduceDataOptions().calcs(["lastNotNull"])
    made = stat.Panel().reduce_options(calculation)
    made.graph_mode(common_models.BigValueGraphMode.NONE)
    steps = [models.Threshold(color="red" if number.is_alarming_at_0 else "blue")]
    if number.is_alarming_at_0:
        steps.append(models.Threshold(value=1, color="green"))
    return made.thresholds(dashboard.ThresholdsConfig().steps(steps))


def graph_panel(graph: Graph) -> timeseries.Panel:
    made = timeseries.Panel().fill_opacity(30 if graph.is_stacked else 5).line_width(1)
    if not graph.may_be_negative:
        made.min(0)
    made.show_points(common_models.VisibilityMode.NEVER)
    made.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    if graph.is_stacked:
        mode = common_models.StackingMode.NORMAL
        made.stacking(common.StackingConfig().mode(mode))
    return made


def queries(panel: Panel) -> Sequence[Query]:
    return [Query(panel.query, panel.title)] if isinstance(panel, Number) else panel.queries


if __name__ == "__main__":
    OUT.write_text(build())
