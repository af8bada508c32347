"""Draw what the queries of the Grafana dashboard have returned: `python docs/images/dashboard.py`.

The test of the cluster, tests/cluster/test_monitoring.py, writes what it found into
build/dashboard.json. The picture is matplotlib's, not Grafana's.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
FOUND = ROOT / "build" / "dashboard.json"
OUT = Path(__file__).with_name("dashboard.svg")

COLUMNS = 3
TITLE = (
    "The queries of the dashboard over one run on kind. One pod was deleted. Drawn by matplotlib."
)

Panel = dict[str, Any]


def main() -> None:
    found = json.loads(FOUND.read_text())
    panels = [panel for panel in found["panels"] if panel["type"] == "timeseries"]
    rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(5 * COLUMNS, 3 * rows), layout="constrained")
    for number, panel in enumerate(panels, start=1):
        draw(figure.add_subplot(rows, COLUMNS, number), panel, found["start"])
    figure.suptitle(TITLE)
    # Text stays text. Without the date, the same figures give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dashboard"})
    figure.savefig(OUT, metadata={"Date": None})


def draw(axes: Axes, panel: Panel, start: float) -> None:
    """Draw a panel over the seconds since `start`."""
    curves = named_curves(panel, start)
    if panel["stacked"]:
        x = sorted({time for _, points in curves for time in points})
        heights = [[points.get(time, 0.0) for time in x] for _, points in curves]
        axes.stackplot(x, heights, labels=[name for name, _ in curves], alpha=0.8)
    else:
        for name, points in curves:
            axes.plot(list(points), list(points.values()), label=name)
    unit = {"s": ", s", "cps": ", per second", "percentunit": ", part"}.get(panel["unit"], "")
    axes.set_title(panel["title"] + unit, fontsize=10)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        axes.legend(fontsize=6, frameon=False, ncols=1 + len(curves) // 6)


def named_curves(panel: Panel, start: float) -> list[tuple[str, dict[float, float]]]:
    """Return the curves of a panel that are not always 0, or the first one if all are."""
    curves = []
    for legend, series in zip(panel["legends"], panel["series"], strict=True):
        for one in series:
            values = {time - start: float(value) for time, value in one["values"]}
            known = {time: value for time, value in values.items() if math.isfinite(value)}
            curves.append((name_of(legend, one["metric"]), known))
    return [curve for curve in curves if any(curve[1].values())] or curves[:1]


def name_of(legend: str, labels: dict[str, str]) -> str:
    """Return the name of a curve as Grafana writes it. The namespace is that of a test."""
    shown = {**labels, "namespace": "team"}
    return re.sub(r"{{(\w+)}}", lambda label: shown.get(label[1], ""), legend)


if __name__ == "__main__":
    main()
