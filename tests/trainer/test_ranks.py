"""Several ranks agree: equal parameters, exact sums at uneven sizes, and bit-exact resumes."""

import math
import os
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.data.sampler import GlobalBatchSampler, Shard
from ddp_trainer.errors import UserError
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.evaluation import (
    Sums,
    classification_sums,
    evaluate,
    evaluation_shards,
    without_repeats,
)
from ddp_trainer.run.interrupt import StopVote
from ddp_trainer.run.progress import Progress
from ddp_trainer.workloads.shared.gradient_arms import ARMS
from ddp_trainer.workloads.shared.models import DigitsNet, ToyModel
from ddp_trainer.workloads.toy import HIDDEN

from .every_rank import GROUP_IS_GONE, on_every_rank, threads, threads_before_the_group
from .small_data import FEATURES, difference, samples
from .until_step import train_until

# Samples in an epoch, in batches of 8. The last batch of 29 has 5 samples: uneven shares at two
# ranks and at four. The last batch of 25 has one sample, so other ranks get none.
UNEVEN = 29
EMPTY = 25

# Ten epochs.
STEPS = 40


# Training compared with one process


def wide_net() -> nn.Module:
    """Return a net of 1.3 MB: two buckets, because the first bucket of DDP has 1 MiB."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(FEATURES, 320), nn.ReLU(), nn.Linear(320, 960), nn.ReLU(), nn.Linear(960, 10)
    )


def train(
    runtime: Runtime,
    data: tuple[torch.Tensor, torch.Tensor],
    steps: int,
    checkpoints_at: Path | None = None,
    equal_shares: bool = False,
) -> torch.Tensor:
    """Train on `data` until `steps` are done, from the newest checkpoint if there is one.

    `data` is inputs and labels. The model computes with the type of the inputs.
    Return all parameters as one vector.
    """
    inputs, labels = data
    count = len(labels)
    model = wide_net().to(inputs.dtype)
    ddp = runtime.wrap(model)
    # At this rate the training is stable. Otherwise a difference in the last bit grows.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sampler = GlobalBatchSampler(
        count, 8, runtime.rank, runtime.world_size, equal_shares=equal_shares
    )
    runtime.warm_up(ddp, inputs[:2])
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler}

    def train_step(shard: Shard) -> None:
        chosen = torch.from_numpy(shard.indices)
        loss = F.cross_entropy(
            ddp(inputs[chosen]), without_repeats(labels[chosen], shard), reduction="sum"
        )
        (loss * (runtime.world_size / shard.batch_size)).backward()
        optimizer.step()
        optimizer.zero_grad()

    checkpoints = Checkpoints(checkpoints_at, runtime, parts, {"test": "wide"})
    train_until(steps, checkpoints, sampler, train_step)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@on_every_rank
def with_uneven_shares(runtime):
    return train(runtime, samples(UNEVEN), 100)


@on_every_rank
def with_empty_shares(runtime):
    return train(runtime, samples(EMPTY), STEPS)


@on_every_rank
def with_uneven_shares_in_float64(runtime):
    return train(runtime, samples(UNEVEN, torch.float64), STEPS)


@on_every_rank
def with_empty_shares_filled_up(runtime):
    return train(runtime, samples(EMPTY), STEPS, equal_shares=True)


def test_parameters_are_equal_on_all_ranks(ranks):
    first, *others = ranks.values(with_uneven_shares)
    for parameters in others:
        assert torch.equal(parameters, first)


def test_a_hundred_steps_with_uneven_shares_train_like_one_process(ranks, single):
    expected = single.first(with_uneven_shares)
    assert difference(ranks.first(with_uneven_shares), expected) <= 1e-5


def test_ten_epochs_in_float64_train_like_one_process(ranks, single):
    """With float64, rounding does not decide a ReLU, so no difference grows."""
    expected = single.first(with_uneven_shares_in_float64)
    assert difference(ranks.first(with_uneven_shares_in_float64), expected) <= 1e-12


def test_ten_epochs_with_empty_shares_train_like_one_process(ranks, single):
    expected = single.first(with_empty_shares)
    assert difference(ranks.first(with_empty_shares), expected) <= 1e-5


def test_repeats_that_fill_up_empty_shares_change_nothing(ranks, single):
    expected = single.first(with_empty_shares)
    assert difference(ranks.first(with_empty_shares_filled_up), expected) <= 1e-5


@on_every_rank
def unbroken(runtime):
    return train(runtime, samples(UNEVEN), 7)


@on_every_rank
def in_three_pieces(runtime):
    train(runtime, samples(UNEVEN), 2, Path("checkpoints"))  # ends inside the first epoch
    train(runtime, samples(UNEVEN), 5, Path("checkpoints"))  # ends inside the second epoch
    return train(runtime, samples(UNEVEN), 7, Path("checkpoints"))


def test_a_run_in_pieces_is_bit_equal_to_an_unbroken_one(ranks):
    for pieces, whole in zip(ranks.values(in_three_pieces), ranks.values(unbroken), strict=True):
        assert torch.equal(pieces, whole)


@on_every_rank
def gradients_of_the_digits_net(runtime):
    """Return the gradients of the mean over 29 images, in the layout of the workload."""
    torch.manual_seed(6)
    layout = runtime.hardware.image_layout(bf16=False)
    model = DigitsNet().to(memory_format=layout)
    ddp = runtime.wrap(model)
    images = torch.from_numpy(np.random.default_rng(8).standard_normal((29, 1, 8, 8), np.float32))
    (shard,) = GlobalBatchSampler(29, 29, runtime.rank, runtime.world_size)
    chosen = torch.from_numpy(shard.indices)
    logits = ddp(images[chosen].to(memory_format=layout))
    loss = F.cross_entropy(logits, chosen % 10, reduction="sum")
    (loss * (runtime.world_size / shard.batch_size)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_a_step_of_the_digits_net_is_that_of_one_process(ranks, single):
    # One step only: rounding may decide a ReLU or a pooled maximum differently, and further steps
    # magnify the difference.
    expected = single.first(gradients_of_the_digits_net)
    for gradients in ranks.values(gradients_of_the_digits_net):
        assert difference(gradients, expected) <= 1e-6


# Images, in the layout and with the optimizer of the workloads


def net_for_images() -> nn.Module:
    """Return a net with a 1x1 convolution: its weights fit two memory formats."""
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
    images = np.random.default_rng(4).standard_normal((29, 3, 8, 8), np.float32)
    return torch.from_numpy(images), torch.arange(29) % 10


def sgd_for_images(model: nn.Module, *, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3, fused=fused
    )


def batches_of_images(runtime: Runtime) -> Iterator[Shard]:
    """Yield the shards of 40 epochs of 14, 14 and 1 images. Only one rank gets the last image."""
    for epoch in range(40):
        yield from GlobalBatchSampler(29, 14, runtime.rank, runtime.world_size, seed=epoch)


def train_on_images(runtime: Runtime, arm: str) -> dict[str, torch.Tensor]:
    """Train as the workloads do, with the hardware's layout and a fused optimizer."""
    images, labels = some_images()
    layout = runtime.hardware.image_layout(bf16=False)
    model = net_for_images().to(memory_format=layout)
    trained = ARMS[arm](model, runtime)
    optimizer = sgd_for_images(model, fused=runtime.hardware.fused_optimizers)
    runtime.warm_up(trained.module, images[:2])
    for shard in batches_of_images(runtime):
        chosen = torch.from_numpy(shard.indices)
        inputs = images[chosen].to(memory_format=layout)
        loss = F.cross_entropy(trained.module(inputs), labels[chosen], reduction="sum")
        (loss * (runtime.world_size / shard.batch_size)).backward()
        trained.synchronise()
        runtime.step(optimizer)
    return model.state_dict()


