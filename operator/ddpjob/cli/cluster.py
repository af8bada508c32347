"""The commands for jobs in a cluster, and their options."""

from typing import Annotated

import typer

from ddpjob.cli.app import CLUSTER, app, require_choice
from ddpjob.cli.connection import Connection
from ddpjob.cli.options import (
    Accelerator,
    AllNamespaces,
    Checkpoints,
    Code,
    Context,
    Gpus,
    Image,
    JobName,
    Kubeconfig,
    Name,
    Namespace,
    Nodes,
    Nproc,
    Script,
    Settings,
    complete_jobs,
    refuse_without_script,
)
from ddpjob.core.api import profiles

Form = Annotated[str, typer.Option("--output", "-o", help="table, wide, json, yaml or name.")]
Watch = Annotated[
    bool, typer.Option("--watch", "-w", help="Show it again after each change, until Ctrl-C.")
]


def refuse_watch_of_data(watch: bool, form: str) -> None:
    """Raise BadParameter for data that would be printed again and again."""
    if watch and form in ("json", "yaml", "name"):
        raise typer.BadParameter(f"cannot be combined with -o {form}", param_hint="--watch")


@app.command(short_help="Submit the jobs of manifests.", rich_help_panel=CLUSTER)
def submit(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE…",
            help="Manifests, or - for stdin. With --script, the arguments of the script.",
        ),
    ] = None,
    settings: Settings = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the API server check all, and create nothing.")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Delete existing jobs of the same names first."),
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show progress and output until the end.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end of the jobs.")] = False,
    script: Script = None,
    code: Code = None,
    image: Image = None,
    name: Name = None,
    nodes: Nodes = None,
    nproc: Nproc = None,
    accelerator: Accelerator = profiles.DEFAULT,
    gpus: Gpus = None,
    checkpoints: Checkpoints = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Submit the jobs of manifests, and the other objects in them, by server-side apply.

    All documents are tried before the first is created.

    Examples: ddpjob submit job.yaml --follow;
    ddpjob submit --script train.py --image IMAGE --nodes 4 -- --epochs 3

    Exit codes, with --follow or --wait:
    0: the jobs are Complete
    1: a job Failed
    2: the cluster or this command refused something
    """
    from ddpjob.cli.own_script import OwnScript
    from ddpjob.cli.submit import SubmitOptions, file_documents, script_documents, submit

    words = files or []
    options = SubmitOptions(dry_run, replace, follow, wait, namespace)
    if script:
        own = OwnScript(
            script, image, code, words, name, nodes, nproc, accelerator, gpus, checkpoints
        )
        documents = script_documents(own.resolved(), settings or [])
    else:
        refuse_without_script(
            code=code,
            image=image,
            name=name,
            nodes=nodes,
            nproc=nproc,
            gpus=gpus,
            checkpoints=checkpoints,
            accelerator=None if accelerator == profiles.DEFAULT else accelerator,
        )
        documents = file_documents(words, settings or [])
    Connection(namespace, context, kubeconfig).run(
        lambda client: submit(client, documents, options)
    )


@app.command("list", short_help="List jobs.", rich_help_panel=CLUSTER)
def list_jobs(
    all_namespaces: AllNamespaces = False,
    form: Form = "table",
    watch: Watch = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """List jobs: what runs, why not, and how far it is."""
    from ddpjob.cli.view import FORMATS, list_jobs

    require_choice("--output", form, FORMATS)
    refuse_watch_of_data(watch, form)
    Connection(namespace, context, kubeconfig).run(
        lambda client: list_jobs(client, all_namespaces=all_namespaces, form=form, watch=watch)
    )


@app.command(short_help="Show all that concerns a job.", rich_help_panel=CLUSTER)
def status(
    job: JobName,
    form: Form = "table",
    watch: Watch = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show what a job does, why, how far it is, what ended its attempts, and what comes next."""
    from ddpjob.cli.view import FORMATS, show_status

    require_choice("--output", form, FORMATS)
    refuse_watch_of_data(watch, form)
    Connection(namespace, context, kubeconfig).run(
        lambda client: show_status(client, job, form, watch)
    )


