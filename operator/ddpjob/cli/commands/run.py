"""`ddpjob run --local`: read the manifest, lock the folder, show the run and its result."""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.text import Text

from ddpjob.cli.extras import require_extra
from ddpjob.cli.options import read_pairs
from ddpjob.cli.own_script import OwnScript
from ddpjob.cli.script_options import (
    Accelerator,
    Checkpoints,
    Code,
    Cpu,
    Gpus,
    Image,
    Memory,
    Name,
    OwnOptions,
    Script,
    SecretEnv,
)
from ddpjob.core.api import profiles
from ddpjob.core.api.readers import SpecError
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.status import Status
from ddpjob.jobs.run_metrics import RunMetrics
from ddpjob.local.config_maps import Files, read_files
from ddpjob.local.manifest import (
    AS_WRITTEN,
    Manifest,
    check_claims,
    from_documents,
    read,
    sets_restarts,
)
from ddpjob.local.run_files import RunFiles, RunFolderError, run_folder, write_whole
from ddpjob.local.sizes import Overrides
from ddpjob.show.curves import has_curves
from ddpjob.show.display import Display
from ddpjob.show.text import LABEL_WIDTH

# A section of the help.
SIZE = "Instead of what the manifest says"

# Exit code for a refused manifest or script.
REFUSED = 2

# A shell's exit code for a process ended by a signal is the sum of this and the signal's number.
SIGNAL_BASE = 128

NO_SETUP = (
    "is for a manifest with spec.setup; a script of your own runs in this Python environment. For "
    "the same as in a cluster, make a manifest first: ddpjob init --script FILE --setup COMMANDS"
)

# Printed after a failure without a restart. A cluster would have begun another attempt.
NO_RESTARTS = (
    "a run on this machine has no restarts after failures, unless failurePolicy.maxRestarts or "
    "--max-restarts sets their number"
)


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE",
            help="Manifest with one DDPJob and its ConfigMaps, or - for stdin. With --script, the "
            "arguments of the script.",
        ),
    ] = None,
    local: Annotated[
        bool,
        typer.Option(
            "--local",
            help="Run on this machine. Required, since `ddpjob submit` runs jobs in a cluster.",
        ),
    ] = False,
    runs: Annotated[
        Path, typer.Option(help="Folder of all runs. Each job gets a folder of its own in it.")
    ] = Path("ddpjob-runs"),
    claim: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            show_default="RUNS/JOB/claims/NAME",
            help="Use FOLDER as the PersistentVolumeClaim NAME. May be repeated.",
        ),
    ] = None,
    config_map: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="Use a file, or the files of a folder, as the ConfigMap NAME, as `kubectl create "
            "configmap NAME --from-file PATH` does. May be repeated.",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Delete the job's claims first, with their checkpoints."),
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="that of the manifest",
            help="Number of nodes.",
            rich_help_panel=SIZE,
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="that of the manifest, or what fits this machine",
            help="Number of processes of each node.",
            rich_help_panel=SIZE,
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default="that of the manifest, or 0",
            help="Number of restarts after failures. A cluster gives a job 3 by default.",
            rich_help_panel=SIZE,
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Variable of the processes. May be repeated.",
            rich_help_panel=SIZE,
        ),
    ] = None,
    setup: Annotated[
        bool,
        typer.Option(
            "--setup",
            help="Run spec.setup of the manifest, in a virtual environment of the run.",
        ),
    ] = False,
    script: Script = None,
    code: Code = None,
    image: Image = None,
    name: Name = None,
    accelerator: Accelerator = profiles.DEFAULT,
    gpus: Gpus = None,
    checkpoints: Checkpoints = None,
    secret_env: SecretEnv = None,
    cpu: Cpu = None,
    memory: Memory = None,
) -> None:
    """Run a job on this machine, without a cluster. Each node is one group of processes.

    With --script, the script runs where it is: in the folder of --code, or in the current one. It
    takes the other options of `ddpjob submit` too, and prints which of them have no effect here.

    Example: ddpjob run --local --script train.py --nodes 2 -- --epochs 3

    Exit codes:
    0: the job is Complete
    1: the job Failed
    2: the manifest or an option was refused
    128 + N: signal N ended the run
    """
    if not local:
        raise typer.BadParameter(
            "is required to run a job on this machine; to run it in a cluster, use `ddpjob submit`",
            param_hint="--local",
        )
    claims = _read_places(claim or [], "--claim", "NAME=FOLDER")
    for chosen, folder in claims.items():
        if not folder.is_dir():
            raise typer.BadParameter(
                f"{chosen}={folder}: folder {folder} does not exist", param_hint="--claim"
            )
    config_maps = _read_places(config_map or [], "--config-map", "NAME=PATH")
    variables = dict(read_pairs(env or [], "--env", "NAME=VALUE"))
    overrides = Overrides(nodes, nproc, max_restarts, variables, setup)
    script_options = OwnOptions(
        code, image, name, None, checkpoints, None, secret_env, cpu, memory, None
    )
    if script:
        if setup:
            raise typer.BadParameter(NO_SETUP, param_hint="--setup")
        own = OwnScript(script, args=words or [], nodes=None, accelerator=accelerator, gpus=gpus)
        own = own.with_options(script_options).resolved()
        manifest = script
    else:
        script_options.refuse(accelerator, gpus=gpus)
        own, manifest = None, _one_file(words or [])
    options = RunOptions(fresh, overrides, own)
    with require_extra("local"):
        raise typer.Exit(run_local(manifest, runs, claims, config_maps, options))


