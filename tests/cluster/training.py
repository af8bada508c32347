"""A training job with checkpoints, and its required properties after a fault."""

from collections.abc import Sequence
from typing import Any

import torch

from .builders import unhurried_digits
from .commands import Object
from .namespace import Namespace

JOB = "digits"

# Epochs of a training longer than most faults, and of one long enough for a fault that comes at
# once. A training needs eight epochs to find 97 % of the digits.
LONG = 20
SHORT = 10

# Steps between two checkpoints, and steps of an epoch.
CHECKPOINT_EVERY = 25
STEPS_PER_EPOCH = 23
# An epoch ends with a checkpoint too.
FIRST_CHECKPOINT = min(CHECKPOINT_EVERY, STEPS_PER_EPOCH)

# Run in a pod: find the ranks. The agent gives each of them a pipe for its output, and a rank's own
# children have it too. With the fast start, torchrun's own child is another process.
FIND_RANKS = """
import os, re, signal

def read(pid, name):
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""

def has_rank(pid):
    try:
        return bool(re.search(r"/rank-\\d+$", os.readlink(f"/proc/{pid}/fd/1")))
    except OSError:
        return False

def parent(pid):
    return (read(pid, "stat").rpartition(b")")[2].split() + [b"0", b"0"])[1].decode()

processes = [pid for pid in os.listdir("/proc") if pid.isdigit()]
ranks = [pid for pid in processes if has_rank(pid) and not has_rank(parent(pid))]
"""

SIGNAL_WORKERS = (
    FIND_RANKS
    + """
for rank in ranks:
    os.kill(int(rank), %d)
assert ranks
"""
)


def start_training(
    namespace: Namespace, epochs: int, flags: Sequence[str] = (), **spec: Any
) -> None:
    """Start a job of so many epochs and wait for its first checkpoint.

    Most steps are still to come then. An epoch takes almost two seconds.
    """
    scripts, manifest = unhurried_digits(JOB, epochs, **spec)
    manifest["spec"]["args"] += flags
    start(namespace, scripts, manifest)


def start(namespace: Namespace, *objects: Object) -> None:
    """Create a job of the name JOB, and wait for its first checkpoint."""
    namespace.claim("checkpoints")
    namespace.apply(*objects)
    namespace.wait_for_checkpoint(JOB)


def signal_workers(namespace: Namespace, pod: str, number: int) -> None:
    """Send a signal to the ranks of a pod."""
    namespace.python(pod, SIGNAL_WORKERS % number)


def resumed_step(namespace: Namespace, attempt: int) -> int:
    """Return the step from which an attempt resumed."""
    start = namespace.wait(
        f"attempt {attempt} of {JOB} has started to train",
        lambda: namespace.progress_of(JOB, attempt, "start"),
    )
    return int(start[0]["resumed_step"])


def last_step(namespace: Namespace) -> int:
    """Return the step of the newest checkpoint of the job."""
    folder = namespace.folder("checkpoints") / JOB
    # The names are in the order of the starts and steps.
    newest = max(path.name for path in folder.glob("step-*.pt"))
    return int(newest.removesuffix(".pt").rpartition("-")[2])


def assert_resumed(namespace: Namespace, attempt: int) -> None:
    """Assert that an attempt continues from a checkpoint of the one before."""
    step = resumed_step(namespace, attempt)
    told = f"attempt {attempt} has resumed from step {step}"
    assert step >= FIRST_CHECKPOINT, told


def weights(namespace: Namespace, job: str = JOB) -> Object:
    """Return the learnt weights of a job."""
    found: Object = torch.load(namespace.folder("checkpoints") / job / "model.pth")
    return found


def assert_same_weights(found: Object, expected: Object) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not different


def assert_as_good_as_undisturbed(status: Object) -> None:
    assert float(status["result"]["accuracy"]) >= 0.97
