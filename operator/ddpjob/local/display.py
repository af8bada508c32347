"""What a person sees of a run: a live display on a terminal, plain lines elsewhere."""

import math
import re
from collections.abc import Mapping
from typing import Any

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

from ddpjob.core.names import Phase
from ddpjob.core.status import Status
from ddpjob.local.run_metrics import Story, number, share

NODE_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
BAR_WIDTH = 28

LAUNCHER = re.compile(
    r"(?P<level>[EW])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ torch/distributed/(elastic|run)"
)
"""A line of the agent's own. From its first error, or a signal, to its end it talks of nothing else: its traceback, its summary."""

STACK_FRAME = re.compile(
    r"\[[WE]\d{4} .*\.cpp:\d+\]|\[W\d+ .*TCPStore|Exception raised from |frame #\d+: |<omitting python frames>"
)
"""torch's C++ side, of which the exception that the script raises says enough."""


class Display:
    """Shows a run as it goes. `console` decides what it can: colours and a live bar on a terminal, lines in a log."""

    def __init__(self, console: Console, story: Story) -> None:
        self._console, self._story = console, story
        self._said = ("", "")
        self._ended = False
        self._reporting: set[int] = set()
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(BAR_WIDTH),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._accuracy = ""

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        self._console.print(Text(f"  {text}", style="dim"), soft_wrap=True)

    def status(self, status: Status) -> None:
        """A new phase is a new line, and a new reason for anything that a person may want to know."""
        said = (status.phase, "" if status.phase == Phase.STARTING else status.reason)
        if said == self._said:
            return
        self._said = said
        if status.phase == Phase.STARTING:
            self._reporting.clear()
        if status.phase == Phase.RUNNING:
            self._task = self._fresh_task("starting Python and torch", total=None)
        style = {"Restarting": "yellow", "Failed": "bold red", "Complete": "bold green"}.get(
            status.phase, "bold"
        )
        self._console.print(
            Text.assemble((f"{status.phase:<11}", style), status.message), soft_wrap=True
        )

    def line(self, index: int, text: str) -> None:
        """What a node's script says. What torchrun says of a failure is in the job's reason, and whole in the logs."""
        said = LAUNCHER.match(text)
        if said and (said["level"] == "E" or "death signal" in text):
            self._reporting.add(index)
        if said or index in self._reporting or self._ended or STACK_FRAME.match(text):
            return
        colour = NODE_COLOURS[index % len(NODE_COLOURS)]
        self._console.print(
            Text.assemble((f"[n{index}] ", colour), Text(text, style="dim")), soft_wrap=True
        )

    def metric(self, metric: Mapping[str, Any]) -> None:
        self._story.metrics.append(metric)
        shows = {
            "start": self._start,
            "train": self._train,
            "rate": self._rate,
            "eval": self._eval,
            "end": self._end,
        }
        show = shows.get(str(metric.get("event")))
        if show:
            show(metric)

    def _start(self, metric: Mapping[str, Any]) -> None:
        name = metric.get("workload", "training")
        size = _words(metric, "parameters", "{:,} parameters, ")
        data = _words(metric, "train_samples", "{:,} samples, ")
        resumed = (
            f", from step {_step(metric, 'resumed_step')}" if _step(metric, "resumed_step") else ""
        )
        text = f"{name}: {size}{data}{metric.get('world_size')} processes on {metric.get('device')} ({metric.get('backend')}){resumed}"
        self._console.print(Text.assemble((f"{'Training':<11}", "bold"), text), soft_wrap=True)
        self._task = self._fresh_task(
            str(name), total=number(metric.get("steps")), completed=_step(metric, "resumed_step")
        )

    def _fresh_task(self, name: str, total: float | None, completed: int = 0) -> TaskID:
        """The one bar; the one before goes."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        return self._progress.add_task(name, total=total, completed=completed, words="")

    def _train(self, metric: Mapping[str, Any]) -> None:
        loss = _words(metric, "loss", "  loss {:.4f}")
        speed = _words(metric, "samples_per_second", "  {:,.0f} samples/s")
        words = f"epoch {metric.get('epoch')}/{metric.get('epochs')}{loss}{self._accuracy}{speed}"
        if self._task is not None:
            self._progress.update(self._task, completed=_step(metric), words=words)

    def _rate(self, metric: Mapping[str, Any]) -> None:
        speed = _words(metric, "images_per_second", "  {:,.0f} images/s")
        words = f"{metric.get('arm')}{speed}"
        if self._task is not None:
            self._progress.update(self._task, completed=_step(metric), words=words)

    def _eval(self, metric: Mapping[str, Any]) -> None:
        self._accuracy = _words(metric, "accuracy", "  accuracy {:.1%}")
        if not self._console.is_terminal:
            step = _words(metric, "step", "step {:>5}  ")
            loss = _words(metric, "loss", "test loss {:.4f}")
            self._console.print(Text(f"{'':<11}{step}{loss}{self._accuracy}"))

    def _end(self, metric: Mapping[str, Any]) -> None:
        self._ended = True
        if self._task is not None:
            self._progress.update(self._task, completed=_step(metric))

    def summary(self, status: Status, files: Mapping[str, str]) -> None:
        """Result, where the time went, and where things are."""
        if status.result:
            values = "  ".join(f"{key} {_short(value)}" for key, value in status.result.items())
            self._console.print(Text.assemble((f"{'Result':<11}", "bold"), (values, "bold green")))
        table = Table.grid(padding=(0, 1))
        for stage, seconds, part in share(self._story.seconds()):
            bar = Text("█" * max(1, round(part * BAR_WIDTH)), style="cyan")
            table.add_row("          ", f"{seconds:6.2f} s", f"{part:4.0%}", bar, stage)
        if table.row_count:
            whole = self._story.ended - self._story.began
            self._console.print(Text.assemble((f"{'Time':<11}", "bold"), f"{whole:.1f} s in all"))
            self._console.print(table)
        for what, path in files.items():
            self._console.print(Text.assemble((f"{what:<11}", "bold"), path), soft_wrap=True)


def _words(metric: Mapping[str, Any], key: str, template: str) -> str:
    """`template` with a number; with nan where it is null, JSON's word for that: a loss that diverged is news. Else nothing."""
    value = metric.get(key, "")
    if value is None:
        value = math.nan
    return (
        template.format(value)
        if isinstance(value, int | float) and not isinstance(value, bool)
        else ""
    )


def _step(metric: Mapping[str, Any], key: str = "step") -> int:
    return int(number(metric.get(key)) or 0)


def _short(text: str) -> str:
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text
