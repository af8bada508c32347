"""Test the unit tests of the decisions with cosmic-ray: they must notice small wrong changes.

`make mutants` runs this in a copy of the tree, because cosmic-ray changes the files.
"""

import os
import subprocess
import sys
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome

SETTINGS = "tests/mutants.toml"
SESSION = "session.sqlite"
PROGRESS = 20  # tested changes per line of output
MOST_SURVIVORS = 0.05


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def test_changes() -> None:
    """Run the tests for every change, and print how many are done."""
    command = ("cosmic-ray", "--verbosity", "INFO", "exec", SETTINGS, SESSION)
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    done = 0
    for line in process.stdout or ():
        done += line.rstrip().endswith("complete")
        if line.rstrip().endswith("complete") and done % PROGRESS == 0:
            print(f"{done} changes tested", flush=True)
    if process.wait():
        raise SystemExit(f"cosmic-ray ended with exit code {process.returncode}")


def results() -> tuple[int, list[str]]:
    """Return the number of tested changes, and the unnoticed ones."""
    tested = 0
    survivors = []
    with use_db(SESSION, WorkDB.Mode.open) as session:
        places = {item.job_id: item.mutations[0] for item in session.work_items}
        for job_id, result in session.results:
            if result.worker_outcome is WorkerOutcome.SKIPPED:
                continue
            tested += 1
            if result.test_outcome is TestOutcome.SURVIVED:
                place = places[job_id]
                where = f"{Path(place.module_path).name}:{place.start_pos[0]}"
                survivors.append(f"{where}\n{changed_lines(result.diff)}")
    return tested, sorted(survivors)


def changed_lines(diff: str) -> str:
    """Return the changed lines of a diff, without its header."""
    lines = [line for line in diff.splitlines() if line[:1] in ("-", "+")]
    return "\n".join(line for line in lines if line[:3] not in ("---", "+++"))


def main() -> None:
    os.environ["HYPOTHESIS_PROFILE"] = "ci"
    run("cosmic-ray", "init", SETTINGS, SESSION)
    run("cr-filter-operators", SESSION, SETTINGS)
    run("cosmic-ray", "baseline", SETTINGS)
    test_changes()
    tested, survivors = results()
    print("Changes that no test noticed:", *survivors, sep="\n\n")
    share = len(survivors) / tested
    print(f"\n{len(survivors)} of {tested} changes survived ({share:.1%}; at most 5 % may).")
    sys.exit(int(share >= MOST_SURVIVORS))


if __name__ == "__main__":
    main()
