"""Test the unit tests of the decisions with cosmic-ray: they must notice small wrong changes.

`make mutants` runs this in a copy of the tree, because cosmic-ray changes the files. Each core of
the machine has a copy of its own, and a share of the changes.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkItem, WorkResult

SETTINGS = "tests/mutants.toml"
SESSION = "session.sqlite"
PROGRESS = 20  # tested changes per line of output
MOST_SURVIVORS = 0.05

numbers = count(1)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def leave_out(session: Path, is_left_out: Callable[[int, WorkItem], bool]) -> None:
    """Mark some of the changes of a session that are still to be tested as skipped."""
    with use_db(str(session), WorkDB.Mode.open) as database:
        items = sorted(database.pending_work_items, key=lambda item: item.job_id)
        for number, item in enumerate(items):
            if is_left_out(number, item):
                skipped = WorkResult(worker_outcome=WorkerOutcome.SKIPPED)
                database.set_result(item.job_id, skipped)


def is_in_decorator(item: WorkItem) -> bool:
    """Return True for a change of `@dataclass(frozen=True, slots=True)`: it is no decision."""
    place = item.mutations[0]
    line = Path(place.module_path).read_text().splitlines()[place.start_pos[0] - 1]
    return line.lstrip().startswith("@")


def copies(number: int) -> list[Path]:
    """Return copies of the current folder, each with an equal share of the changes."""
    found = []
    for share in range(number):
        folder = Path(f"core-{share}").absolute()
        shutil.copytree(".", folder, ignore=shutil.ignore_patterns("core-*"))
        leave_out(folder / SESSION, lambda at, _, share=share: at % number != share)  # type: ignore[misc]
        found.append(folder)
    return found


def test_changes(folder: Path) -> None:
    """Run the tests for every change of a copy, and print how many are done in all copies."""
    command = ("cosmic-ray", "--verbosity", "INFO", "exec", SETTINGS, SESSION)
    process = subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    for line in process.stdout or ():
        if line.rstrip().endswith("complete"):
            done = next(numbers)
            if done % PROGRESS == 0:
                print(f"{done} changes tested", flush=True)
    if process.wait():
        raise SystemExit(f"cosmic-ray ended with exit code {process.returncode}")


def results(folder: Path) -> Iterator[str]:
    """Yield the place and the lines of each unnoticed change, and an empty text for the others."""
    with use_db(str(folder / SESSION), WorkDB.Mode.open) as session:
        places = {item.job_id: item.mutations[0] for item in session.work_items}
        for job_id, result in session.results:
            if result.worker_outcome is WorkerOutcome.SKIPPED:
                continue
            is_unnoticed = result.test_outcome is TestOutcome.SURVIVED
            place = places[job_id]
            where = f"{Path(place.module_path).name}:{place.start_pos[0]}"
            yield f"{where}\n{changed_lines(result.diff)}" if is_unnoticed else ""


def changed_lines(diff: str) -> str:
    """Return the changed lines of a diff, without its header."""
    lines = [line for line in diff.splitlines() if line[:1] in ("-", "+")]
    return "\n".join(line for line in lines if line[:3] not in ("---", "+++"))


def main() -> None:
    os.environ["HYPOTHESIS_PROFILE"] = "ci"
    # Each copy has its own files.
    os.environ["PYTHONPATH"] = "operator"
    run("cosmic-ray", "init", SETTINGS, SESSION)
    run("cr-filter-operators", SESSION, SETTINGS)
    leave_out(Path(SESSION), lambda _, item: is_in_decorator(item))
    run("cosmic-ray", "baseline", SETTINGS)
    folders = copies(os.cpu_count() or 1)
    with ThreadPoolExecutor(len(folders)) as pool:
        list(pool.map(test_changes, folders))
    found = [result for folder in folders for result in results(folder)]
    survivors = sorted(filter(None, found))
    print("Changes that no test noticed:", *survivors, sep="\n\n")
    share = len(survivors) / len(found)
    print(f"\n{len(survivors)} of {len(found)} changes survived ({share:.1%}; at most 5 % may).")
    sys.exit(int(share >= MOST_SURVIVORS))


if __name__ == "__main__":
    main()
