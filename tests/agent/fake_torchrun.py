"""A stand-in for torchrun, without torch: it starts the workers, and ends them as torchrun does.

Used as: fake_torchrun.py --ranks=N [--ignore-sigterm] [--no-record] [--virtual-local-rank]
                  [--after=FILE] SCRIPT
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--first-rank", type=int, default=0)
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--virtual-local-rank", action="store_true")
    # Look at the workers only when this file exists.
    parser.add_argument("--after", type=Path)
    parser.add_argument("script", nargs="+")
    options = parser.parse_args()
    print("torchrun starts", flush=True)

    workers = [start_worker(options, local_rank) for local_rank in range(options.ranks)]

    def stop(number: int, frame: object) -> None:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
        raise SystemExit(1)

    def ignore(number: int, frame: object) -> None:
        print("torchrun ignores SIGTERM", flush=True)

    signal.signal(signal.SIGTERM, ignore if options.ignore_sigterm else stop)

    while options.after and not options.after.exists():
        time.sleep(0.02)
    while True:
        codes = [worker.poll() for worker in workers]
        if any(codes):
            break
        if None not in codes:
            return 0
        # Like the `monitor_interval` of torchrun.
        time.sleep(0.1)

    # Like torchrun: the others are ended, and all failures are reported with one time.
    for worker in workers:
        worker.terminate()
    patience = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    deadline = time.monotonic() + patience
    failures = []
    for local_rank, worker in enumerate(workers):
        while worker.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        worker.kill()
        code = worker.wait()
        if code:
            rank = options.first_rank + local_rank
            entry = {"rank": rank, "localRank": local_rank, "exitCode": code, "exception": ""}
            failures.append(entry)
    if not options.no_record:
        path = Path(os.environ["DDP_AGENT_FOLDER"], "failures.json")
        path.write_text(json.dumps({"failures": failures}))
    print("torchrun: a worker failed", flush=True)
    return 1


def start_worker(options: argparse.Namespace, local_rank: int) -> subprocess.Popen[bytes]:
    numbers = {
        "RANK": options.first_rank + local_rank,
        "LOCAL_RANK": 0 if options.virtual_local_rank else local_rank,
        "LOCAL_WORLD_SIZE": options.ranks,
    }
    env = {**os.environ, **{name: str(number) for name, number in numbers.items()}}
    command = [os.environ["PYTHON_EXEC"], "-u", *options.script]
    return subprocess.Popen(command, env=env, start_new_session=True)


if __name__ == "__main__":
    sys.exit(main())
