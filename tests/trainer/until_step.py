"""A training loop that ends at a step, as the tests of resumes have it."""

from collections.abc import Callable, Iterable

from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.data.sampler import Shard


def train_until(
    last_step: int,
    checkpoints: Checkpoints,
    sampler: Iterable[Shard],
    train_step: Callable[[Shard], None],
) -> None:
    """Train from the newest checkpoint to `last_step`, and save a checkpoint there."""
    step = checkpoints.restore()
    while step < last_step:
        for shard in sampler:
            train_step(shard)
            step += 1
            if step == last_step:
                break
    checkpoints.save(step)
    checkpoints.wait()