@app.command(short_help="Print the output of a job's nodes.", rich_help_panel=CLUSTER)
def logs(
    job: JobName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has finished.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only the lines of this global rank.")
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="N", help="Only these nodes, such as 3 or 0-7. May be repeated."),
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(min=0, help="Only the lines of this attempt; the first is 0.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only lines that are newer than 90s, 5m or 2h.")
    ] = None,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Only the last lines of each pod.")
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Print the time of each line, in UTC.")
    ] = False,
    prefix: Annotated[bool, typer.Option(help="Begin each line with its node, such as n0.")] = True,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print the output of all nodes of a job and all its attempts, in the order of time.

    With --follow, new pods are followed too, so the output goes on after a restart.

    Examples: ddpjob logs digits -f; ddpjob logs digits --no-prefix --rank 0
    """
    from ddpjob.cli.logs import LogOptions, logs, read_duration, read_nodes
    from ddpjob.client import LogChoice

    if attempt is not None and not (since is None and tail is None):
        message = "cannot be combined with --since or --tail"
        raise typer.BadParameter(message, param_hint="--attempt")
    choice = LogChoice(read_nodes(node or []), rank, attempt, read_duration(since, "--since"), tail)
    options = LogOptions(follow, timestamps, prefix)
    Connection(namespace, context, kubeconfig).run(
        lambda client: logs(client, job, choice, options)
    )


@app.command(short_help="Wait for the end of a job.", rich_help_panel=CLUSTER)
def wait(
    job: JobName,
    timeout: Annotated[
        str | None,
        typer.Option(show_default="none", help="Longest time to wait, such as 90s, 5m or 2h."),
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Wait for the end of a job. Made for CI.

    Exit codes:
    0: the job is Complete
    1: the job Failed
    2: there is no such job, it was deleted, or the cluster does not answer
    124: the time is over
    """
    from ddpjob.cli.change import wait as wait_for
    from ddpjob.cli.logs import read_duration

    seconds = read_duration(timeout, "--timeout")
    Connection(namespace, context, kubeconfig).run(lambda client: wait_for(client, job, seconds))


@app.command(short_help="Stop a job and keep it.", rich_help_panel=CLUSTER)
def suspend(
    job: JobName,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Stop a job and keep it. Its pods get SIGTERM and time to write a checkpoint."""
    from ddpjob.cli.change import suspend

    Connection(namespace, context, kubeconfig).run(lambda client: suspend(client, job))


@app.command(short_help="Continue a suspended job.", rich_help_panel=CLUSTER)
def resume(
    job: JobName,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Continue a suspended job from its last checkpoint."""
    from ddpjob.cli.change import resume

    Connection(namespace, context, kubeconfig).run(lambda client: resume(client, job))


@app.command(short_help="Take a Failed job up again.", rich_help_panel=CLUSTER)
def retry(
    job: JobName,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Take a Failed job up again from its last checkpoint.

    The job keeps its counters and its history. Its budgets and its active time begin anew. To run a
    job again from its manifest, use ddpjob restart.
    """
    from ddpjob.cli.change import retry

    Connection(namespace, context, kubeconfig).run(lambda client: retry(client, job))


@app.command(short_help="Change the number of nodes.", rich_help_panel=CLUSTER)
def scale(
    job: JobName,
    nodes: Annotated[int, typer.Argument(min=1, help="New number of nodes.")],
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Change the number of nodes. A running job begins a new attempt of that size."""
    from ddpjob.cli.change import scale

    Connection(namespace, context, kubeconfig).run(lambda client: scale(client, job, nodes))


@app.command(short_help="Run a job again.", rich_help_panel=CLUSTER)
def restart(
    job: JobName,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Restart a running job, by suspend and resume, or run a finished one again.

    A finished job is deleted and created again with the same manifest. Checkpoints stay, so
    training continues from the last one.
    """
    from ddpjob.cli.change import restart

    Connection(namespace, context, kubeconfig).run(lambda client: restart(client, job))


@app.command(short_help="Delete jobs and their pods.", rich_help_panel=CLUSTER)
def delete(
    jobs: Annotated[
        list[str],
        typer.Argument(metavar="JOB…", help="Names of jobs.", autocompletion=complete_jobs),
    ],
    wait: Annotated[bool, typer.Option(help="Wait until the jobs are gone.")] = True,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Delete jobs and their pods. Checkpoints stay, and the output says where they are."""
    from ddpjob.cli.change import delete

    Connection(namespace, context, kubeconfig).run(lambda client: delete(client, jobs, wait))
