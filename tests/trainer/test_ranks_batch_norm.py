"""BatchNorm on several ranks: each rank's own statistics, or those of the whole batch."""

import copy
import io
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddp_trainer.data.sampler import GlobalBatchSampler, Shard
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.batch_norm import batch_norm_for_empty_shard, synchronise
from ddp_trainer.run.evaluation import evaluation_mode, without_repeats
from ddp_trainer.workloads.shared.models import resnet18

from .every_rank import on_every_rank
from .small_data import FEATURES, difference, samples

# Three batches an epoch, of 12, 12 and 5 samples. The last is too small for four ranks.
SAMPLES = 29
BATCH_SIZE = 12
EPOCHS = 14


def net_with_batch_norm() -> nn.Module:
    """Return a small net in float64.

    The deviation of two samples may be small, and a division by it magnifies rounding.
    """
    torch.manual_seed(9)
    return nn.Sequential(
        nn.Linear(FEATURES, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10)
    ).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(runtime: Runtime, *, synchronised: bool, equal_shares: bool = False):
    """Return the parameters and buffers of the trained net."""
    inputs, labels = samples(SAMPLES, torch.float64)
    model = net_with_batch_norm()
    if synchronised:
        synchronise(model, runtime)
    ddp = runtime.wrap(model)
    optimizer = sgd(model)
    sampler = GlobalBatchSampler(
        SAMPLES,
        BATCH_SIZE,
        runtime.rank,
        runtime.world_size,
        at_least=2,
        equal_shares=equal_shares,
    )
    runtime.warm_up(ddp, inputs[:2])
    for _ in range(EPOCHS):
        for shard in sampler:
            chosen = torch.from_numpy(shard.indices)
            with batch_norm_for_empty_shard(model, shard):
                loss = F.cross_entropy(
                    ddp(inputs[chosen]), without_repeats(labels[chosen], shard), reduction="sum"
                )
                (loss * (runtime.world_size / shard.batch_size)).backward()
            runtime.step(optimizer)
    return model.state_dict()


def shards_of_all_ranks(count: int, *, equal_shares: bool = False) -> Iterator[tuple[Shard, ...]]:
    """Yield for each batch the shards of `count` ranks."""
    samplers = [
        GlobalBatchSampler(SAMPLES, BATCH_SIZE, rank, count, at_least=2, equal_shares=equal_shares)
        for rank in range(count)
    ]
    for _ in range(EPOCHS):
        yield from zip(*samplers, strict=True)


@on_every_rank
def with_own_statistics(runtime):
    return train(runtime, synchronised=False)


@on_every_rank
def with_statistics_of_the_batch(runtime):
    return train(runtime, synchronised=True)


@on_every_rank
def with_statistics_of_the_filled_batch(runtime):
    return train(runtime, synchronised=True, equal_shares=True)


