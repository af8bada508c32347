"""Which samples each rank takes: every sample exactly once per epoch, at any size of the data and of the world.

An epoch is a permutation of the samples, fixed by seed and epoch alone. Each global batch is the next slice of it, split
over the ranks as evenly as it goes; the last batch may be short and a rank may get nothing. As the position is counted
in samples of the epoch, a run can stop anywhere and go on with another number of ranks. (torch's DistributedSampler
pads or drops: 153 images count as 154 on two ranks, and it cannot resume inside an epoch.) Knows numpy, not torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_trainer.errors import UserError


def split(total: int, parts: int, at_least: int = 1) -> list[int]:
    """Sizes of `parts` shares of `total`, the larger ones first.

    Shares that are not empty differ by at most one and have `at_least` members, or `total` where that is less.
    """
    used = max(1, min(parts, total // at_least))
    base, extra = divmod(total, used)
    return [base + (part < extra) for part in range(used)] + [0] * (parts - used)


@dataclass(frozen=True)
class Shard:
    """One rank's share of one global batch. Arrays are of shape (k,); without `equal_shares` k may be 0."""

    indices: NDArray[np.int64]  # samples of this rank
    positions: NDArray[np.int64]  # where in the global batch they are
    real: NDArray[np.bool_]  # False for the repeats that only make the shares equal
    sizes: tuple[int, ...]  # number of samples of each rank in this batch, without repeats
    epoch: int
    start: int  # where in the epoch the global batch begins

    @property
    def batch_size(self) -> int:
        """Samples in the global batch, without repeats."""
        return sum(self.sizes)


class GlobalBatchSampler:
    """Iterate over the shards of an epoch, from the current position to its end; then the next epoch begins.

    `samples`: size of the data set. `batch_size`: of the global batch, over all ranks. `epoch` and `offset` (samples of
    this epoch already given out) are the position; a shard counts as given out as soon as it is yielded, so a
    checkpoint written after its step is exact.

    `at_least`: a rank's share has so many samples or none, and a smaller rest of the epoch joins the batch before it.
    A model with BatchNorm needs 2, as one value has no variance, and is better off with more.

    `equal_shares`: all shares of a batch are as long as the longest of a full batch, for compilers that want equal shapes. What
    is missing is filled up with repeats, which whoever trains leaves out of the loss by `Shard.real`. (With `at_least` the
    shares of an epoch's last batch may be longer.)
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        seed: int = 0,
        shuffle: bool = True,
        at_least: int = 1,
        equal_shares: bool = False,
    ) -> None:
        if samples < at_least:
            raise UserError(
                f"{samples} samples are too few to train on: this needs at least {at_least}"
            )
        if batch_size < at_least:
            raise UserError(
                f"a batch of {batch_size} over all processes is too small: this needs at least {at_least}"
            )
        assert 0 <= rank < world_size
        self.samples, self.batch_size = samples, batch_size
        self.rank, self.world_size = rank, world_size
        self.seed, self.shuffle, self.at_least = seed, shuffle, at_least
        self.equal_shares = equal_shares
        self.epoch = 0
        self.offset = 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; inside that epoch already (after a resume), the position stays."""
        if epoch != self.epoch:
            self.epoch, self.offset = epoch, 0

    def __iter__(self) -> Iterator[Shard]:
        order = self._order()
        full = split(min(self.batch_size, self.samples), self.world_size, self.at_least)[0]
        while self.offset < self.samples:
            start = self.offset
            rest = self.samples - start
            batch = order[
                start : start
                + (self.batch_size if rest - self.batch_size >= self.at_least else rest)
            ]
            sizes = split(len(batch), self.world_size, self.at_least)
            first, size = sum(sizes[: self.rank]), sizes[self.rank]
            positions = np.arange(first, first + size)
            if self.equal_shares:
                repeats = np.resize(
                    positions if size else np.arange(len(batch)), max(full, sizes[0]) - size
                )
                positions = np.concatenate([positions, repeats])
            real = np.arange(len(positions)) < size
            self.offset += len(batch)
            yield Shard(batch[positions], positions, real, tuple(sizes), self.epoch, start)
        self.epoch, self.offset = self.epoch + 1, 0

    def _order(self) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.samples)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.samples)

    def batches_until(self, epoch: int) -> int:
        """Number of global batches from the position to the start of `epoch`."""
        if self.epoch >= epoch:
            return 0
        return self._batches_of(self.samples - self.offset) + (
            epoch - self.epoch - 1
        ) * self._batches_of(self.samples)

    def _batches_of(self, samples: int) -> int:
        whole, rest = divmod(samples, self.batch_size)
        return whole + (rest >= self.at_least or 0 < rest == samples)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in. It says nothing of ranks: any number of them can go on."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "samples": self.samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises UserError when it belongs to other data or another order."""
        for name in ("samples", "seed", "shuffle"):
            mine = getattr(self, name)
            if state[name] != mine:
                raise UserError(
                    f"the checkpoint belongs to a run with {name} {state[name]}, this run has {mine}: "
                    "use the same data and flags, or another --checkpoint-dir"
                )
        self.epoch, self.offset = int(state["epoch"]), int(state["offset"])
