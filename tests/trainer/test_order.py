"""Orders of the user's own: weights, subsets and batches by length, with exact positions."""

import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_trainer.data.loader import IndexBatches, ShardLoader
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.errors import UserError

from .test_sampler import batch_sizes, global_batches, sizes, world, worlds

PAGE = Path(__file__).parents[2] / "docs" / "library.md"

SAMPLES = 60
LENGTHS = np.random.default_rng(2).integers(1, 30, SAMPLES)


def with_repeats(epoch, generator):
    """Return another number of samples in each epoch, some of them several times."""
    return generator.integers(0, 10, 10 + epoch)


def by_length(epoch, generator):
    """Return batches of samples of similar lengths, of at most 80 in all."""
    batches = [[]]
    for index in np.argsort(LENGTHS + generator.random(SAMPLES)):
        if LENGTHS[[*batches[-1], index]].sum() > 80:
            batches.append([])
        batches[-1].append(int(index))
    return [batches[number] for number in generator.permutation(len(batches))]


ORDERS = st.sampled_from([with_repeats, by_length])


def remaining(sampler, epochs):
    """Return the global batches from the position of a sampler of one rank to the last epoch."""
    batches = []
    while sampler.epoch < epochs:
        batches += [shard.indices.tolist() for shard in sampler]
    return batches


@given(ORDERS, batch_sizes, worlds, st.booleans())
def test_every_rank_gets_its_share_of_the_order(order, batch_size, ranks, equal_shares):
    samplers = world(SAMPLES, batch_size, ranks, order=order, equal_shares=equal_shares, seed=4)
    made = order(0, np.random.default_rng([4, 0]))
    expected = np.concatenate([made] if order is with_repeats else made).tolist()
    shards = [list(sampler) for sampler in samplers]
    in_order = chain.from_iterable(zip(*shards, strict=True))
    real = [shard.indices[shard.real].tolist() for shard in in_order]
    assert list(chain(*real)) == expected
    if order is by_length:
        assert [shard.batch_size for shard in shards[0]] == [len(batch) for batch in made]
    if equal_shares:
        for batch in zip(*shards, strict=True):
            assert len({len(shard.indices) for shard in batch}) == 1


@given(ORDERS, batch_sizes, worlds, worlds, st.data())
def test_a_resume_inside_an_epoch_continues_the_order_at_any_world_size(
    order, batch_size, before, after, data
):
    whole = remaining(GlobalBatchSampler(SAMPLES, batch_size, order=order), 2)
    samplers = world(SAMPLES, batch_size, before, order=order)
    done = data.draw(st.integers(1, samplers[0].batches_until(2) - 1), "batches before")
    seen = []
    while len(seen) < done:
        # A new iterator continues at the position.
        for shards in zip(*samplers, strict=True):
            seen.append(np.concatenate([shard.indices for shard in shards]).tolist())
            if len(seen) == done:
                break
    resumed = world(SAMPLES, batch_size, after, order=order)
    for sampler in resumed:
        sampler.load_state_dict(samplers[0].state_dict())
    assert resumed[0].batches_until(2) == len(whole) - done
    rest = []
    while resumed[0].epoch < 2:
        rest += global_batches(resumed)
    assert seen + rest == whole


