"""Profile a training step of ResNet-18 on one core, by groups of operators.

    python bench/profile_training.py                       # the 3x3 stem
    python bench/profile_training.py --stem torchvision
    python bench/profile_training.py --operators           # also name the operators of each group

The step of the tutorials (fp32) is compared with the trainer's (channels_last, fused optimizer,
and bf16 where the processor computes in it). Both train on the same batch, in one process with one
thread, in turns. There is no exchange of gradients; `training_speed.py scaling` measures that.

The last lines say how fast the convolutions compute, beside a large matrix product of the same
type. The matrix product is as fast as this processor gets, so a step cannot take less than its
arithmetic at that rate.
"""

import argparse
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from ddp_trainer.ranks.hardware import choose
from ddp_trainer.workloads.shared.models import resnet18

BATCH_SIZE = 32

# The group of an operator is the first one whose words its name contains.
GROUPS = {
    "convolutions": ("convolution",),
    "BatchNorm": ("batch_norm",),
    "ReLU and additions": ("relu", "threshold", "clamp", "aten::add"),
    "pooling": ("pool",),
    "optimizer": ("sgd", "_foreach"),
    "copies and conversions": ("copy", "_to_copy", "fill", "zero", "empty", "reorder"),
}
OTHERS = "others"


@dataclass(frozen=True)
class Step:
    """A training step: its model, optimizer, images of shape (32, 3, 32, 32), and type."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    images: Tensor
    labels: Tensor
    bf16: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    def take(self) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = F.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_step(stem: str, *, layout: torch.memory_format, fused: bool, bf16: bool) -> Step:
    """Return a step with the same weights and the same batch for all settings."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH_SIZE, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (BATCH_SIZE,), generator=generator)
    torch.manual_seed(0)
    model = resnet18(stem=stem).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)
    return Step(model, optimizer, images.to(memory_format=layout), labels, bf16)


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def operators_of(step: Step, steps: int) -> Mapping[str, float]:
    """Return the milliseconds per step that each operator needs itself."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step.take()
    found = {}
    for event in profiler.key_averages():
        found[event.key] = event.self_cpu_time_total / steps / 1e3
    return found


def group_of(operator: str) -> str:
    for group, words in GROUPS.items():
        if any(word in operator.lower() for word in words):
            return group
    return OTHERS


def matrix_product_rate(dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a large matrix product."""
    size = 2048
    matrix = torch.randn(size, size).to(dtype)
    fastest = min(seconds_of(lambda: matrix @ matrix) for _ in range(10))
    return 2 * size**3 / fastest


def operations(step: Step) -> int:
    """Return the floating-point operations of a step's convolutions and matrix products."""
    with FlopCounterMode(display=False) as counter:
        step.take()
    return int(counter.get_total_flops())


def print_groups(found: Mapping[str, Mapping[str, float]], *, with_operators: bool) -> None:
    """Print a table in markdown: the milliseconds of each group in each step."""
    print("| | " + " | ".join(found) + " |")
    print("|---|" + "---|" * len(found))
    for group in (*GROUPS, OTHERS):
        cells = []
        for operators in found.values():
            mine = {name: ms for name, ms in operators.items() if group_of(name) == group}
            share = sum(mine.values()) / sum(operators.values())
            cell = f"{sum(mine.values()):.1f} ms, {share:.0%}"
            if with_operators:
                largest = Counter(mine).most_common(4)
                cell += " (" + ", ".join(f"{name} {ms:.1f}" for name, ms in largest) + ")"
            cells.append(cell)
        print(f"| {group} | " + " | ".join(cells) + " |")


def print_rates(name: str, step: Step, median: float, convolutions: float) -> None:
    """Print how near a step and its convolutions are to the rate of a matrix product."""
    count = operations(step)
    rate = matrix_product_rate(step.dtype)
    floor = count / rate
    print(
        f"{name}: a step needs {median * 1e3:.0f} ms for {count / 1e9:.0f} billion operations. "
        f"A matrix product in {step.dtype} computes {rate / 1e9:.0f} billion a second, which "
        f"would be {floor * 1e3:.0f} ms. Convolutions reach {floor / convolutions:.0%} of that "
        f"rate, the whole step {floor / median:.0%}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stem", choices=["3x3", "torchvision"], default="3x3")
    parser.add_argument("--steps", type=int, default=20, help="steps of each kind (default 20)")
    parser.add_argument("--operators", action="store_true", help="name the operators of each group")
    options = parser.parse_args()

    torch.set_num_threads(1)
    hardware = choose("cpu")
    bf16 = hardware.computes_in_bf16()
    layout = hardware.image_layout(bf16=bf16)
    plain = torch.contiguous_format
    steps = {
        "tutorial": make_step(options.stem, layout=plain, fused=False, bf16=False),
        "ours": make_step(options.stem, layout=layout, fused=True, bf16=bf16),
    }

    # Without the profiler, in turns. The first three turns do not count.
    seconds = defaultdict(list)
    for turn in range(3 + options.steps):
        for name, step in steps.items():
            took = seconds_of(step.take)
            if turn >= 3:
                seconds[name].append(took)
    medians = {name: statistics.median(values) for name, values in seconds.items()}

    found = {name: operators_of(step, options.steps) for name, step in steps.items()}
    print_groups(found, with_operators=options.operators)
    print(f"\nours is {medians['tutorial'] / medians['ours']:.2f} times as fast\n")
    for name, step in steps.items():
        convolutions = sum(
            ms / 1e3 for operator, ms in found[name].items() if group_of(operator) == "convolutions"
        )
        print_rates(name, step, medians[name], convolutions)


if __name__ == "__main__":
    main()