def plain_loop_over_shards(ranks: int) -> dict[str, torch.Tensor]:
    """Train in one process, with each rank's share of a batch run by itself."""
    inputs, labels = samples(SAMPLES, torch.float64)
    model = net_with_batch_norm()
    optimizer = sgd(model)
    for shards in shards_of_all_ranks(ranks):
        for shard in shards:
            chosen = torch.from_numpy(shard.indices)
            if len(chosen):
                loss = F.cross_entropy(model(inputs[chosen]), labels[chosen], reduction="sum")
                (loss / shard.batch_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def test_batch_norm_trains_like_a_plain_loop_that_normalises_each_share(ranks, single):
    expected = plain_loop_over_shards(ranks.count)
    assert difference(ranks.first(with_own_statistics), expected) <= 1e-10
    assert difference(single.first(with_own_statistics), expected) > 1e-3


def test_synchronised_batch_norm_trains_like_one_process_without_it(ranks, single):
    expected = single.first(with_own_statistics)  # running statistics included
    for found in ranks.values(with_statistics_of_the_batch):
        assert difference(found, expected) <= 1e-10


def plain_loop_over_filled_batches(ranks: int) -> dict[str, torch.Tensor]:
    """Train in one process, with the samples and repeats of all ranks in its batches."""
    inputs, labels = samples(SAMPLES, torch.float64)
    model = net_with_batch_norm()
    optimizer = sgd(model)
    for shards in shards_of_all_ranks(ranks, equal_shares=True):
        chosen = torch.from_numpy(np.concatenate([shard.indices for shard in shards]))
        real = torch.from_numpy(np.concatenate([shard.real for shard in shards]))
        F.cross_entropy(model(inputs[chosen])[real], labels[chosen][real]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_synchronised_batch_norm_counts_the_repeats_that_fill_up_shares(ranks):
    expected = plain_loop_over_filled_batches(ranks.count)
    for found in ranks.values(with_statistics_of_the_filled_batch):
        assert difference(found, expected) <= 1e-10
    assert difference(ranks.first(with_statistics_of_the_batch), expected) > 1e-4


@on_every_rank
def train_resnet_on_few_samples(runtime):
    """Return the gradients of batches too small for all ranks, and the model's state."""
    torch.manual_seed(7)
    model = resnet18(10, "torchvision")
    ddp = runtime.wrap(model)
    runtime.warm_up(ddp, torch.zeros(2, 3, 32, 32))
    gradients = {}
    for batch in (5, 3, 2):
        (shard,) = GlobalBatchSampler(batch, batch, runtime.rank, runtime.world_size, at_least=2)
        images = torch.from_numpy(np.random.default_rng(1).random((batch, 3, 32, 32), np.float32))
        chosen = torch.from_numpy(shard.indices)
        with batch_norm_for_empty_shard(model, shard):
            loss = F.cross_entropy(ddp(images[chosen]), chosen % 10, reduction="sum")
            (loss * (runtime.world_size / batch)).backward()
        gradients[batch] = torch.cat([value.grad.flatten() for value in model.parameters()])
        ddp.zero_grad()
    return {
        "gradients": gradients,
        "buffers": torch.cat([buffer.flatten().double() for buffer in model.buffers()]),
        "training": [module.training for module in model.modules()],
    }


def test_ranks_without_samples_take_part_and_leave_batch_norm_intact(ranks):
    first, *_ = outcomes = ranks.values(train_resnet_on_few_samples)
    for outcome in outcomes:
        assert all(outcome["training"])
        assert outcome["buffers"].isfinite().all()
        for batch, gradients in outcome["gradients"].items():
            assert gradients.isfinite().all()
            assert gradients.any()
            assert torch.equal(gradients, first["gradients"][batch])


@on_every_rank
def normalise_one_sample(runtime):
    """Let rank 0 alone have a batch, of one sample, and return the message of the error."""
    model = nn.BatchNorm1d(FEATURES)
    synchronise(model, runtime)
    try:
        model(torch.ones(int(runtime.is_main), FEATURES))
    except ValueError as error:
        return str(error), bool(model.running_var.isfinite().all())
    return None


def test_synchronised_batch_norm_refuses_one_value_a_channel_on_every_rank(ranks):
    for message, intact in ranks.values(normalise_one_sample):
        assert message.startswith("expected more than 1 value per channel over all ranks")
        assert intact


@on_every_rank
def copies_of_a_synchronised_model(runtime):
    """Return how outputs in training and the number of ranks differ between a model's copies."""
    model = net_with_batch_norm()
    synchronise(model, runtime)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    inputs = samples(8, torch.float64)[0] + runtime.rank
    expected = model(inputs)
    copies = {"averaged": averaged, "copied": copy.deepcopy(model), "read": read}
    outputs = {name: difference(found(inputs), expected) for name, found in copies.items()}
    again = synchronise(read, runtime) or read
    return outputs, read[1].runtime.world_size, difference(again(inputs), expected)


def test_a_synchronised_model_can_be_averaged_copied_and_pickled(ranks, single):
    for outputs, _, again in ranks.values(copies_of_a_synchronised_model):
        assert outputs["averaged"] == outputs["copied"] == again == 0
        assert outputs["read"] > 1e-3, "a model from a file has this process alone"
    outputs, ranks_of_read, _ = single.first(copies_of_a_synchronised_model)
    assert (max(outputs.values()), ranks_of_read) == (0, 1)


def test_synchronised_batch_norm_normalises_images_under_autocast_as_batch_norm_does():
    torch.manual_seed(0)
    plain, ours = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    synchronise(ours, Runtime())
    images = torch.randn(4, 3, 5, 5, dtype=torch.bfloat16) * 7 + 3
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(images), ours(images)
    assert found.dtype == expected.dtype
    assert torch.allclose(found.float(), expected.float(), atol=0.05)
    assert torch.allclose(ours.running_mean, plain.running_mean, rtol=1e-4)
    assert torch.allclose(ours.running_var, plain.running_var, rtol=1e-4)
    assert torch.equal(ours.eval()(images), plain.eval()(images).to(found.dtype))


# Frozen BatchNorm


def frozen_net() -> nn.Module:
    """Return a net in training with a frozen BatchNorm, as in fine-tuning."""
    model = net_with_batch_norm()
    model[1].eval()
    return model


def leave_warm_up(model: nn.Module) -> None:
    Runtime().warm_up(model, torch.ones(2, FEATURES, dtype=torch.float64))


def leave_evaluation(model: nn.Module) -> None:
    with evaluation_mode(model):
        assert not model.training


def leave_empty_shard(model: nn.Module) -> None:
    empty = np.zeros(0, np.int64)
    shard = Shard(empty, empty, empty.astype(bool), (2, 0), epoch=0, start=0)
    with batch_norm_for_empty_shard(model, shard):
        pass


@pytest.mark.parametrize("leave", [leave_warm_up, leave_evaluation, leave_empty_shard])
def test_a_frozen_batch_norm_stays_frozen(leave):
    model = frozen_net()
    leave(model)
    assert [module.training for module in model] == [True, False, True, True]
    assert model.training


# Random numbers


def test_ranks_draw_different_numbers_after_seed_rank():
    drawn = []
    for rank in (0, 1, 0):
        Runtime(rank=rank, world_size=2).seed_rank(3)
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] == drawn[2] != drawn[1]
