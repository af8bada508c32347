"""Run torchrun, and write down which workers failed."""

from __future__ import annotations

import json
import os
import sys
import traceback

from . import EXCEPTION, FOLDER, RECORD


def main(arguments: list[str]) -> None:
    code = run(arguments)
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        # torch takes half a second to clean up, for which the next attempt would wait.
        os._exit(code)


def run(arguments: list[str]) -> int:
    """Run torchrun in this process, and return its exit code."""
    sys.argv = ["torchrun", *arguments]
    from torch.distributed import run as torchrun

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


def write_record(error: BaseException) -> None:
    """Write the workers that a ChildFailedError names, or what else is wrong."""
    failures = []
    for rank, failure in getattr(error, "failures", {}).items():
        entry = {"rank": rank, "localRank": failure.local_rank, "exitCode": failure.exitcode}
        # Without @record in the script, there is only advice to use it.
        has_message = os.path.isfile(failure.error_file)
        exception = str(failure.message)[:EXCEPTION] if has_message else ""
        failures.append({**entry, "exception": exception})
    record = {"error": f"{type(error).__name__}: {error}", "failures": failures}
    with open(os.path.join(os.environ[FOLDER], RECORD), "w") as file:
        json.dump(record, file)
