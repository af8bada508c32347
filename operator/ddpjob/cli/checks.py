"""The commands that check or show what a manifest or a cluster gives, and the completion."""

from pathlib import Path
from typing import Annotated

import typer

from ddpjob.cli.app import CLUSTER, HERE, MANIFESTS, app, require_choice
from ddpjob.cli.connection import Connection
from ddpjob.cli.options import AllNamespaces, Context, Kubeconfig, Namespace, Settings

Files = Annotated[list[str], typer.Argument(metavar="FILE…", help="Manifests, or - for stdin.")]

SHELLS = ("bash", "zsh", "fish", "powershell", "kubectl")


@app.command(short_help="Check manifests without a cluster.", rich_help_panel=MANIFESTS)
def validate(files: Files, settings: Settings = None) -> None:
    """Check manifests without a cluster, by the schema and the rules of the API server.

    The sentences are those with which the API server would refuse to create the jobs.

    Exit codes:
    0: the API server would accept the jobs
    1: it would refuse one
    """
    from ddpjob.cli.extras import require_extra
    from ddpjob.cli.submit import file_documents

    with require_extra("validate"):
        from ddpjob.cli.validate import validate

    raise typer.Exit(validate(file_documents(files, settings or [])))


@app.command(short_help="Print the pods of a job.", rich_help_panel=MANIFESTS)
def render(
    files: Files,
    settings: Settings = None,
    node: Annotated[
        int | None, typer.Option(min=0, show_default="all", help="Only the pod of this node.")
    ] = None,
    pod_security: Annotated[
        str, typer.Option(help="Pod Security level that the operator's chart has: none, restricted")
    ] = "none",
) -> None:
    """Print the Service and the pods that the operator would create for the first attempt."""
    from ddpjob.cli.render import render
    from ddpjob.cli.submit import file_documents

    require_choice("--pod-security", pod_security, ("none", "restricted"))
    documents = file_documents(files, settings or [])
    raise typer.Exit(render(documents, node, restricted=pod_security == "restricted"))


@app.command(short_help="Find out why jobs do not run.", rich_help_panel=CLUSTER)
def doctor(
    namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None
) -> None:
    """Check the operator, your rights, and what jobs need in a namespace.

    Each line is ok, or says what to do. Exit code 1 tells that there is something to do.
    """
    from ddpjob.cli.doctor import doctor

    Connection(namespace, context, kubeconfig).run(doctor)


@app.command(short_help="Show jobs in a browser.", rich_help_panel=CLUSTER)
def ui(
    runs: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of local runs, such as ddpjob-runs, in place of a cluster.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    all_namespaces: AllNamespaces = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1. 0: any free one.")
    ] = 8090,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show jobs in a browser: a list, and for each job its state, attempts, curves and logs.

    The pages are on this machine only, change nothing, and have the rights of your kubeconfig. Open
    the address that the command prints.
    """
    from ddpjob.cli.extras import require_extra

    with require_extra("ui"):
        from ddpjob.cli.ui import serve
        from ddpjob.ui.sources import ClusterSource, LocalSource

    if runs:
        from ddpjob.cli.session import run_until_interrupted
        from ddpjob.client.local import LocalClient

        raise typer.Exit(run_until_interrupted(serve(LocalSource(LocalClient(runs)), port)))
    Connection(namespace, context, kubeconfig).run(
        lambda client: serve(ClusterSource(client, all_namespaces=all_namespaces), port)
    )


@app.command(short_help="Print a completion script for a shell.", rich_help_panel=HERE)
def completion(
    shell: Annotated[
        str, typer.Argument(help="bash, zsh, fish, powershell, or kubectl for kubectl ddpjob.")
    ],
) -> None:
    """Print a script with which the Tab key completes commands, options and names of jobs.

    Examples: source <(ddpjob completion bash);
    ddpjob completion kubectl > ~/.local/bin/kubectl_complete-ddpjob, and make that executable
    """
    from ddpjob.cli.completion import script

    require_choice("SHELL", shell, SHELLS)
    typer.echo(script(shell))