def _one_file(words: list[str]) -> Path:
    if len(words) != 1:
        raise typer.BadParameter(
            "give one manifest, or --script with its arguments after --", param_hint="FILE"
        )
    return Path(words[0])


def _read_places(options: Iterable[str], hint: str, form: str) -> dict[str, Path]:
    """Return the paths of options such as --claim NAME=FOLDER by their names."""
    return {name: Path(path) for name, path in read_pairs(options, hint, form)}


@dataclass(frozen=True)
class RunOptions:
    """The differences of a run from its manifest.

    - `fresh`: the claims are deleted first. `overrides`: values in place of those of the manifest.
    - `script`: the user's own script in place of a manifest.
    """

    fresh: bool = False
    overrides: Overrides = AS_WRITTEN
    script: OwnScript | None = None


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

    `claims` are folders and `config_maps` are files or folders in place of objects in a cluster, by
    the names of these objects.
    """
    from ddpjob.local.run import check

    # The processes of a pod may have another working folder.
    claims = {name: folder.resolve() for name, folder in claims.items()}
    files = {name: _read_files(name, place) for name, place in config_maps.items()}
    try:
        manifest = _read(path, options)
        manifest = replace(manifest, config_maps={**manifest.config_maps, **files})
        _check_claim_options(manifest, claims)
        # Check the job before run_folder clears the folder of the run before.
        parent = runs.resolve()
        folder = parent / manifest.job.name
        run_files = RunFiles(folder, claims, manifest.config_maps, _working_folder(options.script))
        check(manifest.job, run_files)
        with run_folder(parent, manifest.job.name) as folder:
            if options.fresh:
                shutil.rmtree(folder / "claims", ignore_errors=True)
            return _run(manifest, replace(run_files, folder=folder))
    except SpecError as error:
        # A message about a script has the path already.
        place = "" if options.script else f"{path}: "
        message = Text.assemble((place, "bold red"), str(error))
        Console(stderr=True, highlight=False).print(message, soft_wrap=True)
        return REFUSED
    except RunFolderError as error:
        raise typer.BadParameter(str(error), param_hint="--runs") from error


def _read(path: Path, options: RunOptions) -> Manifest:
    cores = os.cpu_count() or 1
    if options.script is None:
        return read(path, options.overrides, cores)
    manifest = from_documents([options.script.local_document()], options.overrides, cores)
    if options.script.image is None:
        # The image of the profile is not the user's choice.
        notes = tuple(note for note in manifest.notes if not note.startswith("spec.image:"))
        manifest = replace(manifest, notes=notes)
    return manifest


def _working_folder(script: OwnScript | None) -> Path | None:
    """Return the working folder of a user's own script, or None for the current one."""
    return script.folder.resolve() if script and script.folder else None


def _read_files(name: str, place: Path) -> Files:
    """Return the files of a ConfigMap by their keys. Raises BadParameter."""
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
    from ddpjob.local.run import LocalRun, Stopped

    console = Terminal(highlight=False)
    metrics = RunMetrics(start_time=time.time())
    display = Display(console, metrics)
    # Print the size and the folder of the run, and the fields without an effect.
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
        stop = Text.assemble((f"{'Stopped':<{LABEL_WIDTH}}", "bold yellow"), f"by {stopped}")
        console.print(stop.append("; all processes have ended"))
        display.summary(Status(), {"Logs": f"{files.logs}/"})
        return SIGNAL_BASE + stopped.number
    metrics.end_time = time.time()
    paths = {"Logs": f"{files.logs}/"}
    if metrics.events:
        paths["Metrics"] = str(files.metrics)
    display.summary(status, paths)
    if status.reason == Reason.MAX_RESTARTS and not sets_restarts(manifest.document):
        display.note(NO_RESTARTS)
    can_plot = has_curves({manifest.job.name: metrics})
    display.next(_next_commands(status, files, can_plot=can_plot))
    return status.exit_code


def _next_commands(status: Status, files: RunFiles, *, can_plot: bool) -> dict[str, str]:
    """Return useful commands after a run, each with a description."""
    pod = status.last_failure.pod
    if status.exit_code and pod:
        return {f"less {quote(str(files.log(pod)))}": "shows the output of the failure"}
    return {f"ddpjob plot {quote(str(files.folder))}": "draws its curves"} if can_plot else {}
