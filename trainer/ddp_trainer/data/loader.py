"""torch's DataLoader over the shards of a sampler, with worker processes and an exact position.

DataLoader fetches batches ahead of the training. So the position of the sampler counts a batch when
the training gets it, and not when it is fetched.
"""

import os
import random
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from ddp_trainer.data.sampler import GlobalBatchSampler, Shard
from ddp_trainer.errors import UserError
from ddp_trainer.ranks import generators

# Arguments of DataLoader replaced by the sampler.
DECIDED = ("batch_size", "shuffle", "batch_sampler", "drop_last", "generator", "in_order")

# A sample of the data set: its epoch and its index.
Key = tuple[int, int]

# The constants of SplitMix64: the increment for each number, and its (shift, factor) pairs.
SPLITMIX_STEP = np.uint64(0x9E3779B97F4A7C15)
SPLITMIX_ROUNDS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
SPLITMIX_LAST_SHIFT = np.uint64(31)


class ShardLoader:
    """Iterates over (shard, batch) from the sampler's position to the end of its epoch.

    `batch` is the result of `collate_fn` for this rank's samples. A rank without samples gets a
    batch of tensors without rows, to take part in the step.

    - `dataset`: anything with `__getitem__` for an index. `settings` are those of DataLoader, such
      as `num_workers`, `collate_fn` and `pin_memory`.
    - `seed`: random numbers of a sample, such as those of an augmentation, depend only on this
      seed, the epoch and the index. So they do not change with the number of workers or ranks, or
      after a resume. It holds for the generators of torch (on the CPU), numpy and random. If the
      data set has `__getitems__`, they depend on the first index of the batch instead. This costs
      about 10 µs for each sample in batches of 64, most of it for the seeding.

    Save the sampler in the checkpoint. A batch counts as used when it is yielded, so a checkpoint
    after its step is exact.

    Raises UserError for an IterableDataset, and ValueError for settings decided by the sampler.
    """

    def __init__(
        self, dataset: Any, sampler: GlobalBatchSampler, *, seed: int = 0, **settings: Any
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise UserError(
                "an IterableDataset has no indices, so its samples cannot be assigned to ranks; "
                "use a data set with __getitem__, or see docs/library.md for streams",
                is_common=True,
            )
        decided = [name for name in DECIDED if name in settings]
        if decided:
            raise ValueError(f"{decided[0]}: must not be given, because the sampler decides it")
        if len(dataset) != sampler.samples:
            raise ValueError(
                f"the sampler is for {sampler.samples} samples, but the data set has {len(dataset)}"
            )
        self.sampler = sampler
        self._fetched: deque[Shard] = deque()
        collate = settings.pop("collate_fn", None) or default_collate
        init_worker = settings.pop("worker_init_fn", None)
        self._loader = DataLoader(
            SeededDataset(dataset, seed),
            batch_sampler=Keys(sampler, self._fetched),
            collate_fn=partial(collate_or_empty, collate),
            worker_init_fn=partial(leave_process_group, init_worker),
            # By default the loader draws from the training's own generator.
            generator=torch.Generator().manual_seed(seed),
            **settings,
        )

    def __iter__(self) -> Iterator[tuple[Shard, Any]]:
        self._fetched.clear()
        for batch in self._loader:
            shard = self._fetched.popleft()
            self.sampler.use(shard)
            yield shard, batch
        self.sampler.end_epoch()

    def __len__(self) -> int:
        """Return the number of batches left in the epoch."""
        return self.sampler.batches_until(self.sampler.epoch + 1)


class Keys:
    """The samples of the batches to fetch, from the sampler's position on.

    It notes each shard in `fetched`. The sampler itself does not move.
    """

    def __init__(self, sampler: GlobalBatchSampler, fetched: deque[Shard]) -> None:
        self._sampler = sampler
        self._fetched = fetched

    def __iter__(self) -> Iterator[list[Key]]:
        self._sampler.prepare()
        for shard in copy(self._sampler):
            self._fetched.append(shard)
            yield [(shard.epoch, index) for index in shard.indices.tolist()]


class IndexBatches:
    """The indices of this rank's shards, for a loader that keeps its own position.

    It is a `batch_sampler`, for example of torchdata's StatefulDataLoader. The sampler itself does
    not move: call its `set_epoch` before each epoch. Such a loader has another state on each rank,
    and resumes only with the same number of ranks (`PerRank` in `Checkpoints`).

    Raises UserError if a rank could get a batch without samples. Such loaders cannot make one.
    """

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        if sampler.may_leave_ranks_empty():
            raise UserError(
                "a rank would get no sample in the last batch of an epoch; use equal_shares=True "
                "of the sampler, whose repeats fill the gaps, or ShardLoader",
                is_common=True,
            )
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        for shard in copy(self._sampler):
            yield shard.indices.tolist()

    def __len__(self) -> int:
        return self._sampler.batches_until(self._sampler.epoch + 1)


@dataclass(frozen=True)
class NoSamples:
    """A batch of a rank without samples. `sample` shows what samples look like."""

    sample: Any


class SeededDataset(Dataset[Any]):
    """A data set with random numbers fixed by the seed, the epoch and the index."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitems__(self, keys: Sequence[Key]) -> list[Any] | NoSamples:
        """Return the samples of a batch. All keys have the same epoch."""
        seeds = sample_seeds(self._seed, keys or [(0, 0)])
        # Saving the generators takes longer than seeding them, so it is done once for each batch.
        with generators_kept():
            if not keys:
                return NoSamples(self._sample(0, seeds[0]))
            fetch_all = getattr(self._dataset, "__getitems__", None)
            if fetch_all is None:
                indices = (index for _, index in keys)
                return [self._sample(*pair) for pair in zip(indices, seeds, strict=True)]
            seed_generators(seeds[0])
            return list(fetch_all([index for _, index in keys]))

    def _sample(self, index: int, seed: int) -> Any:
        seed_generators(seed)
        return self._dataset[index]


def sample_seeds(seed: int, keys: Sequence[Key]) -> list[int]:
    """Return a seed of 64 bits for each key. All keys have the same epoch.

    They are the numbers of SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number
    Generators, 2014) at the indices. Its start depends on `seed` and the epoch. One SeedSequence
    for each sample would take longer than the rest.
    """
    start = _start_of(seed, keys[0][0])
    bits = start + np.array([index + 1 for _, index in keys], np.uint64) * SPLITMIX_STEP
    for shift, factor in SPLITMIX_ROUNDS:
        bits = (bits ^ (bits >> shift)) * factor
    seeds: list[int] = (bits ^ (bits >> SPLITMIX_LAST_SHIFT)).tolist()
    return seeds


@lru_cache(maxsize=8)
def _start_of(seed: int, epoch: int) -> np.uint64:
    """Return where the numbers of an epoch begin. It takes as long as the rest of a batch."""
    return np.uint64(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])


def seed_generators(seed: int) -> None:
    """Seed the generators of torch on the CPU, numpy and random with a number of 64 bits."""
    # torch and numpy use 32 bits each, and the same algorithm. Other bits give other numbers.
    torch.default_generator.manual_seed(seed >> 32)
    generators.seed_all(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """In the main process, restore the generators at the end. A worker has generators of its own.

    The training draws from the same ones, and its numbers are part of the checkpoints.
    """
    if get_worker_info() is not None:
        yield
        return
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    restore_numpy = generators.remember_numpy()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        restore_numpy()


def collate_or_empty(collate: Callable[[list[Any]], Any], samples: list[Any] | NoSamples) -> Any:
    """Return a batch of the samples, or one like it without rows.

    Raises UserError if a batch of this form cannot be made empty.
    """
    if not isinstance(samples, NoSamples):
        return collate(samples)
    batch = collate([samples.sample])
    emptied: list[Any] = []
    empty = _without_rows(batch, emptied)
    if not emptied:
        raise UserError(
            f"a rank has no sample of a batch, and a batch of type {type(batch).__name__} cannot "
            "be made empty; use equal_shares=True of the sampler, or a collate_fn that returns "
            "tensors, lists or dicts"
        )
    return empty


def _without_rows(batch: Any, emptied: list[Any]) -> Any:
    """Return a batch like this one without rows. Its original tensors are added to `emptied`."""
    if isinstance(batch, Tensor | np.ndarray) and batch.ndim:
        emptied.append(batch)
        return batch[:0]
    if isinstance(batch, MutableMapping):
        # It may be a class of its own, such as Hugging Face's BatchEncoding.
        empty = copy(batch)
        for name, value in batch.items():
            empty[name] = _without_rows(value, emptied)
        return empty
    if isinstance(batch, list | tuple):
        values = [_without_rows(value, emptied) for value in batch]
        is_named = hasattr(batch, "_fields")
        return type(batch)(*values) if is_named else type(batch)(values)
    return batch


def leave_process_group(init_worker: Callable[[int], None] | None, worker: int) -> None:
    """Set up a worker process: signals for the group of the rank's process must not reach it.

    torchrun sends SIGTERM to the whole group. If the workers of a rank ended, it could not finish
    its step and save a checkpoint. If the rank itself ends, DataLoader's workers notice.
    """
    os.setpgid(0, 0)
    if init_worker:
        init_worker(worker)
