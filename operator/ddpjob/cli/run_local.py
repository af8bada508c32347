"""`ddpjob run --local`: a manifest, a folder and a display around one LocalRun."""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ddpjob.core.readers import SpecError
from ddpjob.local.curves import draw
from ddpjob.local.display import Display
from ddpjob.local.manifest import Manifest, check_claims, read
from ddpjob.local.run import LocalRun, Stopped, exit_code, run_folder
from ddpjob.local.run_metrics import Story
from ddpjob.local.translate import Folders

REFUSED = 2
SIGNAL_BASE = 128
"""A shell's exit code for an end by a signal is this and the signal's number."""


class Terminal(Console):
    """Standard output; where its reader has gone (`| head`), the run ends as when a terminal is closed."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        signal.raise_signal(signal.SIGHUP)


def run_local(path: Path, runs: Path, claims: Mapping[str, Path], fresh: bool) -> int:
    """Runs the job in `path`; returns the exit code."""
    console = Terminal(highlight=False)
    try:
        manifest = read(path)
        check_claims(manifest.spec, claims)
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
    size = f"{manifest.spec.nodes} nodes x {manifest.spec.nproc_per_node} processes"
    console.print(
        Text.assemble((manifest.job.name, "bold"), f": {size}, in {folders.run}"), soft_wrap=True
    )
    for note in manifest.notes:
        display.note(note)
    try:
        with display:
            status = asyncio.run(job.run())
    except Stopped as stopped:
        console.print(f"[bold yellow]Stopped[/]    by {stopped}; every process has ended")
        return SIGNAL_BASE + stopped.number
    story.ended = time.time()
    try:
        files = _files(folders.run, story, manifest.job.name)
    except OSError as error:
        display.note(f"{error.filename}: {error.strerror}")
        files = {}
    display.summary(status, files)
    return exit_code(status)


def _files(folder: Path, story: Story, job: str) -> dict[str, str]:
    files = {"Logs": f"{folder / 'logs'}/"}
    if story.metrics:
        files["Metrics"] = str(folder / "metrics.jsonl")
    if draw({job: story}, job, folder / "curve.png"):
        files["Curve"] = str(folder / "curve.png")
    return files
