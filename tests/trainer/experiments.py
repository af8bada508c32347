"""Run by test_ranks.py on every rank: does small experiments and leaves their outcome in files.

python experiments.py FOLDER
"""

import os
import resource
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.batch_norm import batch_norm_at_rest, synchronise
from ddp_trainer.checkpoint import Checkpoints
from ddp_trainer.errors import UserError
from ddp_trainer.evaluation import EvaluationSet, evaluate, without_repeats
from ddp_trainer.interrupt import StopVote
from ddp_trainer.process_group import process_group
from ddp_trainer.progress import Progress
from ddp_trainer.runtime import Runtime
from ddp_trainer.sampler import GlobalBatchSampler, Shard
from ddp_trainer.workloads.shared.gradient_arms import ARMS
from ddp_trainer.workloads.shared.models import DigitsNet, ToyModel, resnet18
from ddp_trainer.workloads.toy import HIDDEN

FEATURES = 6


def wide_net() -> nn.Module:
    """Parameters of 5.3 MB: several buckets, as DDP begins its first one at 1 MiB."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(FEATURES, 600), nn.ReLU(), nn.Linear(600, 1800), nn.ReLU(), nn.Linear(1800, 10)
    )


def samples(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(3)
    return torch.from_numpy(random.standard_normal((count, FEATURES), np.float32)).to(
        dtype
    ), torch.arange(count) % 10


def train(
    runtime: Runtime,
    count: int,
    global_batch: int,
    steps: int,
    checkpoints_at: Path | None = None,
    equal_shares: bool = False,
) -> nn.Module:
    """Train on `count` samples until `steps` are done, going on from the checkpoint where there is one."""
    inputs, labels = samples(count)
    model = wide_net()
    ddp = runtime.wrap(model)
    # A rate at which the training is stable: where it is not, a difference in the last bit grows
    # without bound.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sampler = GlobalBatchSampler(
        count, global_batch, runtime.rank, runtime.world_size, equal_shares=equal_shares
    )
    runtime.warm_up(ddp, inputs[:2])
    checkpoints = Checkpoints(
        checkpoints_at,
        runtime,
        {"model": model, "optimizer": optimizer, "sampler": sampler},
        {"test": "wide"},
    )
    step = checkpoints.restore()
    while step < steps:
        for shard in sampler:
            chosen = torch.from_numpy(shard.indices)
            loss = F.cross_entropy(
                ddp(inputs[chosen]), without_repeats(labels[chosen], shard), reduction="sum"
            )
            (loss * (runtime.world_size / shard.batch_size)).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == steps:
                break
    checkpoints.save(step)
    return model


def few_samples_for_a_model_with_batch_norm(runtime: Runtime) -> dict[str, torch.Tensor]:
    """Batches too small for all ranks: the gradients of each, and the buffers and modes afterwards."""
    torch.manual_seed(7)
    model = resnet18(10, "torchvision")
    ddp = runtime.wrap(model)
    runtime.warm_up(ddp, torch.zeros(2, 3, 32, 32))
    found = {}
    for batch in (5, 3, 2):
        (shard,) = GlobalBatchSampler(batch, batch, runtime.rank, runtime.world_size, at_least=2)
        images = torch.from_numpy(np.random.default_rng(1).random((batch, 3, 32, 32), np.float32))
        chosen = torch.from_numpy(shard.indices)
        with batch_norm_at_rest(model, shard):
            loss = F.cross_entropy(ddp(images[chosen]), chosen % 10, reduction="sum")
            (loss * (runtime.world_size / batch)).backward()
        found[f"gradients of {batch}"] = torch.cat(
            [parameter.grad.flatten() for parameter in model.parameters()]
        )
        ddp.zero_grad()
    found["buffers"] = torch.cat([buffer.flatten().double() for buffer in model.buffers()])
    found["training"] = torch.tensor([module.training for module in model.modules()])
    return found


def net_with_batch_norm() -> nn.Module:
    """In float64: dividing by the deviation of two samples makes much of a last bit, and each kind of CPU rounds its own way."""
    torch.manual_seed(9)
    return nn.Sequential(
        nn.Linear(FEATURES, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10)
    ).double()


def train_with_batch_norm(
    runtime: Runtime, steps: int, *, synchronised: bool, equal_shares: bool = False
) -> dict[str, torch.Tensor]:
    """Batches of 12, 12 and 5 of 29 samples, the last too small for four ranks; the model's parameters and buffers afterwards."""
    inputs, labels = samples(29, torch.float64)
    model = net_with_batch_norm()
    if synchronised:
        synchronise(model, runtime)
    ddp = runtime.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sampler = GlobalBatchSampler(
        29, 12, runtime.rank, runtime.world_size, at_least=2, equal_shares=equal_shares
    )
    runtime.warm_up(ddp, inputs[:2])
    step = 0
    while step < steps:
        for shard in sampler:
            chosen = torch.from_numpy(shard.indices)
            with batch_norm_at_rest(model, shard):
                loss = F.cross_entropy(
                    ddp(inputs[chosen]), without_repeats(labels[chosen], shard), reduction="sum"
                )
                (loss * (runtime.world_size / shard.batch_size)).backward()
            runtime.step(optimizer)
            step += 1
    return model.state_dict()


