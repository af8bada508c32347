"""Pictures of one run or of several beside each other: loss and accuracy over steps, or the speed of messages over sizes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpjob.local.run_metrics import Story, number

if TYPE_CHECKING:  # matplotlib takes half a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INKS = ("blue", "orange", "green", "magenta", "yellow", "red")  # a terminal's
MARKS = "*o+x.#"  # where it has no colours
COLOURS = ("#1f4e79", "#c0561f", "#3a7d44", "#7b4397", "#8a6d1a", "#a8323e")


@dataclass(frozen=True)
class Panel:
    """One kind of curve: what it is read from, over what, and what its axes say."""

    event: str
    value: str
    title: str
    over: str = "step"
    across: str = "optimizer step"
    scale: float = 1.0

    def curves(self, runs: Mapping[str, Story]) -> Iterator[tuple[str, list[float], list[float]]]:
        """(run, places, values) of the runs that have such a curve."""
        for name, story in runs.items():
            at, values = story.curve(self.event, self.value, self.over)
            if at:
                yield name, at, [self.scale * value for value in values]


LOSS = Panel("train", "loss", "training loss")
ACCURACY = Panel("eval", "accuracy", "test accuracy, %", scale=100)
SPEEDS = (
    Panel("speed", "message_gb_per_second", "send and recv, GB/s", "bytes", "bytes"),
    Panel("speed", "all_reduce_gb_per_second", "all_reduce, GB/s on the bus", "bytes", "bytes"),
    Panel("speed", "message_seconds", "send and recv, ms", "bytes", "bytes", 1e3),
    Panel("speed", "all_reduce_seconds", "all_reduce, ms", "bytes", "bytes", 1e3),
)


def draw(runs: Mapping[str, Story], title: str, path: Path) -> bool:
    """Writes a PNG; False where there is nothing to draw."""
    learnt = any(LOSS.curves(runs)) or any(ACCURACY.curves(runs))
    if not learnt and not any(SPEEDS[0].curves(runs)):
        return False
    draws = _training if learnt else _speeds
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    draws(runs, figure)
    figure.suptitle(title)
    figure.savefig(path)
    plt.close(figure)
    return True


def _training(runs: Mapping[str, Story], figure: "Figure") -> None:
    """Losses on the left axis, accuracies on the right one: in another colour for one run, dashed for several."""
    axes = figure.add_subplot()
    single = len(runs) == 1
    right = axes.twinx() if any(ACCURACY.curves(runs)) else None
    for place, (name, story) in enumerate(runs.items()):
        colour = _colour(place)
        for _, at, values in LOSS.curves({name: story}):
            axes.plot(at, values, color=colour, label=name)
        for _, at, values in ACCURACY.curves({name: story}):
            assert right is not None
            line = "-" if single else "--"
            right.plot(
                at, values, line, color=_colour(1) if single else colour, marker="o", markersize=3
            )
        for resumed in story.of("start")[1:]:
            axes.axvline(number(resumed.get("resumed_step")) or 0, color="grey", linestyle=":")
    axes.set(xlabel=LOSS.across, ylabel=LOSS.title, ylim=(0, None))
    _finish(axes, legend=not single)
    if right is not None:
        right.set(
            ylabel=ACCURACY.title if single else f"{ACCURACY.title} (dashed)", ylim=(None, 100)
        )
        right.spines["top"].set_visible(False)
        if single:
            axes.yaxis.label.set_color(_colour(0))
            right.yaxis.label.set_color(_colour(1))


def _speeds(runs: Mapping[str, Story], figure: "Figure") -> None:
    """Bandwidth and time of both kinds of messages over their sizes."""
    figure.set_size_inches(9, 6)
    for cell, panel in enumerate(SPEEDS, start=1):
        axes = figure.add_subplot(2, 2, cell)
        for place, (name, at, values) in enumerate(panel.curves(runs)):
            axes.plot(at, values, color=_colour(place), marker="o", markersize=3, label=name)
        axes.set(xlabel=panel.across, ylabel=panel.title, yscale="log")
        axes.set_xscale("log", base=2)
        _finish(axes, legend=len(runs) > 1)


def terminal(runs: Mapping[str, Story], width: int, colours: bool) -> Iterator[str]:
    """The same as text, one picture after the other."""
    import plotext

    for panel in (LOSS, ACCURACY, *SPEEDS[:2]):
        curves = list(panel.curves(runs))
        if not curves:
            continue
        plotext.clear_figure()
        plotext.theme("clear")
        plotext.plotsize(width, 16)
        plotext.title(panel.title)
        plotext.xlabel(panel.across)
        if panel.event == "speed":
            plotext.xscale("log")
        for place, (name, at, values) in enumerate(curves):
            label = name if len(runs) > 1 else None
            plotext.plot(
                at,
                values,
                label=label,
                color=INKS[place % len(INKS)],
                marker="hd" if colours else MARKS[place % len(MARKS)],
            )
        picture = plotext.build()
        yield picture if colours else plotext.uncolorize(picture)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _finish(axes: "Axes", legend: bool) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False)