@given(sizes, batch_sizes, worlds)
def test_drop_last_leaves_out_the_batch_that_is_not_full(samples, batch_size, ranks):
    if samples < batch_size:
        with pytest.raises(UserError, match="drop_last leaves no batch of an epoch"):
            GlobalBatchSampler(samples, batch_size, drop_last=True)
        return
    samplers = world(samples, batch_size, ranks, drop_last=True)
    assert samplers[0].batches_until(3) == 3 * (samples // batch_size)
    batches = global_batches(samplers)
    assert [len(batch) for batch in batches] == [batch_size] * (samples // batch_size)
    assert samplers[0].may_leave_ranks_empty() == (batch_size < ranks)


def state_inside_an_epoch(order):
    sampler = GlobalBatchSampler(SAMPLES, 8, order=order)
    next(iter(sampler))
    return sampler.state_dict()


def backwards(epoch, generator):
    return np.arange(SAMPLES)[::-1]


@pytest.mark.parametrize("order", [by_length, None])
def test_a_position_in_another_order_is_refused(order):
    sampler = GlobalBatchSampler(SAMPLES, 8, order=order)
    with pytest.raises(UserError, match="inside epoch 0, whose order was another one"):
        sampler.load_state_dict(state_inside_an_epoch(backwards))


def test_the_start_of_an_epoch_fits_any_order_and_the_end_of_the_last_needs_none():
    planned = [np.arange(8), np.arange(16)]
    sampler = GlobalBatchSampler(SAMPLES, 8, order=lambda epoch, _: planned[epoch])
    assert len(remaining(sampler, 2)) == 3
    again = GlobalBatchSampler(SAMPLES, 8, order=by_length)
    again.load_state_dict(sampler.state_dict())
    assert (again.epoch, again.offset) == (2, 0)


@pytest.mark.parametrize(
    ("made", "options", "sentence"),
    [
        ([0, SAMPLES], {}, "must have integers from 0 to 59"),
        ([0.5], {}, "must have integers from 0 to 59"),
        ([], {}, "an epoch of fewer than 1 samples"),
        ([[1, 2], []], {}, "a batch of fewer than 1 samples"),
        ([[1, 2], [3]], {"at_least": 2}, "a batch of fewer than 2 samples"),
        ([[1, 2]], {"drop_last": True}, "drop_last has no effect"),
        ([1, 2], {"drop_last": True}, "drop_last leaves no batch of an epoch"),
    ],
)
def test_an_order_that_cannot_be_used_is_refused(made, options, sentence):
    sampler = GlobalBatchSampler(SAMPLES, 8, order=lambda epoch, generator: made, **options)
    with pytest.raises(UserError, match=sentence):
        list(sampler)


def test_an_order_that_draws_from_another_generator_is_refused():
    sampler = GlobalBatchSampler(SAMPLES, 8, order=lambda epoch, _: np.random.permutation(SAMPLES))
    with pytest.raises(UserError, match="two different orders of one epoch"):
        list(sampler)


def test_an_order_may_be_tensors_and_goes_through_a_loader():
    def order(epoch, generator):
        return torch.tensor([[3, 1], [1, 2]])

    data = torch.arange(SAMPLES)
    loader = ShardLoader(data, GlobalBatchSampler(SAMPLES, 8, order=order))
    assert len(loader) == 2
    assert [batch.tolist() for _, batch in loader] == [[3, 1], [1, 2]]
    with pytest.raises(UserError, match="a rank would get no sample"):
        IndexBatches(GlobalBatchSampler(SAMPLES, 8, 0, 2, order=order))


def test_the_examples_of_the_library_page_work():
    (script,) = [
        text
        for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "order=" in text
    ]
    names = {"weights": np.full(SAMPLES, 1 / SAMPLES), "lengths": LENGTHS, "ranks": (0, 1)}
    exec(script, names)
    weighted, curriculum, buckets = (names[name] for name in ("weighted", "curriculum", "buckets"))
    assert sum(len(batch) for batch in remaining(weighted, 1)) == SAMPLES
    assert [sum(map(len, remaining(curriculum, epoch))) for epoch in (1, 2)] == [30, 45]
    assert sorted(chain(*remaining(buckets, 1))) == list(range(SAMPLES))


def test_a_loader_makes_the_order_of_an_epoch_once_after_the_first():
    made = []

    def order(epoch, generator):
        made.append(epoch)
        return generator.permutation(6)

    sampler = GlobalBatchSampler(6, 2, order=order)
    loader = ShardLoader(list(range(6)), sampler)
    for _ in range(3):
        assert len(list(loader)) == 3
    # The first order is made twice, to compare.
    assert made == [0, 0, 1, 2]
