"""Assigns each sample to one rank per epoch, for any data set and any world size.

An epoch is a permutation of the samples that depends on the seed and the epoch only. Each global
batch is the next slice of it, split over the ranks as evenly as possible. The last batch may be
short, and a rank may get no sample. The position is counted in samples of the epoch, so a run can
stop anywhere and resume with another number of ranks.

torch's DistributedSampler pads or drops samples instead: with two ranks it counts 153 images as
154. It cannot resume inside an epoch. This module uses numpy, not torch.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ddp_trainer.errors import UserError

# What happens if the size of the global batch would change.
Resize = Literal["refuse", "keep", "change"]


def split(total: int, parts: int, at_least: int = 1) -> list[int]:
    """Return the sizes of `parts` shares of `total`, the larger ones first.

    Shares that are not empty differ by at most one. They have at least `at_least` members, or
    `total` members if that is less.
    """
    used = max(1, min(parts, total // at_least))
    base, extra = divmod(total, used)
    larger = [base + 1] * extra
    smaller = [base] * (used - extra)
    empty = [0] * (parts - used)
    return larger + smaller + empty


@dataclass(frozen=True)
class Shard:
    """One rank's share of one global batch.

    The arrays have shape (k,). Without `equal_shares`, k may be 0.

    - `indices`: the samples of this rank.
    - `positions`: their positions in the global batch.
    - `real`: False for repeats that only make the shares equal.
    - `sizes`: the number of samples of each rank in this batch, without repeats.
    - `start`: the position of the global batch in the epoch, in samples.
    """

    indices: NDArray[np.int64]
    positions: NDArray[np.int64]
    real: NDArray[np.bool_]
    sizes: tuple[int, ...]
    epoch: int
    start: int

    @property
    def batch_size(self) -> int:
        """Number of samples in the global batch, without repeats."""
        return sum(self.sizes)

    def slices(self, size: int) -> list[slice]:
        """Return where parts of at most `size` samples lie in this share, for accumulation.

        All ranks have the same number of parts, at least one. The last ones may be empty.
        """
        longest = max(*self.sizes, len(self.indices), 1)
        return [slice(start, start + size) for start in range(0, longest, size)]

    def split(self, size: int) -> list["Shard"]:
        """Return this share in the parts of `slices`.

        `batch_size` and `sizes` stay those of the whole batch, so the loss of a part has the same
        factor.
        """
        return [
            replace(
                self,
                indices=self.indices[part],
                positions=self.positions[part],
                real=self.real[part],
            )
            for part in self.slices(size)
        ]


@dataclass(eq=False)
class GlobalBatchSampler:
    """Iterates over the shards of an epoch, from the current position to its end.

    - `samples`: size of the data set. `batch_size`: size of the global batch, over all ranks.
    - `epoch` and `offset`, in samples of that epoch, are the position. A shard counts as used when
      it is yielded, so a checkpoint that is written after its step is exact.
    - `at_least`: the minimum number of samples of a batch that a rank gets, if it gets any. If
      fewer are left at the end of an epoch, they join the batch before. A model with BatchNorm
      needs 2, because one value has no variance, and trains better with more.
    - `equal_shares`: all shares of a batch are as long as the longest of a full batch, for
      compilers that need equal shapes. Repeats fill the gaps. The caller leaves them out of the
      loss by `Shard.real`. With `at_least`, the shares of the last batch of an epoch may be longer.
    - `on_resize`: what happens if a checkpoint has another `batch_size`, as after a start with
      another number of ranks. `refuse` raises UserError, `keep` continues with the size of the
      checkpoint, and `change` with that of this run. Rank 0 reports the last two.
    """

    samples: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    _: KW_ONLY
    seed: int = 0
    shuffle: bool = True
    at_least: int = 1
    equal_shares: bool = False
    on_resize: Resize = "refuse"
    epoch: int = field(default=0, init=False)
    offset: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Raise UserError if there are too few samples, or if a batch is too small."""
        if self.samples < self.at_least:
            raise UserError(
                f"too few samples: expected at least {self.at_least}, got {self.samples}",
                is_common=True,
            )
        if self.batch_size < self.at_least:
            raise UserError(
                f"the batch over all processes is too small: expected at least {self.at_least}, "
                f"got {self.batch_size}; use a larger --batch-size",
                is_common=True,
            )
        assert 0 <= self.rank < self.world_size

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`. A position inside that epoch, after a resume, is kept."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.offset = 0

    def __iter__(self) -> Iterator[Shard]:
        order = self._order()
        while self.offset < self.samples:
            start = self.offset
            shard = self._shard(order[start : start + self._next_batch_size()], start)
            self.use(shard)
            yield shard
        self.end_epoch()

    def use(self, shard: Shard) -> None:
        """Count a shard as used: the position is behind it."""
        self.offset = shard.start + shard.batch_size

    def end_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch += 1
        self.offset = 0

    def _order(self) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.samples)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.samples)

    def _next_batch_size(self) -> int:
        """Return the size of the next batch, which takes in a rest that would be too small."""
        remaining = self.samples - self.offset
        if remaining - self.batch_size >= self.at_least:
            return self.batch_size
        return remaining

    def _shard(self, batch: NDArray[np.int64], start: int) -> Shard:
        """Return this rank's share of a global batch that begins at `start`."""
        sizes = split(len(batch), self.world_size, self.at_least)
        first = sum(sizes[: self.rank])
        size = sizes[self.rank]
        positions = np.arange(first, first + size)
        if self.equal_shares:
            # A rank without samples repeats those of the whole batch.
            source = positions if size else np.arange(len(batch))
            positions = np.concatenate([positions, np.resize(source, self._longest(sizes) - size)])
        real = np.arange(len(positions)) < size
        return Shard(batch[positions], positions, real, tuple(sizes), self.epoch, start)

    def _longest(self, sizes: list[int]) -> int:
        """Return the length of all shares with `equal_shares`."""
        full_batch = min(self.batch_size, self.samples)
        full_sizes = split(full_batch, self.world_size, self.at_least)
        return max(full_sizes[0], sizes[0])

    def may_leave_ranks_empty(self) -> bool:
        """Return True if a rank gets no sample of some batch."""
        if self.equal_shares:
            return False
        whole = min(self.batch_size, self.samples)
        rest = self.samples % self.batch_size
        sizes = {whole, rest} if rest >= self.at_least else {whole}
        return any(split(size, self.world_size, self.at_least)[-1] == 0 for size in sizes if size)

    def batches_until(self, epoch: int) -> int:
        """Return the number of global batches from the position to the start of `epoch`."""
        if self.epoch >= epoch:
            return 0
        rest_of_this = self._batches_in(self.samples - self.offset)
        further_epochs = epoch - self.epoch - 1
        return rest_of_this + further_epochs * self._batches_in(self.samples)

    def _batches_in(self, samples: int) -> int:
        whole, rest = divmod(samples, self.batch_size)
        is_own_batch = rest >= self.at_least or 0 < rest == samples
        return whole + is_own_batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the data and order that it belongs to.

        It does not depend on the number of ranks.
        """
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "batch_size": self.batch_size,
            "samples": self.samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Raises UserError if it belongs to other data or another order, or, with `on_resize` refuse,
        to another size of the global batch.
        """
        for name in ("samples", "seed", "shuffle"):
            own = getattr(self, name)
            if state[name] != own:
                raise UserError(
                    f"the checkpoint belongs to a run with {name} {state[name]}, but this run has "
                    f"{own}; use the same data and flags, or another --checkpoint-dir"
                )
        # Checkpoints of version 0.1.0 do not have the size.
        self._resize(int(state.get("batch_size", self.batch_size)))
        self.epoch = int(state["epoch"])
        self.offset = int(state["offset"])

    def _resize(self, saved: int) -> None:
        """Take over or report the size of the global batch in a checkpoint."""
        own = self.batch_size
        if saved == own:
            return
        sizes = f"the checkpoint was made with {saved} samples per step over all ranks"
        if self.on_resize == "refuse":
            raise UserError(
                f"{sizes}, but this run has {own}; use the same size, or say by on_resize whether "
                "it is kept or changes"
            )
        if self.on_resize == "keep":
            self.batch_size = saved
            message = f"{sizes}; this run keeps that, instead of its own {own}"
        else:
            message = f"{sizes}; this run continues with its own {own}"
        if self.rank == 0:
            print(f"ddp-trainer: {message}", file=sys.stderr, flush=True)
