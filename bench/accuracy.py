"""Accuracy of the workloads as means over several seeds: the figures in docs/workloads.

    python -m bench.accuracy mnist --data FOLDER
    python -m bench.accuracy cifar10 --data FOLDER
    python -m bench.accuracy hymenoptera --data FOLDER --weights FILE

mnist        both arms, 5 seeds
cifar10      the fast recipe, one epoch, 5 seeds
hymenoptera  with and without the weights, 3 seeds

Each run is the trainer's own command on two processes of this machine with one thread each. cifar10
also runs on one process with two threads, at the same global batch size. Arguments after `--` are
added to the trainer's flags. Prints the mean and the range of each score. Writes every run to
build/accuracy/<experiment>.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALONE = [sys.executable, "-m", "ddp_trainer"]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--standalone", "--nproc-per-node", "2"),
    *("-m", "ddp_trainer"),
]

# Runs of each variant.
SEEDS = {"mnist": 5, "cifar10": 5, "hymenoptera": 3}

# A launcher, and the variant's own flags.
Variant = tuple[list[str], list[str]]


def variants(experiment: str, weights: Path | None) -> dict[str, Variant]:
    """Return the variants of an experiment, by name."""
    one_thread = ["--threads", "1"]
    if experiment == "mnist":
        return {arm: (TORCHRUN, ["--arm", arm, *one_thread]) for arm in ("ddp", "native")}
    if experiment == "cifar10":
        fast = ["--recipe", "fast"]
        return {
            "one process": (ALONE, [*fast, "--threads", "2", "--batch-size", "32"]),
            "two processes": (TORCHRUN, [*fast, *one_thread, "--batch-size", "16"]),
        }
    if weights is None:
        sys.exit(
            "accuracy: hymenoptera requires --weights FILE: the model.pth of a cifar10 run, or "
            "torchvision's weights"
        )
    return {
        "pretrained": (TORCHRUN, [*one_thread, "--weights", str(weights)]),
        "random": (TORCHRUN, one_thread),
    }


def train(command: list[str]) -> dict[str, float]:
    """Run the command and return its result and its duration in seconds."""
    began = time.monotonic()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, stderr=subprocess.DEVNULL
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return {"seconds": time.monotonic() - began, **events[-1]["result"]}


def report(name: str, results: list[dict[str, float]]) -> None:
    """Print mean and range of a variant's accuracies, and the median duration of a run."""
    seconds = statistics.median(result["seconds"] for result in results)
    for score in ("accuracy", "best_accuracy"):
        scores = [result[score] for result in results if score in result]
        if scores:
            print(
                f"{name:14} {score:14} mean {statistics.fmean(scores):.2%}, "
                f"{min(scores):.2%} to {max(scores):.2%}; {seconds:.0f} s per run"
            )


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """Return this script's options, and the arguments after `--`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=SEEDS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--seeds", type=int, help="how many (default 5, for hymenoptera 3)")
    words = sys.argv[1:]
    more: list[str] = []
    if "--" in words:
        end = words.index("--")
        more = words[end + 1 :]
        words = words[:end]
    return parser.parse_args(words), more


def main() -> None:
    options, more = parse_options()
    experiment = options.experiment

    # The variants take turns, so all run under the same conditions.
    runs: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds or SEEDS[experiment]):
        for name, (launcher, flags) in variants(experiment, options.weights).items():
            common = [experiment, "--data", str(options.data), "--seed", str(seed)]
            result = train([*launcher, *common, *flags, *more])
            runs.setdefault(name, []).append(result)
            print(f"{name:14} seed {seed}: {result}", flush=True)

    out = ROOT / "build" / "accuracy" / f"{experiment}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(runs, indent=1))
    for name, results in runs.items():
        report(name, results)


if __name__ == "__main__":
    main()
