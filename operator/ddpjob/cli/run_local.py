"""`ddpjob run --local`: a manifest, a folder and a display around one LocalRun."""

import asyncio
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ddpjob.core.api import SpecError
from ddpjob.local.curve import draw
from ddpjob.local.display import Display
from ddpjob.local.manifest import Manifest, read
from ddpjob.local.run import LocalRun, Stopped, exit_code, run_folder
from ddpjob.local.story import Story
from ddpjob.local.translate import Folders

REFUSED = 2
INTERRUPTED = 128


def run_local(path: Path, runs: Path, claims: Mapping[str, Path], fresh: bool) -> int:
    """Runs the job in `path`; returns the exit code."""
    console = Console(highlight=False)
    try:
        manifest = read(path)
        with run_folder(runs.resolve(), manifest.job.name) as folder:
            if fresh:
                shutil.rmtree(folder / "claims", ignore_errors=True)
            return _run(manifest, Folders(folder, claims), console)
    except SpecError as error:
        Console(stderr=True, highlight=False).print(
            Text.assemble((f"{path}: ", "bold red"), str(error)), soft_wrap=True
        )
        return REFUSED


def _run(manifest: Manifest, folders: Folders, console: Console) -> int:
    story = Story(began=time.time())
    display = Display(console, story)
    job = LocalRun(manifest, folders, display)
    console.print(
        f"[bold]{manifest.job.name}[/]: {manifest.spec.nodes} nodes x {manifest.spec.processes} processes, in {folders.run}"
    )
    for note in manifest.notes:
        display.note(note)
    try:
        with display:
            status = asyncio.run(job.run())
    except Stopped as stopped:
        console.print(f"[bold yellow]Stopped[/]    by {stopped}; every process has ended")
        return INTERRUPTED + stopped.number
    story.ended = time.time()
    display.summary(status, _files(folders.run, story, manifest.job.name))
    return exit_code(status)


def _files(folder: Path, story: Story, job: str) -> dict[str, str]:
    files = {"Logs": f"{folder / 'logs'}/"}
    if story.metrics:
        files["Metrics"] = str(folder / "metrics.jsonl")
    if draw(story, job, folder / "curve.png"):
        files["Curve"] = str(folder / "curve.png")
    return files
