"""Figures of runs: loss and accuracy over steps, or the speed of messages over their sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpjob.jobs.run_metrics import RunMetrics, finite_number

# Importing matplotlib takes half a second, so it is imported only when a figure is drawn.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of the runs.
COLOURS = ("#1f4e79", "#c0561f", "#3a7d44", "#7b4397", "#8a6d1a", "#a8323e")

Runs = Mapping[str, RunMetrics]


@dataclass(frozen=True)
class Curve:
    """A run's name, and its points."""

    run: str
    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Panel:
    """One kind of curve: the event and keys of its values, and the labels of its axes."""

    event: str
    value: str
    title: str
    over: str = "step"
    x_label: str = "optimizer step"
    scale: float = 1.0

    def curves(self, runs: Runs) -> list[Curve]:
        """Return the curves of the runs with reports of such values."""
        found = []
        for name, metrics in runs.items():
            x, y = metrics.curve(self.event, self.value, self.over)
            if x:
                found.append(Curve(name, x, [self.scale * value for value in y]))
        return found


LOSS = Panel("train", "loss", "training loss")
ACCURACY = Panel("eval", "accuracy", "test accuracy, %", scale=100)
SPEEDS = (
    Panel("speed", "message_gb_per_second", "send and recv, GB/s", "bytes", "bytes"),
    Panel("speed", "all_reduce_gb_per_second", "all_reduce, GB/s on the bus", "bytes", "bytes"),
    Panel("speed", "message_seconds", "send and recv, ms", "bytes", "bytes", 1e3),
    Panel("speed", "all_reduce_seconds", "all_reduce, ms", "bytes", "bytes", 1e3),
)


def draw(runs: Runs, title: str) -> "Figure | None":
    """Return the curves as a figure of matplotlib, or None if there are none."""
    if not has_curves(runs):
        return None
    from matplotlib.figure import Figure

    # Without pyplot: it keeps every figure, and may look for a display.
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    if _has_training(runs):
        _draw_training(runs, figure)
    else:
        _draw_speeds(runs, figure)
    figure.suptitle(title)
    return figure


def has_curves(runs: Runs) -> bool:
    """Return True if one of the runs has figures to draw."""
    return _has_training(runs) or bool(SPEEDS[0].curves(runs))


def _has_training(runs: Runs) -> bool:
    return bool(LOSS.curves(runs) or ACCURACY.curves(runs))


def save_figure(runs: Runs, title: str, path: Path) -> bool:
    """Write the curves as a picture. Return False, and write nothing, if there are none."""
    figure = draw(runs, title)
    if figure is None:
        return False
    figure.savefig(path)
    return True


def _draw_training(runs: Runs, figure: "Figure") -> None:
    """Draw losses on the left axis and accuracies on the right one.

    Each run has one colour, and accuracies are dashed. A single run has one colour for each axis.
    """
    axes = figure.add_subplot()
    single = len(runs) == 1
    colours = {name: _colour(number) for number, name in enumerate(runs)}
    for curve in LOSS.curves(runs):
        axes.plot(curve.x, curve.y, color=colours[curve.run], label=curve.run)
    # Mark the start of each later attempt, at the step of its checkpoint.
    for metrics in runs.values():
        for resumed in metrics.of_kind("start")[1:]:
            step = finite_number(resumed.get("resumed_step")) or 0
            axes.axvline(step, color="grey", linestyle=":")
    axes.set(xlabel=LOSS.x_label, ylabel=LOSS.title)
    # A loss such as a log-likelihood may be negative.
    if all(value >= 0 for curve in LOSS.curves(runs) for value in curve.y):
        axes.set_ylim(bottom=0)
    _finish(axes, legend=not single)
    accuracies = ACCURACY.curves(runs)
    if not accuracies:
        return
    right = axes.twinx()
    line = "-" if single else "--"
    for curve in accuracies:
        colour = _colour(1) if single else colours[curve.run]
        right.plot(curve.x, curve.y, line, color=colour, marker="o", markersize=3)
    right.set(ylabel=ACCURACY.title if single else f"{ACCURACY.title} (dashed)", ylim=(None, 100))
    right.spines["top"].set_visible(False)
    if single:
        axes.yaxis.label.set_color(_colour(0))
        right.yaxis.label.set_color(_colour(1))


def _draw_speeds(runs: Runs, figure: "Figure") -> None:
    """Draw bandwidth and time of both kinds of messages over their sizes, in four panels."""
    figure.set_size_inches(9, 6)
    for position, panel in enumerate(SPEEDS, start=1):
        axes = figure.add_subplot(2, 2, position)
        for number, curve in enumerate(panel.curves(runs)):
            colour = _colour(number)
            axes.plot(curve.x, curve.y, color=colour, marker="o", markersize=3, label=curve.run)
        axes.set(xlabel=panel.x_label, ylabel=panel.title, yscale="log")
        axes.set_xscale("log", base=2)
        _finish(axes, legend=len(runs) > 1)


def _finish(axes: "Axes", legend: bool) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
