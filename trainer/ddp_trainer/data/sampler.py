"""Assigns each sample to one rank per epoch, for any data set and any world size.

An epoch is a permutation of the samples, or another order. It depends on the seed and the epoch
only. Each global batch is the next slice of it, split over the ranks as evenly as possible. The
last batch may be short, and a rank may get no sample. The position is counted in samples of the
epoch, so a run can stop anywhere and resume with another number of ranks.

torch's DistributedSampler pads or drops samples instead: with two ranks it counts 153 images as
154. It cannot resume inside an epoch. This module uses numpy, not torch.
"""

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ddp_trainer.errors import UserError

# What happens if the size of the global batch would change.
Resize = Literal["refuse", "keep", "change"]

# Makes the order of an epoch from its number and a generator of random numbers: an array of
# indices, or the global batches, each an array of indices.
Order = Callable[[int, np.random.Generator], Sequence[Any] | NDArray[np.int64]]


def split(total: int, parts: int, at_least: int = 1) -> list[int]:
    """Return the sizes of `parts` shares of `total`, the larger ones first.

    The sizes of non-empty shares differ by at most one, and are at least `at_least`, or `total` if
    it is less.
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
    - `real`: False for repeats, added only to make the shares equal.
    - `sizes`: the number of samples of each rank in this batch, without repeats.
    - `start`: the position of the global batch in the epoch, in samples.
    - `at_least`: the minimum number of samples of a share, and of its parts.
    """

    indices: NDArray[np.int64]
    positions: NDArray[np.int64]
    real: NDArray[np.bool_]
    sizes: tuple[int, ...]
    epoch: int
    start: int
    at_least: int = 1

    @property
    def batch_size(self) -> int:
        """Number of samples in the global batch, without repeats."""
        return sum(self.sizes)

    def slices(self, size: int) -> list[slice]:
        """Return where parts of at most `size` samples lie in this share, for accumulation.

        All ranks have the same number of parts, at least one. Some may be empty. The others differ
        by at most one sample. They have at least `at_least` samples, for BatchNorm, or the whole
        share if it is smaller. For this, a part may be larger than `size`.
        """
        own = len(self.indices)
        parts = -(-max(*self.sizes, own, 1) // size)
        ends = np.cumsum(split(own, parts, self.at_least)).tolist()
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

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


@dataclass(frozen=True)
class EpochOrder:
    """The samples of an epoch in their order.

    - `indices`: shape (n,).
    - `ends`: where the global batches end, if the order has batches of its own; else None.
    """

    indices: NDArray[np.int64]
    ends: NDArray[np.int64] | None = None

    @classmethod
    def read(cls, found: Any, samples: int, at_least: int) -> "EpochOrder":
        """Read the result of an order function. Raises UserError if it cannot be used."""
        is_batches = len(found) > 0 and np.ndim(found[0]) > 0
        batches = [np.asarray(batch) for batch in found] if is_batches else [np.asarray(found)]
        if min(len(batch) for batch in batches) < at_least:
            what = "a batch" if is_batches else "an epoch"
            raise UserError(f"the order has {what} of fewer than {at_least} samples")
        indices = np.concatenate(batches)
        if indices.dtype.kind not in "iu" or indices.min() < 0 or indices.max() >= samples:
            raise UserError(f"the order must have integers from 0 to {samples - 1}")
        ends = np.cumsum([len(batch) for batch in batches]) if is_batches else None
        return cls(indices.astype(np.int64), ends)

    @cached_property
    def fingerprint(self) -> int:
        """Return a checksum. Another order has the same one only by chance."""
        ends = b"" if self.ends is None else self.ends.tobytes()
        return zlib.crc32(ends, zlib.crc32(self.indices.tobytes()))


@dataclass(eq=False)
class GlobalBatchSampler:
    """Iterates over the shards of an epoch, from the current position to its end.

    - `samples`: size of the data set. `batch_size`: size of the global batch, over all ranks.
    - `epoch` and `offset`, in samples of this epoch, are the position. A shard counts as used when
      it is yielded, so a checkpoint after its step is exact.
    - `at_least`: the minimum size of a rank's share of a batch, unless the share is empty. If fewer
      samples are left at the end of an epoch, they join the batch before. A model with BatchNorm
      needs 2, because one value has no variance, and trains better with more.
    - `equal_shares`: all shares of a batch are as long as the longest of a full batch, because some
      compilers need equal shapes. Repeats fill the gaps. The caller leaves them out of the loss by
      `Shard.real`. With `at_least`, the shares of the last batch of an epoch may be longer.
    - `order`: an order of your own, such as one with weights, or with batches of similar lengths.
      The function gets the epoch and a generator of random numbers. Its result may depend on
      nothing else. It returns an array of indices, of any length and also with repeats, or a
      sequence of such arrays, one for each global batch. `shuffle` has no effect with it.
    - `drop_last`: leave out the last batch of an epoch if it is not full.
    - `on_resize`: what happens if a checkpoint has another `batch_size`, as after a start with
      another number of ranks. `refuse` raises UserError, `keep` continues with the size of the
      checkpoint, and `change` with the size of this run. Rank 0 reports the last two.
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
    order: Order | None = None
    drop_last: bool = False
    on_resize: Resize = "refuse"
    epoch: int = field(default=0, init=False)
    offset: int = field(default=0, init=False)
    # The last order made by the function `order`, with its epoch.
    _made: tuple[int, EpochOrder] | None = field(default=None, init=False, repr=False)
    # The last epoch iterated over to its end.
    _ended: int = field(default=-1, init=False, repr=False)

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
                f"got {self.batch_size}; use a larger batch",
                is_common=True,
            )
        if self.order is None:
            self._require_a_batch(self.samples)
        assert 0 <= self.rank < self.world_size

    def _require_a_batch(self, samples: int) -> None:
        """Raise UserError if drop_last would leave nothing of an epoch of so many samples."""
        if self.drop_last and samples < self.batch_size:
            raise UserError(
                f"drop_last leaves no batch of an epoch: expected at least {self.batch_size} "
                f"samples, got {samples}; use a smaller batch",
                is_common=True,
            )

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`. A position inside this epoch, after a resume, is kept."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.offset = 0
            self._ended = -1

    def __iter__(self) -> Iterator[Shard]:
        order = self._order()
        self._ended = -1
        while size := self._next_batch_size(order):
            shard = self._shard(order, size)
            self.use(shard)
            yield shard
        self.end_epoch()

    def use(self, shard: Shard) -> None:
        """Count a shard as used: the position is behind it.

        Iterating does this. If something fetches shards ahead of the training, call it for each
        shard when the training gets it.
        """
        has_ended = shard.epoch == self._ended
        self.epoch = shard.epoch
        self.offset = shard.start + shard.batch_size
        # A loader has fetched ahead and ended the epoch already. It will not do it again.
        if has_ended and not self._next_batch_size(self._order()):
            self.end_epoch()

    def end_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self._ended = self.epoch
        self.epoch += 1
        self.offset = 0

    def _order(self, epoch: int | None = None) -> EpochOrder:
        """Return the order of an epoch, by default the current one."""
        epoch = self.epoch if epoch is None else epoch
        if self.order is None:
            if not self.shuffle:
                return EpochOrder(np.arange(self.samples))
            return EpochOrder(self._generator(epoch).permutation(self.samples))
        if self._made is None or self._made[0] != epoch:
            made = self._make(self.order, epoch)
            if self._made is None:
                self._require_equal(made, self._make(self.order, epoch))
            self._made = epoch, made
        return self._made[1]

    def _generator(self, epoch: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, epoch])

    def _make(self, order: Order, epoch: int) -> EpochOrder:
        """Call a function for an epoch. Raises UserError if its result cannot be used."""
        found = EpochOrder.read(order(epoch, self._generator(epoch)), self.samples, self.at_least)
        if found.ends is not None and self.drop_last:
            raise UserError("drop_last has no effect on an order of batches; remove it")
        self._require_a_batch(len(found.indices))
        return found

    def prepare(self) -> None:
        """Make the order of the epoch. Later copies of this sampler then have it too."""
        self._order()

    def _require_equal(self, made: EpochOrder, again: EpochOrder) -> None:
        """Raise UserError if a function has made two different orders of an epoch.

        Otherwise each rank would have another one, and several would train on the same samples.
        """
        if made.fingerprint != again.fingerprint:
            raise UserError(
                "the order function made two different orders of one epoch; it may draw random "
                "numbers only from the generator that it gets",
                is_common=True,
            )

    def _next_batch_size(self, order: EpochOrder) -> int:
        """Return the size of the batch at the position, or 0 at the end of the epoch.

        A rest too small for a batch of its own joins the last one.
        """
        if order.ends is not None:
            following = order.ends[np.searchsorted(order.ends, self.offset, "right") :]
            return int(following[0]) - self.offset if len(following) else 0
        remaining = len(order.indices) - self.offset
        if remaining - self.batch_size >= (0 if self.drop_last else self.at_least):
            return self.batch_size
        return 0 if self.drop_last else remaining

    def _shard(self, order: EpochOrder, batch_size: int) -> Shard:
        """Return this rank's share of the global batch at the position."""
        batch = order.indices[self.offset : self.offset + batch_size]
        sizes = split(batch_size, self.world_size, self.at_least)
        first = sum(sizes[: self.rank])
        size = sizes[self.rank]
        positions = np.arange(first, first + size)
        if self.equal_shares:
            # A rank without samples repeats those of the whole batch.
            source = positions if size else np.arange(batch_size)
            longest = self._longest(order, sizes)
            positions = np.concatenate([positions, np.resize(source, longest - size)])
        real = np.arange(len(positions)) < size
        return Shard(
            batch[positions],
            positions,
            real,
            tuple(sizes),
            self.epoch,
            self.offset,
            self.at_least,
        )

    def _longest(self, order: EpochOrder, sizes: list[int]) -> int:
        """Return the length of all shares with `equal_shares`."""
        if order.ends is not None:
            return sizes[0]
        full_batch = min(self.batch_size, len(order.indices))
        full_sizes = split(full_batch, self.world_size, self.at_least)
        return max(full_sizes[0], sizes[0])

    def may_leave_ranks_empty(self) -> bool:
        """Return True if a rank may get no sample of some batch."""
        if self.equal_shares:
            return False
        if self.order and not self.drop_last:
            # The last batch of an epoch, or a batch of the order's own, may be of any size.
            return self.world_size > 1
        whole = min(self.batch_size, self.samples)
        rest = self.samples % self.batch_size
        sizes = {whole, rest} if rest >= self.at_least and not self.drop_last else {whole}
        return any(split(size, self.world_size, self.at_least)[-1] == 0 for size in sizes if size)

    def batches_until(self, epoch: int) -> int:
        """Return the number of global batches from the position to the start of `epoch`.

        If there is an `order`, it is called for each of these epochs.
        """
        if self.epoch >= epoch:
            return 0
        further_epochs = range(self.epoch + 1, epoch)
        if self.order is None:
            rest_of_this = self._batches_in(self.samples - self.offset)
            return rest_of_this + len(further_epochs) * self._batches_in(self.samples)
        return sum(
            self._batches_left(self._order(number), self.offset if number == self.epoch else 0)
            for number in (*further_epochs, self.epoch)
        )

    def _batches_left(self, order: EpochOrder, offset: int) -> int:
        if order.ends is None:
            return self._batches_in(len(order.indices) - offset)
        return int((order.ends > offset).sum())

    def _batches_in(self, samples: int) -> int:
        whole, rest = divmod(samples, self.batch_size)
        if self.drop_last:
            return whole
        is_own_batch = rest >= self.at_least or 0 < rest == samples
        return whole + is_own_batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with the properties of its data and order.

        It does not depend on the number of ranks.
        """
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "batch_size": self.batch_size,
            "samples": self.samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            **self._state_of_order(),
        }

    def _state_of_order(self) -> dict[str, int]:
        """Return the checksum of the order, to compare it after a resume inside an epoch."""
        # At the start of an epoch any order is right, and there may be none after the last epoch.
        return {"order": self._order().fingerprint} if self.order and self.offset else {}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise UserError if `load_state_dict` would. The position stays."""
        for name in ("samples", "seed", "shuffle"):
            own = getattr(self, name)
            if state[name] != own:
                raise UserError(
                    f"the checkpoint belongs to a run with {name} {state[name]}, but this run has "
                    f"{own}; use the same data and settings, or another folder of checkpoints"
                )
        if self.on_resize == "refuse" and _batch_size_in(state, self.batch_size) != self.batch_size:
            raise UserError(
                f"{self._sizes(state)}, but this run has {self.batch_size}; use the same size, or "
                "say by on_resize whether it is kept or changes"
            )
        epoch, offset = int(state["epoch"]), int(state["offset"])
        own_order = self._order(epoch).fingerprint if self.order and offset else None
        if offset and state.get("order") != own_order:
            raise UserError(
                f"the checkpoint was made inside epoch {epoch}, whose order was another one; "
                "use the same order function, which may depend on nothing but its arguments, or "
                "another folder of checkpoints"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Raises UserError if it belongs to other data or another order, or, with `on_resize` refuse,
        to another size of the global batch. The position then stays.
        """
        self.check_state_dict(state)
        self._resize(state)
        self._ended = -1
        self.epoch = int(state["epoch"])
        self.offset = int(state["offset"])

    def _resize(self, state: Mapping[str, Any]) -> None:
        """Take over or report the size of the global batch in a checkpoint."""
        own = self.batch_size
        saved = _batch_size_in(state, own)
        if saved == own:
            return
        if self.on_resize == "keep":
            self.batch_size = saved
            message = f"{self._sizes(state)}; this run keeps that, instead of its own {own}"
        else:
            message = f"{self._sizes(state)}; this run continues with its own {own}"
        if self.rank == 0:
            print(f"ddp-trainer: {message}", file=sys.stderr, flush=True)

    def _sizes(self, state: Mapping[str, Any]) -> str:
        size = _batch_size_in(state, self.batch_size)
        return f"the checkpoint was made with {size} samples per step over all ranks"


def _batch_size_in(state: Mapping[str, Any], own: int) -> int:
    """Return the size of the global batch in a checkpoint. Those of version 0.1.0 have none."""
    return int(state.get("batch_size", own))