@on_every_rank
def train_on_images_in_each_arm(runtime):
    return [train_on_images(runtime, arm) for arm in ARMS]


def plain_loop_on_images() -> dict[str, torch.Tensor]:
    """Train in one process with the default layout, and with an optimizer that is not fused."""
    images, labels = some_images()
    model = net_for_images()
    optimizer = sgd_for_images(model, fused=False)
    for batch in batches_of_images(Runtime()):
        chosen = torch.from_numpy(batch.indices)
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_layout_and_fused_optimizer_train_like_a_plain_loop(ranks, single):
    expected = plain_loop_on_images()
    arms = [
        *ranks.first(train_on_images_in_each_arm),
        *single.first(train_on_images_in_each_arm),
    ]
    for arm in arms:
        assert difference(arm, expected) <= 1e-5


# What the ranks tell each other


@on_every_rank
def equalities(runtime):
    """Compare equal tensors, one altered number on the last rank, and another order there."""
    same = torch.arange(6.0).view(2, 3)
    altered = same.clone()
    swapped = same.clone()
    if runtime.rank == runtime.world_size - 1:
        altered[1, 2] += 1e-6
        swapped = swapped.flip(0)
    return [runtime.identical([torch.ones(3), found]) for found in (same, altered, swapped)]


def test_one_altered_number_and_another_order_are_not_identical(ranks):
    for found in ranks.values(equalities):
        assert found == [True, False, False]