def plain_loop_over_shards(steps: int, ranks: int) -> dict[str, torch.Tensor]:
    """What DDP on so many ranks should be: one process that runs each rank's part of a batch by itself."""
    inputs, labels = samples(29, torch.float64)
    model = net_with_batch_norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    samplers = [GlobalBatchSampler(29, 12, rank, ranks, at_least=2) for rank in range(ranks)]
    step = 0
    while step < steps:
        for shards in zip(*samplers, strict=True):
            for shard in shards:
                chosen = torch.from_numpy(shard.indices)
                if len(chosen):
                    loss = F.cross_entropy(model(inputs[chosen]), labels[chosen], reduction="sum")
                    (loss / shard.batch_size).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return dict(model.named_parameters())


def plain_loop_over_batches_with_repeats(steps: int, ranks: int) -> dict[str, torch.Tensor]:
    """What synchronised BatchNorm should be where shares are filled up: one process whose batches hold all ranks' rows."""
    inputs, labels = samples(29, torch.float64)
    model = net_with_batch_norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    samplers = [
        GlobalBatchSampler(29, 12, rank, ranks, at_least=2, equal_shares=True)
        for rank in range(ranks)
    ]
    step = 0
    while step < steps:
        for shards in zip(*samplers, strict=True):
            chosen = torch.from_numpy(np.concatenate([shard.indices for shard in shards]))
            real = torch.from_numpy(np.concatenate([shard.real for shard in shards]))
            F.cross_entropy(model(inputs[chosen])[real], labels[chosen][real]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return model.state_dict()


def net_for_images() -> nn.Module:
    """With a 1x1 convolution, whose weights' strides can be told in two ways."""
    torch.manual_seed(11)
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 12, 1),
        nn.ReLU(),
        nn.Conv2d(12, 6, 3, stride=2),
    )
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 2 * 2, 10))


def some_images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(
        np.random.default_rng(4).standard_normal((29, 3, 8, 8), np.float32)
    ), torch.arange(29) % 10


def for_images(model: nn.Module, *, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3, fused=fused
    )


def batches_of_images(runtime: Runtime, epochs: int) -> Iterator[Shard]:
    """Of 14, 14 and 1 image an epoch: the last leaves all ranks but one without any."""
    for epoch in range(epochs):
        yield from GlobalBatchSampler(29, 14, runtime.rank, runtime.world_size, seed=epoch)


def train_on_images(runtime: Runtime, arm: str, epochs: int) -> dict[str, torch.Tensor]:
    """As the workloads do it: images and weights in the hardware's layout, a fused optimizer."""
    images, labels = some_images()
    layout = runtime.hardware.image_layout(bf16=False)
    model = net_for_images().to(memory_format=layout)
    trained = ARMS[arm](model, runtime)
    optimizer = for_images(model, fused=runtime.hardware.fused_optimizers)
    runtime.warm_up(trained.module, images[:2])
    for shard in batches_of_images(runtime, epochs):
        chosen = torch.from_numpy(shard.indices)
        inputs = images[chosen].to(memory_format=layout)
        loss = F.cross_entropy(trained.module(inputs), labels[chosen], reduction="sum")
        (loss * (runtime.world_size / shard.batch_size)).backward()
        trained.synchronise()
        runtime.step(optimizer)
    return model.state_dict()


def plain_loop_on_images(epochs: int) -> dict[str, torch.Tensor]:
    """What it should be: one process, nothing laid out, an optimizer that goes by each number's place in the tensor."""
    images, labels = some_images()
    model = net_for_images()
    optimizer = for_images(model, fused=False)
    for batch in batches_of_images(Runtime(), epochs):
        chosen = torch.from_numpy(batch.indices)
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def page_faults_of_memory_taken_again() -> int:
    def take() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        some = [torch.zeros(20 << 18) for _ in range(3)]  # of 20 MB
        del some
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return min(take() for _ in range(5))


