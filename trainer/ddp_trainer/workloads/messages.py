"""Messages between ranks: what torch.distributed can send, each result checked; at two ranks how fast it is.

torchrun --standalone --nproc-per-node 4 -m ddp_trainer messages
torchrun --standalone --nproc-per-node 2 -m ddp_trainer messages

Every rank puts `rank + 1` into its tensor (a one or a two to be multiplied), so that each result is known beforehand.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.cli.options import MessagesOptions
from ddp_trainer.errors import UserError
from ddp_trainer.progress import Progress
from ddp_trainer.runtime import Runtime

Check = tuple[str, Tensor, Tensor]
"""What was sent how, what this rank has now, what it should have."""

OPERATIONS: dict[str, tuple[dist.ReduceOp.RedOpType, Callable[[list[int]], int]]] = {
    "SUM": (dist.ReduceOp.SUM, sum),
    "PRODUCT": (dist.ReduceOp.PRODUCT, math.prod),
    "MAX": (dist.ReduceOp.MAX, max),
    "MIN": (dist.ReduceOp.MIN, min),
}
WARM_UP = 3  # messages of each size that are not timed
SMALLEST = 1024  # bytes


def train(options: MessagesOptions, runtime: Runtime) -> None:
    """Send everything once and check it. Raises UserError alone, RuntimeError where a result is wrong."""
    if runtime.world_size < 2:
        raise UserError(
            "messages need at least two processes: start it with torchrun, or add --spawn 4"
        )
    if not runtime.hardware.pairs:
        raise UserError(
            "torch_xla has no message between two ranks that the others take no part in: add --device cpu, and the "
            "same nodes exchange them by gloo"
        )
    progress = Progress(runtime)
    progress.start(workload="messages", epochs=0, steps=0)
    checked = 0
    for name, has, expected in chain(
        point_to_point(runtime), collectives(runtime), subgroup(runtime)
    ):
        right = all(runtime.gather(torch.equal(has, expected)))
        results = runtime.gather(has.tolist())
        progress.emit("message", name=name, ranks=results, right=right)
        runtime.warn(
            f"{name:32} {'  '.join(_short(result) for result in results)}  {'' if right else 'WRONG'}"
        )
        if not right:
            raise RuntimeError(
                f"{name} gave {results}: rank {runtime.rank} should have {expected.tolist()}"
            )
        checked += 1
    result: dict[str, float] = {"checked": checked}
    if runtime.world_size == 2:
        result |= speed(options, progress)
    else:
        runtime.warn("speed is measured between two processes, and here are more")
    progress.end(0, result)


def point_to_point(runtime: Runtime) -> Iterator[Check]:
    """From rank 0 to rank 1, blocking and not; then round the ring of all ranks."""
    for name in ("send, recv", "isend, irecv, wait"):
        mine = _mine(runtime)
        match runtime.rank, name:
            case 0, "send, recv":
                dist.send(mine, dst=1)
            case 1, "send, recv":
                dist.recv(mine, src=0)
            case 0, _:
                _wait(dist.isend(mine, dst=1))
            case 1, _:
                _wait(dist.irecv(mine, src=0))
        yield f"{name}: 0 to 1", mine, _value(runtime, 1 if runtime.rank < 2 else runtime.rank + 1)

    before, after = (runtime.rank - 1) % runtime.world_size, (runtime.rank + 1) % runtime.world_size
    received = _mine(runtime)
    # Both posted as one batch, then waited for: ranks that all began with a send would wait for each other for ever, with
    # NCCL even without blocking, since its sends and receives between two ranks are done in their order.
    ring = [dist.P2POp(dist.isend, _mine(runtime), after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    yield "isend, irecv: a ring", received, _value(runtime, before + 1)


def collectives(runtime: Runtime) -> Iterator[Check]:
    """All of them over all ranks, from and to rank 0 where there is a root."""
    everybody = [rank + 1 for rank in range(runtime.world_size)]
    # Factorials are not exact in float32 from 15 ranks on; ones and twos are.
    factors = [1 + rank % 2 for rank in range(runtime.world_size)]

    mine = _mine(runtime)
    dist.broadcast(mine, src=0)
    yield "broadcast: from 0", mine, _value(runtime, 1)

    for name, (operation, expected) in OPERATIONS.items():
        numbers = factors if name == "PRODUCT" else everybody
        mine = _value(runtime, numbers[runtime.rank])
        dist.all_reduce(mine, op=operation)
        yield f"all_reduce {name}", mine, _value(runtime, expected(numbers))

    for name, (operation, expected) in OPERATIONS.items():
        numbers = factors if name == "PRODUCT" else everybody
        mine = _value(runtime, numbers[runtime.rank])
        dist.reduce(mine, dst=0, op=operation)
        # What the other ranks hold afterwards is not defined.
        yield (
            f"reduce {name}: to 0",
            mine,
            _value(runtime, expected(numbers)) if runtime.is_main else mine,
        )

    mine = _mine(runtime)
    parts = [_value(runtime, 10 * (rank + 1)) for rank in range(runtime.world_size)]
    dist.scatter(mine, parts if runtime.is_main else None, src=0)
    yield "scatter: from 0", mine, _value(runtime, 10 * (runtime.rank + 1))

    all_of_them = _value(runtime, *everybody)
    gathered = [torch.zeros_like(mine) for _ in everybody]
    dist.gather(_mine(runtime), gathered if runtime.is_main else None, dst=0)
    yield (
        "gather: to 0",
        torch.cat(gathered),
        all_of_them if runtime.is_main else torch.zeros_like(all_of_them),
    )

    dist.all_gather(gathered, _mine(runtime))
    yield "all_gather", torch.cat(gathered), all_of_them


def subgroup(runtime: Runtime) -> Iterator[Check]:
    """The even ranks among themselves: [0, 2] of four."""
    members = list(range(0, runtime.world_size, 2))
    group = dist.new_group(members)  # every rank calls this, members or not
    mine, expected = _mine(runtime), _mine(runtime)
    if runtime.rank in members:
        dist.all_reduce(mine, group=group)
        expected = _value(runtime, sum(rank + 1 for rank in members))
        dist.destroy_process_group(group)
    yield f"all_reduce SUM in {members}", mine, expected


def speed(options: MessagesOptions, progress: Progress) -> dict[str, float]:
    """Measure between two ranks, per size: a ping-pong, and all_reduce.

    Latency of a message is half a round trip. Bus bandwidth of all_reduce is 2 (n - 1) / n times size / time, as in
    NVIDIA's nccl-tests, which makes it comparable for any number of ranks n. Medians of `options.repeat`.
    """
    runtime = progress.runtime
    runtime.warn("size        send and recv              all_reduce")
    fastest, smallest = 0.0, 0.0
    for size in sizes(options.largest * 2**20):
        data = torch.rand(size // 4, device=runtime.device)
        message = _median(partial(_ping_pong, data, runtime), options.repeat, runtime) / 2
        reduce = _median(partial(dist.all_reduce, data), options.repeat, runtime)
        bandwidth, bus = (
            size / message / 1e9,
            size * 2 * (runtime.world_size - 1) / runtime.world_size / reduce / 1e9,
        )
        progress.emit(
            "speed",
            bytes=size,
            message_seconds=message,
            message_gb_per_second=bandwidth,
            all_reduce_seconds=reduce,
            all_reduce_gb_per_second=bus,
        )
        runtime.warn(
            f"{_bytes(size):>8}  {message * 1e6:9.0f} us {bandwidth:6.2f} GB/s  {reduce * 1e6:9.0f} us {bus:6.2f} GB/s"
        )
        smallest, fastest = smallest or message, max(fastest, bandwidth)
    return {"latency_us": round(smallest * 1e6, 1), "bandwidth_gb_per_second": round(fastest, 3)}


def sizes(largest: int) -> Iterator[int]:
    """Bytes of the messages that are timed: each four times the one before, and the largest."""
    size = SMALLEST
    while size < largest:
        yield size
        size *= 4
    yield largest


def _ping_pong(data: Tensor, runtime: Runtime) -> None:
    there, back = (dist.send, dist.recv) if runtime.is_main else (dist.recv, dist.send)
    there(data, 1 - runtime.rank)
    back(data, 1 - runtime.rank)


def _median(action: Callable[[], object], repeat: int, runtime: Runtime) -> float:
    """Median seconds of `action`, which both ranks begin together; the slower rank's where they differ."""
    seconds = []
    for _ in range(WARM_UP + repeat):
        runtime.barrier()
        began = time.perf_counter()
        action()
        runtime.hardware.wait()
        seconds.append(time.perf_counter() - began)
    return float(
        runtime.maximum(torch.tensor(statistics.median(seconds[WARM_UP:]), dtype=torch.float64))
    )


def _wait(work: dist.Work | None) -> None:
    assert work is not None  # None is for ranks outside the group
    work.wait()


def _mine(runtime: Runtime) -> Tensor:
    return _value(runtime, runtime.rank + 1)


def _value(runtime: Runtime, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=runtime.device)


def _short(numbers: list[float]) -> str:
    return " ".join(f"{number:g}" for number in numbers)


def _bytes(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
