"""DataLoader over shards: exact positions with workers, and random numbers of the samples' own."""

import importlib.util
import os
import random
import signal
from collections import UserDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.checkpoint.parts import PerRank
from ddp_trainer.data.loader import IndexBatches, ShardLoader, sample_seeds
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.errors import UserError
from ddp_trainer.ranks import generators
from ddp_trainer.ranks.runtime import Runtime

from . import launch

SAMPLES = 149


class Augmented(Dataset):
    """Samples with random numbers of every generator in each."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(()).double(), np.random.rand(), random.random()
        return torch.tensor([float(index), *map(float, noise)], dtype=torch.float64)


def a_sampler(batch_size=16, rank=0, world_size=1, **options):
    return GlobalBatchSampler(SAMPLES, batch_size, rank, world_size, seed=3, **options)


def rows(batches):
    """Return the samples of batches, in the order of their indices."""
    joined = torch.cat([batch for _, batch in batches])
    return joined[joined[:, 0].argsort()]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_sampler(workers):
    loader = ShardLoader(Augmented(), a_sampler(), num_workers=workers)
    assert len(loader) == 10
    found = list(loader)
    expected = list(a_sampler())
    for (shard, batch), own in zip(found, expected, strict=True):
        assert shard.indices.tolist() == own.indices.tolist() == batch[:, 0].tolist()
    assert (loader.sampler.epoch, loader.sampler.offset) == (1, 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_resume_continues_with_the_batch_after_the_last_that_was_yielded(workers, persistent):
    options = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
    unbroken = list(ShardLoader(Augmented(), a_sampler(), **options))
    first = ShardLoader(Augmented(), a_sampler(), **options)
    batches = iter(first)
    before = [next(batches) for _ in range(5)]
    # Two workers have fetched four more batches.
    state = first.sampler.state_dict()
    assert state["offset"] == 5 * 16
    second = ShardLoader(Augmented(), a_sampler(), **options)
    second.sampler.load_state_dict(state)
    assert torch.equal(rows([*before, *second]), rows(unbroken))


def one_ahead(batches):
    """Yield batches, each when the next one has been fetched."""
    held = None
    for batch in batches:
        if held is not None:
            yield held
        held = batch
    yield held


def test_a_prefetcher_is_not_counted_if_the_training_counts_what_it_uses():
    whole = rows(ShardLoader(Augmented(), a_sampler()))
    for trained in (1, 9, 10):
        first = ShardLoader(Augmented(), a_sampler())
        before = []
        for shard, batch in one_ahead(first):
            first.sampler.use(shard)
            before.append((shard, batch))
            if len(before) == trained:
                break
        second = ShardLoader(Augmented(), a_sampler())
        second.sampler.load_state_dict(first.sampler.state_dict())
        # After the last batch the position is the start of the next epoch.
        rest = [] if second.sampler.epoch else [*second]
        assert torch.equal(rows([*before, *rest]), whole)
        assert (second.sampler.epoch, second.sampler.offset) == (1, 0)


def test_a_prefetcher_gets_every_epoch():
    loader = ShardLoader(Augmented(), a_sampler())
    epochs = []
    for _ in range(3):
        for shard, _ in one_ahead(loader):
            loader.sampler.use(shard)
            epochs.append(shard.epoch)
    assert epochs == [0] * 10 + [1] * 10 + [2] * 10


def test_an_epoch_can_be_repeated():
    loader = ShardLoader(Augmented(), a_sampler())
    for _ in range(2):
        loader.sampler.set_epoch(0)
        assert len(list(loader)) == 10
        assert (loader.sampler.epoch, loader.sampler.offset) == (1, 0)


def test_the_random_numbers_of_a_sample_depend_on_nothing_else():
    one = rows(ShardLoader(Augmented(), a_sampler()))
    ranks = [
        ShardLoader(Augmented(), a_sampler(7, rank, 3), num_workers=workers)
        for rank, workers in enumerate((0, 1, 3))
    ]
    assert torch.equal(rows([batch for loader in ranks for batch in loader]), one)
    loader = ShardLoader(Augmented(), a_sampler())
    list(loader)
    assert not torch.equal(rows(loader), one), "the next epoch has other numbers"
    assert not torch.equal(rows(ShardLoader(Augmented(), a_sampler(), seed=1)), one)


def test_the_generators_of_the_training_are_not_used():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for workers in (0, 1):
        list(ShardLoader(Augmented(), a_sampler(), num_workers=workers))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


def numpy_states():
    """Set numpy's generator: inside a block, at its end, and within a pair of normal numbers."""
    for draws in (0, 1, 623, 624, 1000):
        np.random.seed(5)
        np.random.random_sample(draws)
        yield
        np.random.standard_normal()
        yield


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_numpy_generates_the_same_as_without_a_batch(kind):
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(kind(5))
    try:
        for _ in numpy_states():
            before = np.random.get_state(legacy=False)
            expected = np.random.standard_normal(3).tolist(), np.random.randint(99)
            np.random.set_state(before)
            restore = generators.remember_numpy()
            np.random.seed(7)
            np.random.standard_normal(5)
            restore()
            assert (np.random.standard_normal(3).tolist(), np.random.randint(99)) == expected
    finally:
        np.random.set_bit_generator(own)


