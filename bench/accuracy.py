"""What the workloads learn, as means over several seeds: the figures in docs/workloads.

    python bench/accuracy.py mnist --data FOLDER            both arms, 5 seeds
    python bench/accuracy.py cifar10 --data FOLDER          the fast recipe, one epoch, 5 seeds
    python bench/accuracy.py hymenoptera --data FOLDER --weights FILE    with and without the weights, 3 seeds

Each run is the trainer's own command on two processes of this machine with one thread each, cifar10 on one process with
two threads as well, at an equal global batch; what follows `--` is added to its flags. Prints a table and writes every
run to build/accuracy/<experiment>.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAINER = ["-m", "ddp_trainer"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    *TRAINER,
]
ALONE = [sys.executable, *TRAINER]
SEEDS = {"mnist": 5, "cifar10": 5, "hymenoptera": 3}


def variants(experiment: str, weights: Path | None) -> dict[str, tuple[list[str], list[str]]]:
    """What is compared: a name; how it is launched, and the flags that make the difference."""
    match experiment:
        case "mnist":
            return {arm: (TORCHRUN, ["--arm", arm, "--threads", "1"]) for arm in ("ddp", "native")}
        case "cifar10":
            fast = ["--recipe", "fast"]
            return {
                "one process": (ALONE, [*fast, "--threads", "2", "--batch-size", "32"]),
                "two processes": (TORCHRUN, [*fast, "--threads", "1", "--batch-size", "16"]),
            }
        case _:
            if weights is None:
                sys.exit(
                    "accuracy: hymenoptera needs --weights: the model.pth of a cifar10 run, or torchvision's"
                )
            flags = ["--threads", "1"]
            return {
                "pretrained": (TORCHRUN, [*flags, "--weights", str(weights)]),
                "random": (TORCHRUN, flags),
            }


def train(command: list[str]) -> dict[str, float]:
    """One run; what it reported in the end, and how long it took in seconds from start to end."""
    began = time.monotonic()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, stderr=subprocess.DEVNULL
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return {"seconds": time.monotonic() - began, **events[-1]["result"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=SEEDS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--seeds", type=int, help="how many (default 5, for hymenoptera 3)")
    words = sys.argv[1:]
    ours = words[: words.index("--")] if "--" in words else words
    options, more = parser.parse_args(ours), words[len(ours) + 1 :]
    runs: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds or SEEDS[options.experiment]):
        for name, (launcher, flags) in variants(options.experiment, options.weights).items():
            common = [options.experiment, "--data", str(options.data), "--seed", str(seed)]
            runs.setdefault(name, []).append(train([*launcher, *common, *flags, *more]))
            print(f"{name:14} seed {seed}: {runs[name][-1]}", flush=True)
    out = ROOT / "build" / "accuracy" / f"{options.experiment}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(runs, indent=1))
    for name, results in runs.items():
        seconds = statistics.median(result["seconds"] for result in results)
        for score in ("accuracy", "best_accuracy"):
            if scores := [result[score] for result in results if score in result]:
                spread = f"{min(scores):.2%} to {max(scores):.2%}"
                print(
                    f"{name:14} {score:14} mean {statistics.fmean(scores):.2%}, {spread}; {seconds:.0f} s a run"
                )


if __name__ == "__main__":
    main()