def gradients_of_the_digits_net(runtime: Runtime) -> torch.Tensor:
    """Of the mean over 29 images, with the layout that the workload trains in."""
    torch.manual_seed(6)
    layout = runtime.hardware.image_layout(bf16=False)
    model = DigitsNet().to(memory_format=layout)
    ddp = runtime.wrap(model)
    images = torch.from_numpy(np.random.default_rng(8).standard_normal((29, 1, 8, 8), np.float32))
    (shard,) = GlobalBatchSampler(29, 29, runtime.rank, runtime.world_size)
    chosen = torch.from_numpy(shard.indices)
    loss = F.cross_entropy(
        ddp(images[chosen].to(memory_format=layout)), chosen % 10, reduction="sum"
    )
    (loss * (runtime.world_size / shard.batch_size)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def counted_by_an_evaluation(runtime: Runtime) -> list[int]:
    """Every index that any rank looked up while 31 samples were evaluated in batches of 4."""
    inputs, labels = samples(31)
    looked_up: list[int] = []

    def fetch(indices):
        looked_up.extend(indices.tolist())
        return inputs[torch.from_numpy(indices)], labels[torch.from_numpy(indices)]

    model = wide_net()
    scores = evaluate(
        model,
        EvaluationSet(fetch, samples=31, batch_size=4),
        step=0,
        progress=Progress(runtime),
        vote=StopVote(runtime),
    )
    assert scores["samples"] == 31
    logits = model(inputs).detach()
    assert scores["accuracy"] == float((logits.argmax(1) == labels).double().mean())
    assert abs(scores["loss"] - float(F.cross_entropy(logits, labels))) < 1e-6
    return [index for indices in runtime.gather(looked_up) for index in indices]


def equalities(runtime: Runtime) -> list[bool]:
    """Of parameters that are the same everywhere, that differ in a number on the last rank, and in the order there."""
    same = torch.arange(6.0).view(2, 3)
    last = runtime.rank == runtime.world_size - 1
    altered, swapped = same.clone(), same.clone()
    if last:
        altered[1, 2] += 1e-6
        swapped = swapped.flip(0)
    return [runtime.identical([torch.ones(3), found]) for found in (same, altered, swapped)]


def gradients_in_buckets(runtime: Runtime) -> list[bool]:
    """Of each gradient of the wide toy that a step leaves, whether it lies in a bucket that DDP has sent."""
    model = ToyModel(HIDDEN["wide"])
    ddp = runtime.wrap(model)
    sent: set[int] = set()

    def note_and_send(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.add(bucket.buffer().untyped_storage().data_ptr())
        return allreduce_hook(dist.group.WORLD, bucket)

    if isinstance(ddp, DistributedDataParallel):
        ddp.register_comm_hook(None, note_and_send)
    for _ in range(2):  # the buckets are rebuilt after the first backward
        sent.clear()
        ddp.zero_grad()
        ddp(torch.ones(2, 10)).sum().backward()
    return [parameter.grad.untyped_storage().data_ptr() in sent for parameter in model.parameters()]


def complaint_of_one_rank(runtime: Runtime) -> str:
    def fail_on_the_last():
        if runtime.rank == runtime.world_size - 1:
            raise UserError("its data are missing")

    try:
        runtime.together(fail_on_the_last)
    except UserError as error:
        return str(error)
    return "nobody complained"


def threads() -> dict[int, str]:
    """This process's threads by number, with their names; none where /proc does not tell, which is anywhere but on Linux."""
    return {
        int(path.parent.name): path.read_text() for path in Path("/proc/self/task").glob("*/comm")
    }


def main(folder: Path) -> None:
    before = threads()
    with process_group(threads=1, device="cpu") as runtime:
        outcome = {
            # Most of them are gloo's, which has names for them only in newer releases.
            "policies of new threads": [
                os.sched_getscheduler(thread) for thread in threads().keys() - before.keys()
            ],
            # Batches of 8, 8, 8 and 5 an epoch: the last is uneven at 2 ranks and at 4. With 25
            # samples it has one.
            "uneven": nn.utils.parameters_to_vector(
                train(runtime, 29, 8, 100).parameters()
            ).detach(),
            "empty": nn.utils.parameters_to_vector(
                train(runtime, 25, 8, 100).parameters()
            ).detach(),
            "filled up": nn.utils.parameters_to_vector(
                train(runtime, 25, 8, 100, equal_shares=True).parameters()
            ).detach(),
            "unbroken": nn.utils.parameters_to_vector(
                train(runtime, 29, 8, 7).parameters()
            ).detach(),
            "batch norm": train_with_batch_norm(runtime, 40, synchronised=False),
            "synchronised": train_with_batch_norm(runtime, 40, synchronised=True),
            "synchronised, filled up": train_with_batch_norm(
                runtime, 40, synchronised=True, equal_shares=True
            ),
            "page faults": page_faults_of_memory_taken_again(),
            "images": [train_on_images(runtime, arm, 40) for arm in ARMS],
            "few samples": few_samples_for_a_model_with_batch_norm(runtime),
            "digits": gradients_of_the_digits_net(runtime),
            "evaluated": counted_by_an_evaluation(runtime),
            "complaint": complaint_of_one_rank(runtime),
            "equalities": equalities(runtime),
            "in buckets": gradients_in_buckets(runtime),
        }
        if runtime.world_size == 1:
            outcome["plain images"] = plain_loop_on_images(40)
            outcome["shards"] = {ranks: plain_loop_over_shards(40, ranks) for ranks in (2, 4)}
            outcome["repeats"] = {
                ranks: plain_loop_over_batches_with_repeats(40, ranks) for ranks in (2, 4)
            }
        for steps in (2, 5, 7):  # in the middle of an epoch, in the next one, at the end
            model = train(runtime, 29, 8, steps, folder / "checkpoints")
        outcome["in three pieces"] = nn.utils.parameters_to_vector(model.parameters()).detach()
        group = weakref.ref(dist.group.WORLD) if runtime.world_size > 1 else lambda: None
    outcome["group destroyed"] = group() is None and not any(
        "gloo" in name for name in threads().values()
    )
    torch.save(outcome, folder / f"rank-{runtime.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
