"""The process and its peers: rank, device, process group, and the few collectives that the other modules use.

The same calls work for a process alone, under `torchrun --standalone`, and in a container: alone there is no process group
and every collective returns its argument.
"""

import hashlib
import inspect
import itertools
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

# Before there is a group: this module's functions have the group of the moment of its import as a default argument, for ever.
# DDP imports it, and then `destroy_process_group` destroys nothing: gloo's threads run on, and now and then one of them
# aborts a process that has finished (exit code -6).
import torch.distributed.nn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.errors import Interrupted, UserError
from ddp_trainer.hardware import Hardware, choose
from ddp_trainer.stragglers import Ledger, SlowRankError

T = TypeVar("T")

_TIMED_OUT = re.compile(r"timed out|timeout caused pair closure", re.IGNORECASE)  # what gloo says
JOIN_TIMEOUT = timedelta(minutes=30)
_GROUPS = (
    itertools.count()
)  # that this process has joined, one after another; the store keeps what the earlier ones wrote
ENVIRONMENT = "env://"  # the init method that reads MASTER_ADDR and MASTER_PORT


@dataclass(frozen=True)
class Runtime:
    """One process of a training job. `seconds` holds what the start cost: import, rendezvous."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    hardware: Hardware = field(default_factory=Hardware)
    backend: str = "none"
    cpu_group: dist.ProcessGroup | None = (
        None  # for tensors on the CPU; None: the default group carries them
    )
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
        # Said of convolutions of 1x1 and of those with one input channel: the strides of their gradients are told in another
        # way, while the numbers lie in the same order.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        ddp = DistributedDataParallel(model, **self.ddp_settings() | settings)
        if ledger := self.ledger:
            ddp.register_forward_pre_hook(lambda *_: ledger.forward())
            ddp.register_forward_hook(lambda *_: ledger.backward())
        return ddp

    def ddp_settings(self) -> dict[str, Any]:
        """What we give DistributedDataParallel beside the model."""
        # torch 2.13 renamed the option and warns of the old name, which is all that 2.9 knows.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        return {
            "gradient_as_bucket_view": True,
            buffers: False,
        }

    def step(self, optimizer: torch.optim.Optimizer, *, set_to_none: bool = True) -> None:
        """Take the optimizer's step and clear the gradients; on XLA that is also where the recorded step is run."""
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        self.hardware.end_step()

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
        with self.hardware.random_state_kept():
            ddp.train()
            ddp(example).sum().backward()
            ddp.zero_grad()  # first: gradients that are views of the old buckets would keep those in memory
            ddp(example)  # rebuilds the buckets now, so that it is not booked as training time
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        self.hardware.end_step()
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
            dist.all_reduce(values, group=self._group(values))
        return values

    def maximum(self, values: Tensor) -> Tensor:
        """Elementwise maximum of `values` over all ranks, in place. Every rank calls it."""
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group(values))
        return values

    def identical(self, tensors: Iterable[Tensor]) -> bool:
        """Whether `tensors` have the same bits in the same order on all ranks, by 56 bits of their SHA-256. Every rank calls it."""
        if self.world_size == 1:
            return True
        plain = (
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            for tensor in tensors
        )
        digests = [int.from_bytes(hashlib.sha256(numbers.data).digest()[:7]) for numbers in plain]
        mine = torch.tensor(digests)
        return bool((self.maximum(torch.stack([mine, -mine])).sum(0) == 0).all())

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.maximum(torch.zeros(1))

    def gather(self, item: T) -> list[T]:
        """Collect a small picklable `item` of each rank, in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [item]
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item, group=self.cpu_group)
        return items

    def broadcast(self, item: T | None) -> T:
        """Give every rank the picklable `item` of rank 0; the other ranks pass None."""
        box: list[Any] = [item]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, group=self.cpu_group)
        return box[0]  # type: ignore[no-any-return]

    def broadcast_bytes(self, data: bytes, size: int) -> bytes:
        """Give every rank the `size` bytes `data` of rank 0, which the others leave empty. Every rank calls it."""
        if size == 0 or self.world_size == 1:
            return data
        buffer = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(size, dtype=torch.uint8)
        )
        dist.broadcast(buffer, src=0, group=self.cpu_group)
        return data or buffer.numpy().tobytes()

    def _group(self, values: Tensor) -> dist.ProcessGroup | None:
        return self.cpu_group if values.device.type == "cpu" else None

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
    device: str = "auto",
    devices: int = 1,
    init_method: str = ENVIRONMENT,
    import_seconds: float = 0.0,
) -> Iterator[Runtime]:
    """Join the process group that torchrun's variables describe, or none; leave it when the block ends well.

    `timeout` is how many seconds a rank waits for its peers in a collective (torch's default: 1,800); where one waits
    longer, SlowRankError names the rank that it waited for (with gloo; NCCL's watchdog ends the process without Python).
    `local_rank` counts where LOCAL_RANK is not set. `device` is a kind of hardware.KINDS, `devices` how many of them each
    process has to itself; its Runtime names the first. `init_method` is how the ranks meet: env://,
    file:///a/path/that/all/see (where no SlowRankError names anybody), or with torch_xla xla://.

    After an exception other than Interrupted the group is left as it is: taking it down would wait for peers that may be
    gone.
    Raises UserError when the environment describes half a process group or a device that is not there.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    environment = dict(os.environ)
    if local_rank is not None:
        environment.setdefault("LOCAL_RANK", str(local_rank))
    launched = launch_variables(environment, init_method)
    started = time.perf_counter()
    hardware = choose(device)
    hardware.prepare(launched["LOCAL_RANK"] if launched else 0, devices)
    if launched:
        runtime = _join(launched, hardware, timeout, init_method, devices)
    else:
        runtime = Runtime(device=hardware.take(0, devices), hardware=hardware)
    spent = {"import": import_seconds, "rendezvous": time.perf_counter() - started}
    runtime = replace(runtime, seconds=spent)
    # Every rank draws the same initial weights; what differs between ranks (augmentation) is derived from positions.
    hardware.seed(seed)
    ledger = runtime.ledger

    def leave() -> None:
        if ledger:
            ledger.close()
        if launched:
            dist.destroy_process_group()

    try:
        yield runtime
        runtime.barrier()
        leave()
    except Interrupted:
        leave()  # all ranks have agreed on it, and none is in a collective any more
        raise
    except RuntimeError as error:
        if ledger and _TIMED_OUT.search(str(error)) and (who := ledger.who_is_slow()):
            # Without gloo's own error, which looks like that of a rank whose peer was lost, and whose traceback would push
            # this sentence's place in torchrun's summary out of what a launcher keeps of a log.
            raise SlowRankError(who) from None
        raise
    finally:
        if ledger:
            ledger.close()


def launch_variables(
    environment: Mapping[str, str], init_method: str = ENVIRONMENT
) -> dict[str, int] | None:
    """Read RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them; None when the process runs alone.

    Raises UserError when only some of the variables that the init method needs are there or one is no number.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        if init_method != ENVIRONMENT:
            raise UserError(
                f"--init-method {init_method} needs RANK and WORLD_SIZE, which nobody has set: set them for each process, or "
                "leave it out to run alone"
            )
        return None
    wanted = [
        "RANK",
        "WORLD_SIZE",
        *(["MASTER_ADDR", "MASTER_PORT"] if init_method == ENVIRONMENT else []),
    ]
    missing = [name for name in wanted if not environment.get(name)]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} not set although RANK or WORLD_SIZE is: start the script with torchrun, "
            "which sets all of them, or unset RANK and WORLD_SIZE to run alone"
        )
    numbers = {}
    for name, text in [
        (n, environment.get(n, "0")) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    ]:
        if not text.isdecimal():
            raise UserError(
                f"{name} is {text!r}, which is no number: start the script with torchrun, which sets it"
            )
        numbers[name] = int(text)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise UserError(
            f"RANK is {numbers['RANK']} but WORLD_SIZE is {numbers['WORLD_SIZE']}: ranks count from 0"
        )
    return numbers


def _join(
    launched: Mapping[str, int],
    hardware: Hardware,
    timeout: float | None,
    init_method: str,
    devices: int,
) -> Runtime:
    _use_loopback_for_local_peers()
    # On a TPU the init method xla:// gives ranks of its own, in the order of the chips.
    shared, rank, world_size = _meet(init_method, launched["RANK"], launched["WORLD_SIZE"])
    store = PrefixStore(f"group {next(_GROUPS)}", shared)
    _wait_for_all(store, world_size, init_method)
    limit = None if timeout is None else timedelta(seconds=timeout)
    dist.init_process_group(
        hardware.backend,
        store=PrefixStore("default_pg", store),
        rank=rank,
        world_size=world_size,
        timeout=limit,
    )
    device = hardware.take(launched["LOCAL_RANK"], devices)
    hardware.check_world(rank, world_size)
    ledger = None
    if not init_method.startswith(
        "file:"
    ):  # a file keeps all that was ever written to it, again and again
        waits = (limit or default_pg_timeout).total_seconds()
        ledger = Ledger(PrefixStore("ledger", store), rank, world_size, waits)
    return Runtime(
        rank=rank,
        world_size=world_size,
        local_rank=launched["LOCAL_RANK"],
        device=device,
        hardware=hardware,
        backend=hardware.backend.rpartition(":")[2],
        cpu_group=dist.new_group(backend="gloo", timeout=limit)
        if hardware.needs_cpu_group
        else None,
        ledger=ledger,
    )


def _meet(init_method: str, rank: int, world_size: int) -> tuple[Store, int, int]:
    """The store that the ranks share, this one's rank and the number of ranks. Raises UserError where there is no such method."""
    method = urlsplit(init_method)
    folder = Path(method.path).parent
    if method.scheme == "file" and not folder.is_dir():
        raise UserError(
            f"--init-method {init_method}: there is no folder {folder}"
        )  # FileStore would wait for it
    try:
        store: tuple[Store, int, int] = next(rendezvous(init_method, rank, world_size))
    except (RuntimeError, ValueError) as error:
        if method.scheme != "file" and "No rendezvous handler" not in str(error):
            raise
        raise UserError(
            f"--init-method {init_method} is none of env://, file:///a/path/that/all/see and, with --device xla, xla://"
        ) from error
    return store


def _wait_for_all(store: Store, world_size: int, init_method: str) -> None:
    """Wait until every rank has come. The group's own time-out is meant for steps, and may be shorter than an import."""
    joined = store.add("joined", 1)
    if joined == world_size:
        store.set("all joined", "")
    if joined > world_size:
        raise UserError(
            "the store of the rendezvous still has the ranks of an earlier start, as after a restart by torchrun's "
            "--max-restarts: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or restart the whole launcher (a DDPJob does)"
            if init_method == ENVIRONMENT
            else f"the file of --init-method {init_method} was used by another run, whose processes are gone: remove it "
            "or name another"
        )
    store.wait(["all joined"], JOIN_TIMEOUT)


def _use_loopback_for_local_peers() -> None:
    """Let gloo use the loopback interface where the rendezvous already does.

    gloo otherwise takes the address of the machine's own name, which on many laptops resolves to nothing or to an
    interface that a firewall or a VPN guards.
    """
    if os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1"):
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", "lo0" if platform.system() == "Darwin" else "lo"
        )
