"""The display of a run: a live progress bar on a terminal, plain lines elsewhere."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    Task,
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
from ddpjob.jobs.progress import Progress as Reached
from ddpjob.jobs.progress import format_speed
from ddpjob.jobs.run_metrics import RunMetrics, finite_number, shares
from ddpjob.show.jobs import attempt_lines, result_text
from ddpjob.show.reports import NodeOutput
from ddpjob.show.text import LABEL_WIDTH, PHASE_STYLES, command_lines

# Reasons of a start with a line of their own, because they may last long.
LASTING = (Reason.SETTING_UP, Reason.WAITING_FOR_PEERS)

NODE_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")

BAR_WIDTH = 28  # columns


class Remaining(TimeRemainingColumn):
    """The word after the elapsed time, and the remaining time if the end is known."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("passed")
        return Text.assemble("passed, ", super().render(task), " left")


class Display:
    """Shows a run while it goes on, and collects its metrics.

    Colours and the progress bar appear if the console is a terminal.
    """

    def __init__(self, console: Console, metrics: RunMetrics) -> None:
        self._console = console
        self._metrics = metrics
        # The last printed phase and reason.
        self._printed = ("", "")
        # The output of each node in the attempt, and True after the last event of the trainer.
        self._nodes: defaultdict[int, NodeOutput] = defaultdict(NodeOutput)
        self._ended = False
        # The progress of the training, and its bar.
        self._reached = Reached()
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(BAR_WIDTH),
            TextColumn("{task.fields[details]}", markup=False),
            TimeElapsedColumn(),
            Remaining(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._end_output()

    def note(self, text: str) -> None:
        self._print(Text(f"  {text}", style="dim"))

    def status(self, status: Status) -> None:
        """Print a status if its phase, or the reason for it, is a new one."""
        # While pods start, the reason changes with each step. The phase is enough, except for the
        # reasons in LASTING.
        is_told = status.phase != Phase.STARTING or status.reason in LASTING
        if status.phase == self._printed[0] and (not is_told or status.reason == self._printed[1]):
            return
        self._printed = (status.phase, status.reason)
        if status.phase == Phase.STARTING:
            self._end_output()
            self._nodes.clear()
            # Nothing is known of the training until it prints an event.
            self._reached = Reached()
        if status.phase in (Phase.STARTING, Phase.RUNNING):
            self._new_task(status.phase.lower())
        style = PHASE_STYLES.get(status.phase, "bold")
        # A local run has no object in an API server, so there is nothing to delete.
        message = status.message.partition(f"; {NEXT_STEP}")[0]
        self._print_labelled(status.phase, message, style)

    def line(self, index: int, text: str) -> None:
        """Print a line of a node's script.

        Reports of torchrun about a failure are left out, and so are the tracebacks of ranks after
        the loss of a peer: the job's message has the cause, and the log has all lines.
        """
        shown = self._nodes[index].take(text)
        if not self._ended:
            self._print_lines(index, shown)

    def _end_output(self) -> None:
        """Print the lines of incomplete tracebacks."""
        for index, node in self._nodes.items():
            self._print_lines(index, node.end())

    def _print_lines(self, index: int, lines: Iterable[str]) -> None:
        colour = NODE_COLOURS[index % len(NODE_COLOURS)]
        for line in lines:
            self._print(Text.assemble((f"[n{index}] ", colour), Text(line, style="dim")))

    def metric(self, metric: Dict, *, is_printed: bool = False) -> None:
        """Collect an event, and show it if it is about the progress of the run.

        `is_printed`: its line has been printed, because its form is the user's own.
        """
        self._metrics.events.append(metric)
        self._reached = self._reached.after(metric)
        shows = {
            "start": self._show_start,
            "train": self._show_training,
            "rate": self._show_rate,
            "eval": self._show_evaluation,
            "end": self._show_end,
        }
        show = shows.get(str(metric.get("event")))
        if show and is_printed:
            self._update_task()
        elif show:
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
        self._new_task(name)

    def _new_task(self, name: str) -> None:
        """Replace the progress bar by a new one with the known progress of the training."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=None, details="")
        self._update_task()

    def _update_task(self, details: str | None = None) -> None:
        """Show the progress of the training in the progress bar."""
        if self._task is None:
            return
        reached = self._reached
        text = str(reached) if details is None else details
        self._progress.update(
            self._task, completed=reached.step or 0, total=reached.steps or None, details=text
        )

    def _show_training(self, _: Dict) -> None:
        self._update_task()
        # Elsewhere there is no progress bar.
        if not self._console.is_terminal:
            self._print_labelled("", str(self._reached))

    def _show_rate(self, metric: Dict) -> None:
        self._update_task(f"{metric.get('arm')}{_speed(metric)}")

    def _show_evaluation(self, metric: Dict) -> None:
        self._update_task()
        # On a terminal the progress bar shows the accuracy.
        if not self._console.is_terminal:
            step = _format(metric, "step", "step {:>5}  ")
            loss = _format(metric, "loss", "test loss {:.4f}")
            accuracy = _format(metric, "accuracy", "  accuracy {:.1%}")
            self._print_labelled("", f"{step}{loss}{accuracy}")

    def _show_end(self, _: Dict) -> None:
        self._ended = True
        self._update_task()

    def summary(self, status: Status, files: Mapping[str, str]) -> None:
        """Print the result, the time of each stage, the paths of files, and the ended attempts."""
        if status.result:
            self._print_labelled("Result", Text(result_text(status), style="bold green"))
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
        for line in attempt_lines(status):
            self._print(line)

    def next(self, commands: Mapping[str, str]) -> None:
        """Print useful commands, each with a description."""
        for text in command_lines(commands):
            self._print_labelled("Next", text)

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def _print_labelled(self, label: str, text: str | Text, style: str = "bold") -> None:
        self._print(Text.assemble((f"{label:<{LABEL_WIDTH}}", style), text))


def _speed(metric: Dict) -> str:
    """Return the speed of a training in the trainer's own unit, such as tokens."""
    speed = format_speed(metric)
    return f"  {speed}" if speed else ""


def _format(metric: Dict, key: str, template: str) -> str:
    """Return a number of a metric in `template`, or an empty string if it is not a number.

    JSON has null for nan. A loss of nan has diverged, so it is shown.
    """
    value = metric.get(key, "")
    if value is None:
        value = math.nan
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return template.format(value) if is_number else ""


def _step(metric: Dict, key: str = "step") -> int:
    return int(finite_number(metric.get(key)) or 0)
