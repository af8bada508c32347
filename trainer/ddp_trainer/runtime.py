"""The process and its peers: rank, device, process group, and the few collectives that the other modules use.

The same calls work for a process alone, under `torchrun --standalone`, and in a container: alone there is no process group
and every collective returns its argument.
"""

import inspect
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.errors import UserError
from ddp_trainer.ledger import Ledger, SlowRankError
from ddp_trainer.sampler import Shard

T = TypeVar("T")

_TIMED_OUT = re.compile(r"timed out|timeout caused pair closure", re.IGNORECASE)  # what gloo says
JOIN_TIMEOUT = timedelta(minutes=30)
_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Runtime:
    """One process of a training job. `seconds` holds what the start cost: import, rendezvous."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    ledger: Ledger | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        """True on global rank 0, the one process that writes checkpoints, progress and the result."""
        return self.rank == 0

    def warn(self, sentence: str) -> None:
        """Say something to the user once per job, on stderr of global rank 0."""
        if self.is_main:
            print(f"ddp-trainer: {sentence}", file=sys.stderr, flush=True)

    def wrap(self, model: nn.Module, **settings: Any) -> nn.Module:
        """Return `model` under DistributedDataParallel, or itself where there is only one process.

        `settings` are DDP's own, beside or in place of ours. Gradients live in DDP's buckets instead of being copied
        there, which saves their memory once (`gradient_as_bucket_view`).

        DDP's own synchronisation of buffers is off because it would send every BatchNorm buffer before every step although training
        does not read them. What counts instead: **the buffers of rank 0 are the model's.** They are what is saved, and
        `broadcast_buffers` below copies them to the peers before an evaluation reads them. As
        nothing ever flows from the peers back to rank 0, the moment of an evaluation or a checkpoint cannot change
        the training, which is what makes a resumed run equal to an unbroken one. The price: running statistics see
        rank 0's part of each batch only, as they do with DDP's own default.
        """
        if self.world_size == 1:
            return model
        # torch 2.13 renamed the option and warns of the old name, which is all that 2.10 knows.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        defaults: dict[str, Any] = {
            "device_ids": [self.device] if self.device.type == "cuda" else None,
            "gradient_as_bucket_view": True,
            buffers: False,
        }
        ddp = DistributedDataParallel(model, **defaults | settings)
        if ledger := self.ledger:
            ddp.register_forward_pre_hook(lambda *_: ledger.forward())
            ddp.register_forward_hook(lambda *_: ledger.backward())
        return ddp

    def warm_up(self, ddp: nn.Module, example: Tensor) -> None:
        """Run one forward and backward on `example` (at least two samples), and leave no trace but DDP's buckets.

        DDP puts all gradients into buckets in the order of the parameters, and after the first backward once more in the
        order in which the gradients became ready. The order of summation inside an all-reduce depends on where in a bucket
        a number lies, so the first step of a process is rounded differently from all later ones, and a resumed run would
        differ from an unbroken one at its first step (by 4e-9 at four ranks). With the first backward thrown away here,
        and the next forward rebuilding the buckets, every real step of every process uses the final ones.

        Buffers (BatchNorm's statistics) and the random number generators are put back. Every rank calls it.
        """
        buffers = [(buffer, buffer.clone()) for buffer in ddp.buffers()]
        devices = [example.device] if example.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            ddp.train()
            ddp(example).sum().backward()
            ddp.zero_grad()  # first: gradients that are views of the old buckets would keep those in memory
            ddp(example)  # rebuilds the buckets now, so that it is not booked as training time
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        if self.ledger:
            self.ledger.rest()

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Make every rank's buffers (BatchNorm's running statistics) those of rank 0. Every rank calls it."""
        if self.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def sum(self, values: Tensor) -> Tensor:
        """Add `values` (any shape, float64 for exact counts) up over all ranks, in place. Every rank calls it."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def maximum(self, values: Tensor) -> Tensor:
        """Elementwise maximum of `values` over all ranks, in place. Every rank calls it."""
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def identical(self, tensors: Iterable[Tensor]) -> bool:
        """Whether float32 `tensors` have the same bits on all ranks, by a sum of those bits. Every rank calls it."""
        if self.world_size == 1:
            return True
        sums = [tensor.detach().contiguous().view(torch.int32).sum(dtype=torch.int64) for tensor in tensors]
        mine = torch.stack(sums)
        return bool((self.maximum(torch.stack([mine, -mine])).sum(0) == 0).all())

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.maximum(torch.zeros(1))

    def gather(self, item: T) -> list[T]:
        """Collect a small picklable `item` of each rank, in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [item]
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item)
        return items

    def broadcast(self, item: T | None) -> T:
        """Give every rank the picklable `item` of rank 0; the other ranks pass None."""
        box: list[Any] = [item]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[no-any-return]

    def together(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; if one rank raises a UserError, every rank raises it.

        So a folder that is missing on one node ends the job with its sentence everywhere, instead of leaving the
        other ranks waiting in their next collective.
        """
        result: T | None = None
        complaint: str | None = None
        try:
            result = action()
        except UserError as error:
            complaint = str(error)
        complaints = self.gather(complaint)
        failed = [rank for rank, text in enumerate(complaints) if text is not None]
        if not failed:
            return result  # type: ignore[return-value]
        first = failed[0]
        raise UserError(f"rank {first}: {complaints[first]}" if first else complaints[0])

    def node_by_node(self, action: Callable[[], T]) -> T:
        """`together`, but one process of each node goes first: it fills a cache that the others then find."""
        first = self.together(lambda: action() if self.local_rank == 0 else None)
        others = self.together(lambda: action() if self.local_rank != 0 else None)
        return first if self.local_rank == 0 else others  # type: ignore[return-value]


@contextmanager
def process_group(
    *,
    seed: int = 0,
    threads: int | None = None,
    timeout: float | None = None,
    local_rank: int | None = None,
    devices: int = 1,
    import_seconds: float = 0.0,
) -> Iterator[Runtime]:
    """Join the process group that torchrun's variables describe, or none; leave it when the block ends well.

    `timeout` is how many seconds a rank waits for its peers in a collective (torch's default: 1,800); where one waits
    longer, SlowRankError names the rank that it waited for (with gloo; NCCL's watchdog ends the process without Python). `local_rank` counts where LOCAL_RANK is not set. `devices` is how
    many GPUs each process has to itself; its Runtime names the first.

    After an exception the group is left as it is: taking it down would wait for peers that may be gone.
    Raises UserError when the environment describes half a process group or a GPU that is not there.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    environment = dict(os.environ)
    if local_rank is not None:
        environment.setdefault("LOCAL_RANK", str(local_rank))
    launched = launch_variables(environment)
    started = time.perf_counter()
    device = _device(launched["LOCAL_RANK"] if launched else 0, devices)
    runtime = _join(launched, device, timeout) if launched else Runtime(device=device, seconds={})
    assert isinstance(runtime.seconds, dict)
    runtime.seconds["import"] = import_seconds
    runtime.seconds["rendezvous"] = time.perf_counter() - started
    # Every rank draws the same initial weights; what differs between ranks (augmentation) is derived from positions.
    torch.manual_seed(seed)
    ledger = runtime.ledger
    try:
        yield runtime
        if ledger:
            runtime.barrier()
            ledger.close()
            dist.destroy_process_group()
    except RuntimeError as error:
        if ledger and _TIMED_OUT.search(str(error)) and (who := ledger.who_is_slow(timeout)):
            # Without gloo's own error, which looks like that of a rank whose peer was lost, and whose traceback would push
            # this sentence's place in torchrun's summary out of what a launcher keeps of a log.
            raise SlowRankError(who) from None
        raise
    finally:
        if ledger:
            ledger.close()


def launch_variables(environment: Mapping[str, str]) -> dict[str, int] | None:
    """Read RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them; None when the process runs alone.

    Raises UserError when only some of the variables are there or one is no number.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    missing = [name for name in _LAUNCH_VARIABLES if not environment.get(name)]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} not set although RANK or WORLD_SIZE is: start the script with torchrun, "
            "which sets all of them, or unset RANK and WORLD_SIZE to run alone"
        )
    numbers = {}
    for name, text in [(n, environment.get(n, "0")) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")]:
        if not text.isdecimal():
            raise UserError(f"{name} is {text!r}, which is no number: start the script with torchrun, which sets it")
        numbers[name] = int(text)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise UserError(f"RANK is {numbers['RANK']} but WORLD_SIZE is {numbers['WORLD_SIZE']}: ranks count from 0")
    return numbers


def _join(launched: Mapping[str, int], device: torch.device, timeout: float | None) -> Runtime:
    rank, world_size = launched["RANK"], launched["WORLD_SIZE"]
    _use_loopback_for_local_peers()
    store, _, _ = next(rendezvous("env://", rank, world_size))
    _wait_for_all(store, world_size)
    # On GPUs the gloo half carries what lives on the CPU: signals, checkpoints on their way to the ranks.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("default_pg", store),
        rank=rank,
        world_size=world_size,
        timeout=None if timeout is None else timedelta(seconds=timeout),
    )
    return Runtime(
        rank=rank,
        world_size=world_size,
        local_rank=launched["LOCAL_RANK"],
        device=device,
        backend="nccl" if device.type == "cuda" else "gloo",
        ledger=Ledger(PrefixStore("ledger", store), rank, world_size),
        seconds={},
    )


def _wait_for_all(store: Store, world_size: int) -> None:
    """Wait until every rank has come. The group's own time-out is meant for steps, and may be shorter than an import."""
    if store.add("joined", 1) == world_size:
        store.set("all joined", "")
    store.wait(["all joined"], JOIN_TIMEOUT)


def _device(local_rank: int, devices: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if (local_rank + 1) * devices > torch.cuda.device_count():
        needs = "no GPU" if devices == 1 else f"no {devices} GPUs"
        raise UserError(
            f"LOCAL_RANK {local_rank} has {needs}, this machine has {torch.cuda.device_count()}: start fewer "
            "processes per node, or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )
    device = torch.device("cuda", local_rank * devices)
    torch.cuda.set_device(device)
    return device


def _use_loopback_for_local_peers() -> None:
    """Let gloo use the loopback interface where the rendezvous already does.

    gloo otherwise takes the address of the machine's own name, which on many laptops resolves to nothing or to an
    interface that a firewall or a VPN guards.
    """
    if os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if platform.system() == "Darwin" else "lo")


def computes_in_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies bfloat16 itself. Without it, autocast would convert to and fro and be slower."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


@contextmanager
def batch_norm_at_rest(model: nn.Module, shard: Shard) -> Iterator[None]:
    """Let a model with BatchNorm run forward and backward on a shard without samples.

    A rank that got nothing of a batch still runs the model, on an empty tensor, to take part in the all-reduce with
    gradients of zero. Training on nothing would turn BatchNorm's running statistics into NaN, so it normalises by
    them instead. (A shard of one sample cannot be normalised at all: the sampler's `at_least=2` gives none.)
    """
    resting = []
    if len(shard.indices) == 0:
        resting = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in resting:
        norm.eval()
    yield
    for norm in resting:
        norm.train()