def test_numpy_is_restored_by_its_own_functions_if_its_memory_is_not_known(monkeypatch):
    monkeypatch.setattr(generators, "_has_known_memory", lambda: False)
    before = np.random.get_state()[1].tolist()
    list(ShardLoader(Augmented(), a_sampler()))
    assert np.random.get_state()[1].tolist() == before


def test_the_generators_are_saved_once_for_each_batch(monkeypatch):
    saved = []
    save = generators.remember_numpy
    monkeypatch.setattr(generators, "remember_numpy", lambda: saved.append(1) or save())
    list(ShardLoader(Augmented(), a_sampler()))
    assert len(saved) == len(list(a_sampler()))


def test_samples_have_different_seeds_in_each_epoch_and_for_each_seed():
    keys = [[(epoch, index) for index in range(SAMPLES)] for epoch in range(20)]
    seeds = {number for batch in keys for seed in (0, 1) for number in sample_seeds(seed, batch)}
    assert len(seeds) == 2 * 20 * SAMPLES
    assert all(0 <= number < 2**64 for number in seeds)
    assert sample_seeds(5, keys[3]) == [sample_seeds(5, [key])[0] for key in keys[3]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_without_samples_gets_a_batch_without_rows(workers):
    data = TensorDataset(torch.arange(12.0).view(4, 3), torch.arange(4))
    sampler = GlobalBatchSampler(4, 3, rank=1, world_size=2)
    (_, two), (shard, none) = ShardLoader(data, sampler, num_workers=workers)
    assert len(shard.indices) == 0
    assert [tensor.shape for tensor in two] == [(1, 3), (1,)]
    assert [tensor.shape for tensor in none] == [(0, 3), (0,)]
    assert [tensor.dtype for tensor in none] == [torch.float32, torch.int64]


class Batched(Dataset):
    """A data set that fetches a whole batch, as those of Hugging Face do."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        return [(index, random.random()) for index in indices]


def test_a_data_set_may_fetch_whole_batches_and_collate_as_it_likes():
    def run():
        return list(ShardLoader(Batched(), a_sampler(), collate_fn=list))

    for (shard, batch), (_, again) in zip(run(), run(), strict=True):
        assert [index for index, _ in batch] == shard.indices.tolist()
        assert batch == again


def note_the_worker(worker):
    random.worker = worker


class NotedWorkers(Augmented):
    """Samples with the number of their worker, and whether it leads a process group."""

    def __getitem__(self, index):
        return random.worker, os.getpgid(0) == os.getpid()


def test_workers_have_a_process_group_of_their_own_and_the_users_own_set_up():
    loader = ShardLoader(NotedWorkers(), a_sampler(), num_workers=2, worker_init_fn=note_the_worker)
    found = [batch for _, batch in loader]
    assert all(own.all() for _, own in found)
    assert {int(number) for numbers, _ in found for number in numbers} == {0, 1}


@pytest.mark.parametrize("name", ["batch_size", "shuffle", "batch_sampler", "drop_last"])
def test_what_the_sampler_decides_must_not_be_given(name):
    with pytest.raises(ValueError, match=f"{name}: must not be given"):
        ShardLoader(Augmented(), a_sampler(), **{name: 2})


def test_data_of_another_size_and_streams_are_refused():
    with pytest.raises(ValueError, match="for 149 samples, but the data set has 4"):
        ShardLoader(TensorDataset(torch.ones(4)), a_sampler())

    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(UserError, match="an IterableDataset has no indices"):
        ShardLoader(Stream(), a_sampler())


# Batches without samples


class Named(Dataset):
    """Samples as dicts. A collate function makes an object of its own from them."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"numbers": torch.ones(3)}


@pytest.mark.parametrize("collate", [None, lambda samples: UserDict(default_collate(samples))])
def test_a_batch_without_samples_has_the_form_of_the_others(collate):
    # The last batch has one sample.
    loader = ShardLoader(Named(), a_sampler(4, rank=1, world_size=2), collate_fn=collate)
    *_, (shard, batch) = loader
    assert (len(shard.indices), batch["numbers"].shape) == (0, (0, 3))


def test_a_batch_that_cannot_be_made_empty_is_refused():
    loader = ShardLoader(Named(), a_sampler(4, rank=1, world_size=2), collate_fn=str)
    with pytest.raises(UserError, match="a batch of type str cannot be made empty"):
        list(loader)


# SIGTERM with workers


TRAINING = """
import sys
import time
from pathlib import Path
import torch
from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.checkpoint.parts import PerRank
from ddp_trainer.run.interrupt import StopVote
from ddp_trainer.data.loader import ShardLoader
from ddp_trainer.ranks.group import process_group
from ddp_trainer.run.progress import Progress
from ddp_trainer.data.sampler import GlobalBatchSampler
from trainer.test_loader import SAMPLES, Augmented

with process_group(device="cpu") as runtime:
    sampler = GlobalBatchSampler(SAMPLES, 8, runtime.rank, runtime.world_size)
    loader = ShardLoader(Augmented(), sampler, num_workers=2)
    model = torch.nn.Linear(4, 1).double()
    ddp = runtime.wrap(model)
    seen = torch.zeros(SAMPLES)
    parts = {"model": model, "sampler": sampler, "seen": PerRank(Seen(seen))}
    checkpoints = Checkpoints(sys.argv[1], runtime, parts)
    step = checkpoints.restore()
    progress = Progress(runtime, log_every=1)
    stop = StopVote(runtime, checkpoints, progress)
    progress.start(epochs=2, steps=step + sampler.batches_until(2), resumed_step=step)
    while sampler.epoch < 2:
        for shard, batch in loader:
            loss = ddp(batch).square().sum()
            (loss * runtime.world_size / shard.batch_size).backward()
            runtime.step(torch.optim.SGD(model.parameters(), lr=1e-6))
            seen[torch.from_numpy(shard.indices)] += 1
            step += 1
            progress.step(
                step, shard.epoch, loss_sum=loss, samples=shard.batch_size, learning_rate=0.1
            )
            if step == 5 and "--wait-for-signal" in sys.argv:
                while not stop.received:
                    time.sleep(0.01)
                stop.vote_at_next_step()
            stop.after_step(step)
    total = runtime.sum(seen)
    numbers = {"least": int(total.min()), "most": int(total.max())}
    progress.end(step, {**numbers, "weights": model.weight.sum().item()})
"""
SEEN = """
class Seen:
    def __init__(self, seen): self.seen = seen
    def state_dict(self): return {"seen": self.seen.clone()}
    def load_state_dict(self, state): self.seen.copy_(state["seen"])
"""


def test_a_signal_with_workers_keeps_the_checkpoint_of_that_moment(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SEEN + TRAINING)
    tests = Path(__file__).parents[1]
    whole = launch.torchrun(script, tmp_path / "whole", PYTHONPATH=tests)
    broken = launch.torchrun(script, tmp_path / "broken", "--wait-for-signal", PYTHONPATH=tests)
    broken.wait_for("train", step=5)
    # torchrun sends it to the process groups of its ranks.
    broken.signal(signal.SIGTERM)
    assert broken.finish() != 0
    assert "Exception" not in broken.stderr.replace("SignalException", ""), broken.stderr
    (interrupted,) = broken.of("interrupted")
    assert launch.newest(tmp_path / "broken").name == f"step-g0001-{interrupted['step']:010}.pt"
    resumed = launch.torchrun(script, tmp_path / "broken", PYTHONPATH=tests)
    assert [whole.finish(), resumed.finish()] == [0, 0], resumed.stderr
    (expected,), (found,) = whole.of("end"), resumed.of("end")
    assert found["result"] == expected["result"]
    assert (found["result"]["least"], found["result"]["most"]) == (2, 2)


# Loaders with a state of their own


@pytest.mark.skipif(
    importlib.util.find_spec("torchdata") is None,
    reason="torchdata not found: pip install torchdata",
)
def test_torchdatas_loader_resumes_with_the_state_of_each_rank(tmp_path):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def a_loader():
        return StatefulDataLoader(
            TensorDataset(torch.arange(SAMPLES)),
            batch_sampler=IndexBatches(a_sampler()),
            num_workers=2,
        )

    whole = [batch.tolist() for (batch,) in a_loader()]
    first = a_loader()
    batches = iter(first)
    before = [next(batches)[0].tolist() for _ in range(4)]
    checkpoints = Checkpoints(tmp_path, Runtime(), {"loader": PerRank(first)})
    checkpoints.save(4)
    checkpoints.wait()
    # Let its workers end.
    list(batches)
    second = a_loader()
    Checkpoints(tmp_path, Runtime(), {"loader": PerRank(second)}).restore()
    assert before + [batch.tolist() for (batch,) in second] == whole


def test_index_batches_refuse_a_sampler_that_leaves_a_rank_empty():
    with pytest.raises(UserError, match="a rank would get no sample in the last batch"):
        IndexBatches(a_sampler(4, rank=0, world_size=2))
    IndexBatches(a_sampler(4, rank=0, world_size=2, equal_shares=True))


def test_index_batches_are_a_batch_sampler_of_torchs_loader():
    data = TensorDataset(torch.arange(SAMPLES))
    batches = IndexBatches(a_sampler())
    assert len(batches) == 10
    for _ in range(2):
        seen = [index for (batch,) in DataLoader(data, batch_sampler=batches) for index in batch]
        assert sorted(map(int, seen)) == list(range(SAMPLES))