@on_every_rank
def indices_of_an_evaluation(runtime):
    """Evaluate 31 samples in batches of 4, and return every index looked up by any rank."""
    inputs, labels = samples(31)
    looked_up: list[int] = []
    model = wide_net()
    progress = Progress(runtime)

    def sums_of(shard: Shard) -> Sums:
        looked_up.extend(shard.indices.tolist())
        chosen = torch.from_numpy(shard.indices)
        return classification_sums(model(inputs[chosen]), labels[chosen])

    shards = evaluation_shards(31, 4, progress)
    found = evaluate(model, shards, sums_of, progress=progress, vote=StopVote(runtime))
    assert model.training
    logits = model(inputs).detach()
    assert found["samples"] == 31
    assert found["correct"] == float((logits.argmax(1) == labels).double().sum())
    assert abs(found["loss"] / 31 - float(F.cross_entropy(logits, labels))) < 1e-6
    return [index for indices in runtime.gather(looked_up) for index in indices]


def test_an_evaluation_counts_every_sample_exactly_once(ranks):
    for indices in ranks.values(indices_of_an_evaluation):
        assert sorted(indices) == list(range(31))


@on_every_rank
def sums_over_tokens(runtime):
    """Evaluate sentences of different lengths by a figure of its own. Some ranks have no sentence.

    The figure is a root mean square over tokens. It is not a mean over sentences.
    """
    sentences = [torch.arange(float(length)) for length in (3, 1, 7)]

    def sums_of(shard: Shard) -> Sums:
        chosen = [sentences[index] for index in shard.indices]
        if not chosen:
            return {}
        tokens = torch.cat(chosen)
        return {"squares": tokens.square().sum(), "tokens": len(tokens)}

    shards = evaluation_shards(3, 3, runtime)
    return evaluate(nn.Identity(), shards, sums_of, runtime=runtime)


def test_any_sums_are_added_up_over_the_ranks(ranks, single):
    expected = {"squares": 5.0 + 0.0 + 91.0, "tokens": 11.0}
    for found in (*ranks.values(sums_over_tokens), *single.values(sums_over_tokens)):
        assert found == expected


@on_every_rank
def error_of_the_last_rank(runtime):
    def fail_on_the_last_rank():
        if runtime.rank == runtime.world_size - 1:
            raise UserError("its data are missing")

    try:
        runtime.run_on_all(fail_on_the_last_rank)
    except UserError as error:
        return str(error)
    return "no error"


def test_all_ranks_raise_the_error_of_one_rank(ranks):
    for error in ranks.values(error_of_the_last_rank):
        assert error == f"rank {ranks.count - 1}: its data are missing"


# Memory, threads and the end of the group


@on_every_rank
def gradients_in_buckets(runtime):
    """Return for each gradient of the wide toy whether it lies in a bucket sent by DDP."""
    model = ToyModel(HIDDEN["wide"])
    ddp = runtime.wrap(model)
    sent: set[int] = set()

    def note_and_send(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.add(bucket.buffer().untyped_storage().data_ptr())
        return allreduce_hook(dist.group.WORLD, bucket)

    if isinstance(ddp, DistributedDataParallel):
        ddp.register_comm_hook(None, note_and_send)
    for _ in range(2):  # DDP rebuilds its buckets after the first backward pass
        sent.clear()
        ddp.zero_grad()
        ddp(torch.ones(2, 10)).sum().backward()
    return [parameter.grad.untyped_storage().data_ptr() in sent for parameter in model.parameters()]


def test_gradients_lie_in_the_buckets(ranks, single):
    for found in ranks.values(gradients_in_buckets):
        assert found == [True] * 4
    assert single.first(gradients_in_buckets) == [False] * 4, "without DDP there are no buckets"


@on_every_rank
def page_faults_of_memory_taken_again(_):
    def allocate_and_free() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.zeros(20 << 18) for _ in range(3)]  # 20 MB each
        del tensors
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return min(allocate_and_free() for _ in range(5))


def test_freed_memory_is_taken_again_without_page_faults(ranks):
    # Without the setting for malloc there are 15,360. Only glibc's malloc has the setting.
    limit = 100 if platform.libc_ver()[0] == "glibc" else math.inf
    for faults in ranks.values(page_faults_of_memory_taken_again):
        assert faults < limit


@on_every_rank
def policies_of_the_groups_threads(_):
    """Return the scheduling policies of the threads started with the group.

    Most are gloo's. Their names do not tell, because only newer releases of gloo set them.
    """
    new = threads().keys() - threads_before_the_group.keys()
    return {os.sched_getscheduler(thread) for thread in new}


def test_threads_that_reduce_do_not_displace_those_that_compute(ranks):
    # Other systems do not have this policy, nor /proc to list threads.
    expected = {os.SCHED_BATCH} if sys.platform == "linux" else set()
    for policies in ranks.values(policies_of_the_groups_threads):
        assert policies == expected


def test_no_group_is_left_whose_threads_could_abort_a_finished_process(ranks):
    for outcome in ranks.by_rank:
        assert outcome[GROUP_IS_GONE]
