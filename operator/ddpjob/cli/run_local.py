"""`ddpjob run --local`: read the manifest, lock the folder, show the run and its result."""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import typer
import yaml
from rich.console import Console
from rich.text import Text

from ddpjob.core.api.readers import SpecError
from ddpjob.core.api.reasons import Reason
from ddpjob.jobs.run_metrics import RunMetrics
from ddpjob.local.config_maps import read_files
from ddpjob.local.manifest import AS_WRITTEN, Manifest, check_claims, read, sets_restarts
from ddpjob.local.run import LocalRun, Stopped, check
from ddpjob.local.run_files import RunFiles, RunFolderError, run_folder, write_whole
from ddpjob.local.sizes import Overrides
from ddpjob.show.curves import save_figure
from ddpjob.show.display import Display

# Exit code for a manifest that cannot run here.
REFUSED = 2

# A shell's exit code for a process that a signal ended is this and the signal's number.
SIGNAL_BASE = 128

# Printed after a failure that a cluster would have followed by another attempt.
NO_RESTARTS = (
    "a run on this machine has no restarts after failures, unless failurePolicy.maxRestarts or "
    "--max-restarts sets their number"
)


@dataclass(frozen=True)
class RunOptions:
    """Whether the claims are deleted first, and values that replace those of the manifest."""

    fresh: bool = False
    overrides: Overrides = AS_WRITTEN


class Terminal(Console):
    """Standard output. If its reader ends (`| head`), the run ends like after a closed terminal."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        signal.raise_signal(signal.SIGHUP)


def run_local(
    path: Path,
    runs: Path,
    claims: Mapping[str, Path],
    config_maps: Mapping[str, Path],
    options: RunOptions,
) -> int:
    """Run the job in a file and return the exit code. Raises BadParameter for an option.

    `claims` are the folders and `config_maps` the files or folders that take the place of objects
    in a cluster, by the names of these objects.
    """
    # The processes of a pod may have another working folder.
    claims = {name: folder.resolve() for name, folder in claims.items()}
    files = {name: _read_files(name, place) for name, place in config_maps.items()}
    try:
        manifest = read(path, options.overrides, os.cpu_count() or 1)
        manifest = replace(manifest, config_maps={**manifest.config_maps, **files})
        _check_claim_options(manifest, claims)
        # Check the job before run_folder clears the folder of the run before.
        parent = runs.resolve()
        folder = parent / manifest.job.name
        check(manifest.job, RunFiles(folder, claims, manifest.config_maps))
        with run_folder(parent, manifest.job.name) as folder:
            if options.fresh:
                shutil.rmtree(folder / "claims", ignore_errors=True)
            return _run(manifest, RunFiles(folder, claims, manifest.config_maps))
    except SpecError as error:
        message = Text.assemble((f"{path}: ", "bold red"), str(error))
        Console(stderr=True, highlight=False).print(message, soft_wrap=True)
        return REFUSED
    except RunFolderError as error:
        raise typer.BadParameter(str(error), param_hint="--runs") from error


def _read_files(name: str, place: Path) -> dict[str, str]:
    """Return the texts of a ConfigMap by their keys. Raises BadParameter."""
    try:
        return read_files(place)
    except SpecError as error:
        message = f"{name}={place}: {error}"
        raise typer.BadParameter(message, param_hint="--config-map") from error


def _check_claim_options(manifest: Manifest, claims: Mapping[str, Path]) -> None:
    try:
        check_claims(manifest, claims)
    except SpecError as error:
        raise typer.BadParameter(str(error), param_hint="--claim") from error


def _run(manifest: Manifest, files: RunFiles) -> int:
    console = Terminal(highlight=False)
    metrics = RunMetrics(start_time=time.time())
    display = Display(console, metrics)
    # Print what runs, where, and which fields have no effect.
    spec = manifest.spec
    size = f"nodes={spec.nodes}, nprocPerNode={spec.nproc_per_node}"
    header = Text.assemble((manifest.job.name, "bold"), f": {size}, in {files.folder}")
    console.print(header, soft_wrap=True)
    for note in manifest.notes:
        display.note(note)
    write_whole(files.manifest, yaml.safe_dump(dict(manifest.document), sort_keys=False))
    # Run until the job is finished or a signal arrives.
    try:
        with display:
            status = asyncio.run(LocalRun(manifest.job, files, display).run())
    except Stopped as stopped:
        console.print(f"[bold yellow]Stopped[/]    by {stopped}; all processes have ended")
        console.print(f"[bold]Logs[/]       {files.logs}/", soft_wrap=True)
        return SIGNAL_BASE + stopped.number
    metrics.end_time = time.time()
    # Print the summary. The run has ended, so a disk that is full must not hide its result.
    paths = {"Logs": f"{files.logs}/"}
    if metrics.events:
        paths["Metrics"] = str(files.metrics)
    try:
        if save_figure({manifest.job.name: metrics}, manifest.job.name, files.curve):
            paths["Curve"] = str(files.curve)
    except OSError as error:
        display.note(f"cannot write {error.filename}: {error.strerror}")
    display.summary(status, paths)
    if status.reason == Reason.MAX_RESTARTS and not sets_restarts(manifest.document):
        display.note(NO_RESTARTS)
    return status.exit_code
