"""Run torchrun, and write down which workers failed."""

import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from typing import Any

from . import EXCEPTION, FOLDER, RECORD
from .times import shutdown_seconds

# How long a finished node waits for the others: a year. The operator ends it.
EXIT_BARRIER_SECONDS = 365 * 86400.0


def main(args: list[str]) -> None:
    code = run(args)
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        # torch takes half a second to clean up, and the next attempt would wait for it.
        os._exit(code)


def run(args: list[str]) -> int:
    """Run torchrun in this process, and return its exit code."""
    sys.argv = ["torchrun", *args]
    # Apart from the script's files. The agent removes them between attempts.
    tempfile.tempdir = os.environ[FOLDER]
    # A search for garbage would take a third of the time. Later ones leave out frozen objects.
    gc.disable()
    from torch.distributed import run as torchrun
    from torch.distributed.launcher import api

    gc.freeze()
    gc.enable()
    launcher: Any = api
    launcher.LocalElasticAgent = with_time_limits(launcher.LocalElasticAgent)
    try:
        torchrun.main()
    except BaseException as error:
        if hasattr(error, "sigval"):
            # torchrun was told to end: a traceback would look like a failure.
            return 128 + int(error.sigval)
        write_record(error)
        if isinstance(error, SystemExit):
            raise
        traceback.print_exc()
        return 1
    return 0


def with_time_limits(base: Any) -> Any:
    """Return torch's agent of a node, with time limits beyond the flags of torchrun.

    - A finished node waits for the others as long as they take. By default, it waits 300 s and
      ends. If it hosts the rendezvous, that ends too.
    - Workers have TORCH_ELASTIC_SHUTDOWN_TIMEOUT to end, also after the failure of another one.
      Some of torch's calls leave it out.
    """

    class NodeAgent(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options["exit_barrier_timeout"] = EXIT_BARRIER_SECONDS
            super().__init__(*args, **options)

        def _shutdown(self, *args: Any, **options: Any) -> None:
            if hasattr(self, "_shutdown_timeout"):
                options["timeout"] = self._shutdown_timeout
            elif self._pcontext:
                # Older releases, such as 2.9, give 30 s. Ended workers are left alone.
                death_sig = (*args, options.get("death_sig", signal.SIGTERM))[0]
                self._pcontext.close(death_sig, int(shutdown_seconds(os.environ)))
            super()._shutdown(*args, **options)

    return NodeAgent


def write_record(error: BaseException) -> None:
    """Write the failed workers named by a ChildFailedError, or the text of another error."""
    failures = []
    for rank, failure in getattr(error, "failures", {}).items():
        # Without @record in the script, there is only advice to use it.
        has_message = os.path.isfile(failure.error_file)
        entry = {
            "rank": rank,
            "localRank": failure.local_rank,
            "exitCode": failure.exitcode,
            "exception": str(failure.message)[:EXCEPTION] if has_message else "",
        }
        failures.append(entry)
    # Before a SystemExit, torchrun has written its own sentence.
    is_exit = isinstance(error, SystemExit)
    text = "" if is_exit else f"{type(error).__name__}: {error}"
    record = {"error": text, "failures": failures}
    path = os.path.join(os.environ[FOLDER], RECORD)
    with open(path, "w") as file:
        json.dump(record, file)
