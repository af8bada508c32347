"""Show a job in a notebook: its curves as a picture, and its progress while it runs."""

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from ddpjob.jobs.progress import Progress
from ddpjob.jobs.run_metrics import RunMetrics
from ddpjob.jobs.user_job import DDPJob
from ddpjob.show.curves import draw

# Seconds between two looks at a job.
INTERVAL = 1.0


@dataclass(frozen=True)
class Picture:
    """A picture for a notebook, as PNG."""

    png: bytes

    def _repr_png_(self) -> bytes:
        return self.png

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(self.png)


def picture(name: str, metrics: RunMetrics) -> Picture | None:
    """Return the curves of a job, or None if its trainer has printed no figures."""
    figure = draw({name: metrics}, name)
    if figure is None:
        return None
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return Picture(data.getvalue())


def watch(
    get: Callable[[], DDPJob],
    look: Callable[[DDPJob], Progress],
    has_ended: Callable[[DDPJob], bool],
) -> DDPJob:
    """Show a progress bar until a job has ended, and return the job."""
    columns = (
        TextColumn("{task.description}", style="bold"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[details]}"),
        TimeElapsedColumn(),
    )
    with Bars(*columns) as bars:
        job = get()
        task = bars.add_task(job.name, total=None, details="")
        while True:
            job = get()
            progress = look(job)
            text = str(progress) if job.phase == "Running" else f"{job.phase} {job.reason}"
            bars.update(task, completed=progress.step or 0, total=progress.steps, details=text)
            if has_ended(job):
                return job
            time.sleep(INTERVAL)
