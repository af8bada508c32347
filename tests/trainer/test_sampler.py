"""An epoch has every sample exactly once, for all sizes and from any position."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_trainer.data.sampler import GlobalBatchSampler, split
from ddp_trainer.errors import UserError

sizes = st.integers(1, 200)
batch_sizes = st.integers(1, 40)
worlds = st.integers(1, 9)
seeds = st.integers(0, 2**32)


def world(samples, batch_size, ranks, **options):
    return [
        GlobalBatchSampler(samples, batch_size, rank, ranks, **options) for rank in range(ranks)
    ]


def global_batches(samplers):
    """Join the shards of all ranks, in rank order, to global batches."""
    return [
        np.concatenate([shard.indices for shard in shards]).tolist()
        for shards in zip(*samplers, strict=True)
    ]


@given(st.integers(2, 200), st.integers(2, 40), worlds, st.sampled_from([1, 2]), st.data())
def test_equal_shares_are_the_same_batches_filled_up_with_repeats(
    samples, batch_size, ranks, at_least, data
):
    offset = data.draw(st.integers(0, samples - at_least), "position")
    plain, equal = (
        world(samples, batch_size, ranks, at_least=at_least, equal_shares=how)
        for how in (False, True)
    )
    for sampler in (*plain, *equal):
        sampler.offset = offset
    lengths = []
    for expected, found in zip(zip(*plain, strict=True), zip(*equal, strict=True), strict=True):
        batch = np.concatenate([shard.indices for shard in expected])
        for mine, filled in zip(expected, found, strict=True):
            assert filled.indices[filled.real].tolist() == mine.indices.tolist()
            assert filled.indices.tolist() == batch[filled.positions].tolist()
            assert filled.sizes == mine.sizes
        lengths.append({len(filled.indices) for filled in found})
        assert len(lengths[-1]) == 1
    if at_least == 1 and offset == 0:
        assert all(length == lengths[0] for length in lengths)


@given(sizes, batch_sizes, worlds, seeds)
def test_an_epoch_is_every_sample_exactly_once(samples, batch_size, ranks, seed):
    seen = chain(*global_batches(world(samples, batch_size, ranks, seed=seed)))
    assert sorted(seen) == list(range(samples))


@given(sizes, batch_sizes, worlds)
def test_every_rank_gets_the_same_number_of_shards_and_shares_differ_by_at_most_one(
    samples, batch_size, ranks
):
    for shards in zip(*world(samples, batch_size, ranks), strict=True):
        counts = [len(shard.indices) for shard in shards]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) <= batch_size
        for rank, shard in enumerate(shards):
            assert shard.sizes == tuple(counts)
            assert shard.batch_size == sum(counts)
            assert shard.positions.tolist() == list(
                range(sum(counts[:rank]), sum(counts[: rank + 1]))
            )
            assert shard.real.all()


@given(st.integers(2, 200), st.integers(2, 40), worlds, st.data())
def test_with_at_least_two_a_share_is_never_a_single_sample_from_any_position_on(
    samples, batch_size, ranks, data
):
    samplers = world(samples, batch_size, ranks, at_least=2)
    first = data.draw(st.integers(2, 40), "batch size before")
    start = [0, *(shard.start for shard in GlobalBatchSampler(samples, first, at_least=2))]
    offset = data.draw(st.sampled_from(start), "position")
    for sampler in samplers:
        sampler.offset = offset
    expected = samplers[0].batches_until(1)
    batches = list(zip(*samplers, strict=True))
    assert len(batches) == expected
    assert all(len(shard.indices) != 1 for shards in batches for shard in shards)
    assert sum(len(shard.indices) for shards in batches for shard in shards) == samples - offset


@given(sizes, batch_sizes, worlds, worlds, seeds)
def test_the_batches_do_not_depend_on_the_number_of_ranks(samples, batch_size, ranks, others, seed):
    one = global_batches(world(samples, batch_size, ranks, seed=seed))
    assert one == global_batches(world(samples, batch_size, others, seed=seed))


@given(
    sizes,
    st.tuples(batch_sizes, worlds),
    st.tuples(batch_sizes, worlds),
    st.sampled_from(["keep", "change"]),
    st.data(),
)
def test_a_resume_inside_an_epoch_with_other_batches_and_ranks_skips_and_repeats_nothing(
    samples, sizes_before, sizes_after, on_resize, data
):
    before = world(samples, *sizes_before)
    iterators = [iter(sampler) for sampler in before]
    done = data.draw(st.integers(1, before[0].batches_until(1)), "batches before")
    seen = []
    for _ in range(done):
        for iterator in iterators:
            seen += next(iterator).indices.tolist()

    after = world(samples, *sizes_after, on_resize=on_resize)
    for sampler in after:
        sampler.load_state_dict(before[0].state_dict())
        assert sampler.batch_size == (sizes_before if on_resize == "keep" else sizes_after)[0]
    expected = after[0].batches_until(1)
    rest = global_batches(after)
    assert len(rest) == expected
    assert sorted(chain(seen, *rest)) == list(range(samples))


@given(sizes, batch_sizes, st.integers(1, 5))
def test_batches_until_is_what_iterating_gives(samples, batch_size, epochs):
    sampler = GlobalBatchSampler(samples, batch_size)
    expected = sampler.batches_until(epochs)
    count = 0
    while sampler.epoch < epochs:
        count += len(list(sampler))
    assert count == expected
    assert sampler.batches_until(epochs) == 0


@given(st.integers(0, 50), worlds, st.integers(1, 4))
def test_split_adds_up(total, parts, at_least):
    shares = split(total, parts, at_least)
    assert len(shares) == parts
    assert sum(shares) == total
    assert all(share == 0 or share >= min(at_least, total) for share in shares)


def test_epochs_follow_each_other_in_different_orders_that_the_seed_decides():
    sampler, again = GlobalBatchSampler(50, 50, seed=3), GlobalBatchSampler(50, 50, seed=3)
    first, second = next(iter(list(sampler))).indices, next(iter(list(sampler))).indices
    assert sampler.epoch == 2
    assert first.tolist() != second.tolist()
    again.set_epoch(1)
    assert next(iter(again)).indices.tolist() == second.tolist()
    assert next(iter(GlobalBatchSampler(50, 50, seed=4))).indices.tolist() != first.tolist()


def test_set_epoch_keeps_the_position_of_a_resumed_epoch_and_starts_any_other():
    sampler = GlobalBatchSampler(10, 2)
    next(iter(sampler))
    sampler.set_epoch(0)
    assert sampler.offset == 2
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.offset) == (1, 0)


def test_a_resume_with_another_batch_size_is_refused_unless_it_is_allowed(capsys):
    state = GlobalBatchSampler(100, 40).state_dict()
    with pytest.raises(
        UserError, match="with 40 samples per step over all ranks, but this run has 60"
    ):
        GlobalBatchSampler(100, 60).load_state_dict(state)
    for rank in (0, 1):
        GlobalBatchSampler(100, 60, rank, 2, on_resize="keep").load_state_dict(state)
        GlobalBatchSampler(100, 60, rank, 2, on_resize="change").load_state_dict(state)
    kept, changed = capsys.readouterr().err.splitlines()
    assert "this run keeps that, instead of its own 60" in kept
    assert "this run continues with its own 60" in changed


def test_a_position_of_a_release_without_batch_sizes_is_accepted():
    state = GlobalBatchSampler(100, 40).state_dict()
    del state["batch_size"]
    sampler = GlobalBatchSampler(100, 60)
    sampler.load_state_dict(state)
    assert sampler.batch_size == 60


@given(sizes, batch_sizes, worlds, st.integers(1, 9), st.booleans())
def test_parts_of_a_shard_are_the_shard_and_all_ranks_have_equally_many(
    samples, batch_size, ranks, size, equal_shares
):
    for shards in zip(*world(samples, batch_size, ranks, equal_shares=equal_shares), strict=True):
        assert len({len(shard.split(size)) for shard in shards}) == 1
        for shard in shards:
            parts = shard.split(size)
            assert max(len(part.indices) for part in parts) <= size
            assert {part.batch_size for part in parts} == {shard.batch_size}
            for name in ("indices", "positions", "real"):
                joined = [value for part in parts for value in getattr(part, name).tolist()]
                assert joined == getattr(shard, name).tolist()


@given(st.integers(4, 200), st.integers(4, 40), worlds, st.integers(1, 9), st.integers(1, 4))
def test_parts_of_a_share_have_at_least_as_many_samples_as_a_share(
    samples, batch_size, ranks, size, at_least
):
    for shards in zip(*world(samples, batch_size, ranks, at_least=at_least), strict=True):
        assert len({len(shard.split(size)) for shard in shards}) == 1
        for shard in shards:
            parts = shard.split(size)
            lengths = [len(part.indices) for part in parts if len(part.indices)]
            assert all(length >= min(at_least, len(shard.indices)) for length in lengths)
            # Only an indivisible part is larger.
            assert max(lengths, default=0) <= max(size, 2 * at_least - 1)
            joined = [index for part in parts for index in part.indices.tolist()]
            assert joined == shard.indices.tolist()


def test_153_samples_on_two_ranks_are_153():
    assert sum(len(batch) for batch in global_batches(world(153, 8, 2))) == 153


@pytest.mark.parametrize("changed", [{"samples": 11}, {"seed": 1}, {"shuffle": False}])
def test_a_position_in_other_data_or_another_order_is_refused(changed):
    state = GlobalBatchSampler(10, 2).state_dict()
    with pytest.raises(UserError, match=f"with {next(iter(changed))} "):
        GlobalBatchSampler(**{"samples": 10, "batch_size": 2} | changed).load_state_dict(state)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            {"samples": 0, "batch_size": 2},
            "too few samples: expected at least 1, got 0",
        ),
        (
            {"samples": 1, "batch_size": 2, "at_least": 2},
            "too few samples: expected at least 2, got 1",
        ),
        (
            {"samples": 9, "batch_size": 1, "at_least": 2},
            "the batch over all processes is too small: expected at least 2, got 1",
        ),
    ],
)
def test_too_few_samples_are_refused(sizes, sentence):
    with pytest.raises(UserError, match=sentence):
        GlobalBatchSampler(**sizes)
