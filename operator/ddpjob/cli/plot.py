"""`ddpjob plot`: the curves of runs, from their JSON lines wherever those are."""

import os
import shutil
import sys
from pathlib import Path

from ddpjob.local.curves import draw, terminal
from ddpjob.local.run_metrics import Metric, Story, metric

NARROWEST, WIDEST = 40, 120  # columns


class NothingToPlot(ValueError):
    """The files cannot be read, or hold no curve; the sentence says what to do."""


def plot(paths: list[str], out: Path | None) -> None:
    """Prints the curves, and writes a PNG where `out` is given. Raises NothingToPlot."""
    runs: dict[str, Story] = {}
    for path in paths:
        name = _name(path)
        runs[name if name not in runs else path] = Story(0.0, metrics=_metrics(path))
    width = max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns))
    pictures = list(terminal(runs, width, colours=sys.stdout.isatty()))
    if not pictures:
        raise NothingToPlot(
            f"no losses and no speeds in {', '.join(paths)}: give the metrics.jsonl of a local run, or the log of a job's "
            "node 0 (kubectl logs JOB-0-0 | ddpjob plot -)"
        )
    print("\n".join(pictures))
    if out is not None:
        try:
            draw(runs, ", ".join(runs), out)
        except (
            OSError,
            ValueError,
        ) as error:  # matplotlib says ValueError of an ending that it cannot write
            raise NothingToPlot(f"cannot write {out}: {error}") from error


def _name(path: str) -> str:
    """A local run's folder; else the file."""
    file = Path(path)
    return file.resolve().parent.name if file.name == "metrics.jsonl" else file.stem


def _metrics(path: str) -> list[Metric]:
    try:
        text = (
            sys.stdin.buffer.read().decode(errors="replace")
            if path == "-"
            else Path(path).read_text(errors="replace")
        )
    except OSError as error:
        raise NothingToPlot(f"cannot read {path}: {os.strerror(error.errno or 0)}") from error
    return [found for line in text.splitlines() if (found := metric(line))]
