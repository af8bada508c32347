"""Explain missing packages of a command."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ddpjob.cli.session import print_error


@contextmanager
def require_extra(extra: str) -> Iterator[None]:
    """End the program with a sentence if an import of the extra's packages fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        print_error(
            f"this command needs the package {error.name}, which is not installed; "
            f"pip install 'ddpjob[{extra}]' installs it"
        )
        raise typer.Exit(2) from error
