"""The display of a run: a live progress bar on a terminal, plain lines elsewhere."""

import math
import re
from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from ddpjob.core.api.names import Phase
from ddpjob.core.api.readers import Dict
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.status import Status
from ddpjob.core.plan import NEXT_STEP
from ddpjob.jobs.progress import format_speed
from ddpjob.jobs.run_metrics import RunMetrics, finite_number, shares
from ddpjob.show.text import PHASE_STYLES

NODE_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")

LABEL_WIDTH = 11  # columns of the first word of a line
BAR_WIDTH = 28  # columns

# A log line of torchrun's agent. After its first error, or a signal, the agent prints only its
# traceback and its failure summary.
TORCHRUN_LINE = re.compile(
    r"(?P<level>[EW])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ torch/distributed/(elastic|run)"
)

# Stack traces of torch's C++ code. The script's own exception has the same information.
STACK_FRAME = re.compile(
    r"\[[WE]\d{4} .*\.cpp:\d+\]|\[W\d+ .*TCPStore"
    r"|Exception raised from |frame #\d+: |<omitting python frames>"
)


class Display:
    """Shows a run while it goes on, and collects its metrics.

    Colours and the progress bar appear if the console is a terminal.
    """

    def __init__(self, console: Console, metrics: RunMetrics) -> None:
        self._console = console
        self._metrics = metrics
        # The phase and reason that were printed last.
        self._printed = ("", "")
        # The nodes whose agents report a failure, and True after the last event of the trainer.
        self._reporting: set[int] = set()
        self._ended = False
        # The latest accuracy, for the progress bar.
        self._accuracy = ""
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(BAR_WIDTH),
            MofNCompleteColumn(),
            TextColumn("{task.fields[details]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("passed,"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        self._print(Text(f"  {text}", style="dim"))

    def status(self, status: Status) -> None:
        """Print a status if its phase, or the reason for it, is a new one."""
        # While pods start, the reason changes with each step. The phase is enough, except for a
        # setup, which may take long.
        is_start = status.phase == Phase.STARTING and status.reason != Reason.SETTING_UP
        reason = "" if is_start else status.reason
        if (status.phase, reason) == self._printed:
            return
        self._printed = (status.phase, reason)
        if status.phase == Phase.STARTING:
            self._reporting.clear()
        if status.phase == Phase.RUNNING:
            self._task = self._new_task("importing torch", total=None)
        style = PHASE_STYLES.get(status.phase, "bold")
        # A local run has no object in an API server, so there is nothing to delete.
        message = status.message.partition(f"; {NEXT_STEP}")[0]
        self._print_labelled(status.phase, message, style)

    def line(self, index: int, text: str) -> None:
        """Print a line of a node's script.

        What torchrun reports of a failure is left out: the job's message has the cause, and the log
        has all of it.
        """
        agent = TORCHRUN_LINE.match(text)
        if agent and (agent["level"] == "E" or "death signal" in text):
            self._reporting.add(index)
        is_report = agent or index in self._reporting or STACK_FRAME.match(text)
        if is_report or self._ended:
            return
        colour = NODE_COLOURS[index % len(NODE_COLOURS)]
        self._print(Text.assemble((f"[n{index}] ", colour), Text(text, style="dim")))

    def metric(self, metric: Dict) -> None:
        """Collect an event of the trainer, and show it if it tells how far the run is."""
        self._metrics.events.append(metric)
        shows = {
            "start": self._show_start,
            "train": self._show_training,
            "rate": self._show_rate,
            "eval": self._show_evaluation,
            "end": self._show_end,
        }
        show = shows.get(str(metric.get("event")))
        if show:
            show(metric)

    def _show_start(self, metric: Dict) -> None:
        name = str(metric.get("workload", "training"))
        resumed_step = _step(metric, "resumed_step")
        details = [
            _format(metric, "parameters", "{:,} parameters"),
            _format(metric, "train_samples", "{:,} samples"),
            f"{metric.get('world_size')} processes on {metric.get('device')} "
            f"({metric.get('backend')})",
        ]
        if resumed_step:
            details.append(f"resumed from step {resumed_step}")
        text = ", ".join(detail for detail in details if detail)
        self._print_labelled("Training", f"{name}: {text}")
        total = finite_number(metric.get("steps"))
        self._task = self._new_task(name, total, completed=resumed_step)

    def _new_task(self, name: str, total: float | None, completed: int = 0) -> TaskID:
        """Replace the progress bar."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        return self._progress.add_task(name, total=total, completed=completed, details="")

    def _update_task(self, metric: Dict, details: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=_step(metric), details=details)

    def _show_training(self, metric: Dict) -> None:
        epoch = f"epoch {metric.get('epoch')}/{metric.get('epochs')}"
        loss = _format(metric, "loss", "  loss {:.4f}")
        self._update_task(metric, f"{epoch}{loss}{self._accuracy}{_speed(metric)}")

    def _show_rate(self, metric: Dict) -> None:
        self._update_task(metric, f"{metric.get('arm')}{_speed(metric)}")

    def _show_evaluation(self, metric: Dict) -> None:
        self._accuracy = _format(metric, "accuracy", "  accuracy {:.1%}")
        # On a terminal the progress bar shows the accuracy.
        if not self._console.is_terminal:
            step = _format(metric, "step", "step {:>5}  ")
            loss = _format(metric, "loss", "test loss {:.4f}")
            self._print_labelled("", f"{step}{loss}{self._accuracy}")

    def _show_end(self, metric: Dict) -> None:
        self._ended = True
        if self._task is not None:
            self._progress.update(self._task, completed=_step(metric))

    def summary(self, status: Status, files: Mapping[str, str]) -> None:
        """Print the result, where the time went, and where the run's files are."""
        if status.result:
            values = "  ".join(f"{key} {_short(value)}" for key, value in status.result.items())
            self._print_labelled("Result", Text(values, style="bold green"))
        stages = shares(self._metrics.stage_seconds())
        if stages:
            total = self._metrics.end_time - self._metrics.start_time
            self._print_labelled("Time", f"{total:.1f} s in total")
            table = Table.grid(padding=(0, 1))
            for stage, seconds, share in stages:
                bar = Text("█" * max(1, round(share * BAR_WIDTH)), style="cyan")
                table.add_row(
                    " " * (LABEL_WIDTH - 1), f"{seconds:6.2f} s", f"{share:4.0%}", bar, stage
                )
            self._console.print(table)
        for what, path in files.items():
            self._print_labelled(what, path)

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def _print_labelled(self, label: str, text: str | Text, style: str = "bold") -> None:
        self._print(Text.assemble((f"{label:<{LABEL_WIDTH}}", style), text))


def _speed(metric: Dict) -> str:
    """Return the speed of a training in the unit that the trainer counts, such as tokens."""
    speed = format_speed(metric)
    return f"  {speed}" if speed else ""


def _format(metric: Dict, key: str, template: str) -> str:
    """Return a number of a metric in `template`, or an empty string if it is not a number.

    JSON has null for nan. A loss that is nan has diverged, so it is shown.
    """
    value = metric.get(key, "")
    if value is None:
        value = math.nan
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return template.format(value) if is_number else ""


def _step(metric: Dict, key: str = "step") -> int:
    return int(finite_number(metric.get(key)) or 0)


def _short(text: str) -> str:
    """Return a number with four digits, and any other text unchanged."""
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text
