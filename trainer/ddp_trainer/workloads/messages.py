"""Messages between ranks: the operations of torch.distributed, each result checked.

With two ranks, their speed is measured too.

torchrun --standalone --nproc-per-node 4 -m ddp_trainer messages
torchrun --standalone --nproc-per-node 2 -m ddp_trainer messages

Every rank puts `rank + 1` into its tensor, so each result is known in advance. For products the
numbers are 1 and 2.
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
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.progress import Progress

# An operation's name, this rank's result, and the expected result.
Check = tuple[str, Tensor, Tensor]

OPERATIONS: dict[str, tuple[dist.ReduceOp.RedOpType, Callable[[list[int]], int]]] = {
    "SUM": (dist.ReduceOp.SUM, sum),
    "PRODUCT": (dist.ReduceOp.PRODUCT, math.prod),
    "MAX": (dist.ReduceOp.MAX, max),
    "MIN": (dist.ReduceOp.MIN, min),
}

# Messages of each size sent before the timed ones.
WARM_UP = 3

# Bytes of the smallest timed message.
SMALLEST = 1024


def train(options: MessagesOptions, runtime: Runtime) -> None:
    """Run and check each operation once. With two ranks, measure the speed. Every rank calls it.

    Raises UserError if there is only one process, and RuntimeError if a result is wrong.
    """
    if runtime.world_size < 2:
        raise UserError("messages need at least two processes: use torchrun, or add --spawn 4")
    if not runtime.hardware.pairs:
        raise UserError(
            "messages: torch_xla does not support messages between only two ranks; add --device "
            "cpu to use gloo on the same nodes",
            is_common=True,
        )
    progress = Progress(runtime)
    progress.start(workload="messages", epochs=0, steps=0)

    checked = 0
    for check in chain(point_to_point(runtime), collectives(runtime), subgroup(runtime)):
        report(check, progress)
        checked += 1

    result: dict[str, float] = {"checked": checked}
    if runtime.world_size == 2:
        result |= speed(options, progress)
    else:
        runtime.warn(f"speed is measured with two processes only, got {runtime.world_size}")
    progress.end(0, result)


def report(check: Check, progress: Progress) -> None:
    """Report the results of all ranks. Raises RuntimeError if one is wrong. Every rank calls it."""
    runtime = progress.runtime
    name, result, expected = check
    right = all(runtime.gather(torch.equal(result, expected)))
    results = runtime.gather(result.tolist())
    progress.emit("message", name=name, ranks=results, right=right)
    columns = "  ".join(_short(numbers) for numbers in results)
    runtime.warn(f"{name:32} {columns}  {'' if right else 'WRONG'}")
    if not right:
        raise RuntimeError(
            f"{name}: expected {expected.tolist()} on rank {runtime.rank}, got {results} on all"
        )


# --- The operations.


def point_to_point(runtime: Runtime) -> Iterator[Check]:
    """Send from rank 0 to rank 1, blocking and non-blocking, and around a ring of all ranks."""
    expected = _value(runtime, 1) if runtime.rank < 2 else _mine(runtime)

    mine = _mine(runtime)
    if runtime.rank == 0:
        dist.send(mine, dst=1)
    if runtime.rank == 1:
        dist.recv(mine, src=0)
    yield "send, recv: 0 to 1", mine, expected

    mine = _mine(runtime)
    if runtime.rank == 0:
        _wait(dist.isend(mine, dst=1))
    if runtime.rank == 1:
        _wait(dist.irecv(mine, src=0))
    yield "isend, irecv, wait: 0 to 1", mine, expected

    # Send and receive are started as one batch. If every rank began with a blocking send, all of
    # them would wait forever. With NCCL a non-blocking send would not help, because NCCL runs the
    # operations between two ranks in order.
    before = (runtime.rank - 1) % runtime.world_size
    after = (runtime.rank + 1) % runtime.world_size
    received = _mine(runtime)
    ring = [dist.P2POp(dist.isend, _mine(runtime), after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    yield "isend, irecv: a ring", received, _value(runtime, before + 1)


def collectives(runtime: Runtime) -> Iterator[Check]:
    """Run the collectives over all ranks. Rank 0 is the root."""
    mine = _mine(runtime)
    dist.broadcast(mine, src=0)
    yield "broadcast: from 0", mine, _value(runtime, 1)

    yield from reductions(runtime)

    tens = [_value(runtime, 10 * (rank + 1)) for rank in range(runtime.world_size)]
    dist.scatter(mine, tens if runtime.is_main else None, src=0)
    yield "scatter: from 0", mine, tens[runtime.rank]

    everything = _value(runtime, *_numbers(runtime))
    gathered = [torch.zeros_like(mine) for _ in range(runtime.world_size)]
    dist.gather(_mine(runtime), gathered if runtime.is_main else None, dst=0)
    expected = everything if runtime.is_main else torch.zeros_like(everything)
    yield "gather: to 0", torch.cat(gathered), expected

    dist.all_gather(gathered, _mine(runtime))
    yield "all_gather", torch.cat(gathered), everything


def reductions(runtime: Runtime) -> Iterator[Check]:
    """Run all_reduce and reduce with each operation."""
    numbers = dict.fromkeys(OPERATIONS, _numbers(runtime))
    # From 15 ranks on, a factorial is not exact in float32. A product of ones and twos is.
    numbers["PRODUCT"] = [1 + rank % 2 for rank in range(runtime.world_size)]

    for name, (operation, expected) in OPERATIONS.items():
        mine = _value(runtime, numbers[name][runtime.rank])
        dist.all_reduce(mine, op=operation)
        yield f"all_reduce {name}", mine, _value(runtime, expected(numbers[name]))

    for name, (operation, expected) in OPERATIONS.items():
        mine = _value(runtime, numbers[name][runtime.rank])
        dist.reduce(mine, dst=0, op=operation)
        # The result is defined on the destination only, so the other ranks expect what they have.
        result = _value(runtime, expected(numbers[name])) if runtime.is_main else mine
        yield f"reduce {name}: to 0", mine, result


def subgroup(runtime: Runtime) -> Iterator[Check]:
    """Run all_reduce in a group of the even ranks: [0, 2] of four."""
    members = list(range(0, runtime.world_size, 2))
    # Every rank has to call new_group, also a rank outside the group.
    group = dist.new_group(members)
    mine = _mine(runtime)
    expected = _mine(runtime)
    if runtime.rank in members:
        dist.all_reduce(mine, group=group)
        expected = _value(runtime, sum(rank + 1 for rank in members))
        dist.destroy_process_group(group)
    yield f"all_reduce SUM in {members}", mine, expected


# --- Their speed.


def speed(options: MessagesOptions, progress: Progress) -> dict[str, float]:
    """Measure a ping-pong and all_reduce between two ranks for each message size.

    The latency of a message is half a round trip. The bus bandwidth of all_reduce is
    2 (n - 1) / n times size / time, as in NVIDIA's nccl-tests, and can be compared for any number
    of ranks n. Times are medians of `options.repeat` measurements.

    Return the latency of the smallest message in microseconds and the highest bandwidth in GB/s.
    """
    runtime = progress.runtime
    bus_factor = 2 * (runtime.world_size - 1) / runtime.world_size
    runtime.warn("size        send and recv              all_reduce")
    latencies = []
    bandwidths = []
    for size in sizes(options.largest * 2**20):
        data = torch.rand(size // 4, device=runtime.device)
        message = median_seconds(partial(_ping_pong, data, runtime), options.repeat, runtime) / 2
        reduce = median_seconds(partial(dist.all_reduce, data), options.repeat, runtime)
        bandwidth = size / message / 1e9
        bus_bandwidth = size * bus_factor / reduce / 1e9
        latencies.append(message)
        bandwidths.append(bandwidth)
        progress.emit(
            "speed",
            bytes=size,
            message_seconds=message,
            message_gb_per_second=bandwidth,
            all_reduce_seconds=reduce,
            all_reduce_gb_per_second=bus_bandwidth,
        )
        runtime.warn(
            f"{_bytes(size):>8}  {message * 1e6:9.0f} us {bandwidth:6.2f} GB/s  "
            f"{reduce * 1e6:9.0f} us {bus_bandwidth:6.2f} GB/s"
        )
    return {
        "latency_us": round(latencies[0] * 1e6, 1),
        "bandwidth_gb_per_second": round(max(bandwidths), 3),
    }


def sizes(largest: int) -> Iterator[int]:
    """Yield the timed message sizes in bytes: each four times the one before, then `largest`."""
    size = SMALLEST
    while size < largest:
        yield size
        size *= 4
    yield largest


def median_seconds(action: Callable[[], object], repeat: int, runtime: Runtime) -> float:
    """Return the median duration of `action` in seconds, of the slower rank if they differ.

    The ranks begin each measurement together. Every rank calls it.
    """
    seconds = []
    for _ in range(WARM_UP + repeat):
        runtime.barrier()
        began = time.perf_counter()
        action()
        runtime.hardware.wait()
        seconds.append(time.perf_counter() - began)
    median = torch.tensor(statistics.median(seconds[WARM_UP:]), dtype=torch.float64)
    return float(runtime.maximum(median))


def _ping_pong(data: Tensor, runtime: Runtime) -> None:
    peer = 1 - runtime.rank
    if runtime.is_main:
        dist.send(data, peer)
        dist.recv(data, peer)
    else:
        dist.recv(data, peer)
        dist.send(data, peer)


def _wait(work: dist.Work | None) -> None:
    # It is None only on ranks outside the group.
    assert work is not None
    work.wait()


def _numbers(runtime: Runtime) -> list[int]:
    return [rank + 1 for rank in range(runtime.world_size)]


def _mine(runtime: Runtime) -> Tensor:
    return _value(runtime, runtime.rank + 1)


def _value(runtime: Runtime, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=runtime.device)


def _short(numbers: list[float]) -> str:
    return " ".join(f"{number:g}" for number in numbers)


def _bytes(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
