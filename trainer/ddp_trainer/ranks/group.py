"""Joining the launcher's process group, or using an existing one, and leaving it."""

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from ddp_trainer.errors import Interrupted, SlowRankError, UserError
from ddp_trainer.ranks.cpu import keep_freed_memory, schedule_as_batch
from ddp_trainer.ranks.gloo import (
    LOOK_INTERVAL,
    TIMED_OUT,
    use_loopback_for_local_peers,
    wait_for_threads,
)
from ddp_trainer.ranks.hardware import KINDS, Hardware, choose
from ddp_trainer.ranks.own_store import open_store, place
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.ranks.stragglers import StragglerDetector

# This init method reads MASTER_ADDR and MASTER_PORT.
ENVIRONMENT = "env://"

JOIN_TIMEOUT = timedelta(minutes=30)

# Numbers of this process's groups, one after another. The store keeps what the earlier groups
# wrote.
_group_numbers = itertools.count()

USED_STORE = (
    "the rendezvous store still has the ranks of an earlier start, as after a restart by "
    "torchrun's --max-restarts on several nodes; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or "
    "restart the whole launcher, as a DDPJob does"
)


@dataclass(frozen=True)
class Launch:
    """The launcher's choice for this process: ranks and init method."""

    rank: int
    world_size: int
    local_rank: int
    init_method: str = ENVIRONMENT


@contextmanager
def process_group(
    *,
    seed: int = 0,
    timeout: float | None = None,
    device: str = "auto",
    devices: int = 1,
    init_method: str = ENVIRONMENT,
    tune_cpu: bool = False,
) -> Iterator[Runtime]:
    """Join the process group described by torchrun's variables, and leave it after the block.

    Without these variables the process runs alone.

    - `seed`: of the random number generators of torch, numpy and `random`, on all ranks.
    - `timeout`: seconds that a rank waits for its peers in a collective; None is torch's 1,800.
      With gloo, SlowRankError then names the slow rank. With more than two ranks, a thread may have
      to print this error and end the process with exit code 1. With NCCL, its watchdog kills the
      process, and no exception is raised.
    - `device`: a kind in `hardware.KINDS`, or auto. `devices`: their number per process; the
      Runtime has the first.
    - `init_method`: how the ranks meet: env://, file:///a/path/that/all/ranks/see (without
      SlowRankError), or with torch_xla xla://.
    - `tune_cpu`: on the device cpu, make training faster by two settings of the whole process until
      its end: the policy SCHED_BATCH for this thread and those started by it, and malloc keeps
      freed memory (`cpu.py`). By default neither is changed.

    After an exception other than Interrupted the group is not destroyed. Destroying it would wait
    for the peers, and these may be gone.

    Raises UserError if the environment is incomplete, the device does not exist, or the process has
    a group already.
    """
    if dist.is_initialized():
        raise UserError("the process has a process group already; use attach() instead")
    launch = read_launch(os.environ, init_method)

    # Set up the device before joining the group, and join before taking the device.
    started = time.perf_counter()
    hardware = choose(device)
    if tune_cpu and hardware.name == "cpu":
        schedule_as_batch()
        keep_freed_memory()
    hardware.prepare(launch.local_rank if launch else 0, devices)
    if launch:
        runtime = _join(launch, hardware, timeout, devices)
    else:
        runtime = Runtime(device=hardware.take(0, devices), hardware=hardware)
    runtime = replace(runtime, seconds={"rendezvous": time.perf_counter() - started})

    # All ranks draw the same initial weights. What differs between ranks, such as augmentation, is
    # derived from the positions of the samples.
    hardware.seed(seed)
    try:
        with _peers_left_together(runtime):
            yield runtime
    except Interrupted:
        _destroy(runtime)
        raise
    _destroy(runtime)


@contextmanager
def attach(
    *, device: torch.device | str | None = None, timeout: float | None = None
) -> Iterator[Runtime]:
    """Yield a Runtime on the existing default process group of the caller or of a framework.

    With it, checkpoints, `StopVote`, evaluations and samplers work in the loop of Accelerate,
    Fabric or the Trainer of transformers, or in one of your own. Every rank calls it, after the
    group is initialised. A process without a group runs alone.

    - `device`: the device of this rank. By default it is the accelerator with the number LOCAL_RANK
      if the group has a backend for it, else the CPU.
    - `timeout`: seconds that a rank waits for its peers in a collective of the Runtime; None is
      torch's 1,800. Collectives of the model keep the timeout of their own group.

    It makes a gloo group and a store of its own, and removes them after the block. It changes
    nothing else in the process: it neither seeds generators nor sets a device, and it leaves the
    default group as it is. It does not find slow ranks. The block ends when the last checkpoint is
    written, also after an exception. After an exception, a sharded checkpoint is given up if other
    ranks have not finished their shards.

    Raises UserError if WORLD_SIZE is more than 1 and there is no group.
    """
    started = time.perf_counter()
    with _signals_kept(), _own_group(timeout) as group:
        runtime = _place_in_group(group, device)
        seconds = {"rendezvous": time.perf_counter() - started}
        limit = timeout or default_pg_timeout.total_seconds()
        runtime = replace(runtime, seconds=seconds, timeout=limit)
        try:
            with _peers_left_together(runtime):
                yield runtime
        finally:
            # After an exception, a thread may still write a checkpoint.
            while any(is_writing() for is_writing in runtime.is_writing):
                time.sleep(LOOK_INTERVAL)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handlers of signals after the block. A StopVote in it may set its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in handlers.items():
            # None is a handler from outside Python.
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def _own_group(timeout: float | None) -> Iterator[dist.ProcessGroup | None]:
    """Make a gloo group of all ranks for the time of the block. Yield None without a group."""
    if not dist.is_initialized():
        world_size = os.environ.get("WORLD_SIZE", "1")
        if world_size != "1":
            raise UserError(
                f"attach: WORLD_SIZE is {world_size}, but there is no default process group; "
                "initialise it before, by your framework or by "
                "torch.distributed.init_process_group, or use process_group()",
                is_common=True,
            )
        yield None
        return
    limit = None if timeout is None else timedelta(seconds=timeout)
    group = dist.new_group(backend="gloo", timeout=limit)
    try:
        yield group
    finally:
        # Nothing waits in it: its collectives end before the calls of the Runtime return.
        dist.destroy_process_group(group)
        wait_for_threads()


def _place_in_group(group: dist.ProcessGroup | None, device: torch.device | str | None) -> Runtime:
    """Return this process's Runtime in the default group, with `group` for its own collectives."""
    if group is None:
        found = torch.device(device) if device else _device_of_group("", 0)
        return Runtime(device=found, hardware=choose(found.type))
    bare = Runtime(dist.get_rank(), dist.get_world_size(), cpu_group=group)
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is None:
        # Other launchers than torchrun may not set it.
        places = bare.gather(place())
        local_rank = str(places[: bare.rank].count(places[bare.rank]))
    config = dist.get_backend_config()
    found = torch.device(device) if device else _device_of_group(config, int(local_rank))
    return replace(
        bare,
        local_rank=int(local_rank),
        device=found,
        hardware=choose(found.type),
        backend=dist.get_backend(),
        store=PrefixStore("runtime", open_store(bare)),
    )


def _device_of_group(config: str, local_rank: int) -> torch.device:
    """Return the device of this rank in a group.

    `config` has the backend of each type of device, such as `cpu:gloo,cuda:nccl`. If it is empty,
    there is no group.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type not in KINDS:
        return torch.device("cpu")
    backends = dict(pair.split(":") for pair in config.split(",") if pair)
    # A group of gloo alone accepts tensors of GPUs too, but is meant for the CPU.
    if config and backends.get(accelerator.type, "gloo") == "gloo":
        return torch.device("cpu")
    # If a process sees only its own device, the device has number 0.
    number = local_rank if local_rank < torch.accelerator.device_count() else 0
    return torch.device(accelerator.type, number)


@contextmanager
def _peers_left_together(runtime: Runtime) -> Iterator[None]:
    """Finish the work of the block at its end, with all ranks unless there was an exception.

    Name the slow rank after a timeout.
    """
    stragglers = runtime.stragglers
    failed = True
    try:
        yield
        _call_at_leave(runtime, failed=False)
        failed = False
        runtime.barrier()
    except Interrupted:
        # All ranks have agreed to stop, and none is in a collective.
        if failed:
            _call_at_leave(runtime, failed=False)
        failed = False
        raise
    except RuntimeError as error:
        if stragglers and TIMED_OUT.search(str(error)):
            message = stragglers.describe_slow_rank()
            if message:
                # gloo's own error looks like a lost peer, and a launcher keeps only a part of the
                # log: gloo's traceback would take the place of this message in it.
                raise SlowRankError(message) from None
        raise
    finally:
        if failed:
            _call_at_leave(runtime, failed=True)
        if stragglers:
            stragglers.close()


def _call_at_leave(runtime: Runtime, *, failed: bool) -> None:
    while runtime.at_leave:
        # What it refers to, such as a model in DDP, would keep the group alive.
        runtime.at_leave.pop(0)(failed)


def _destroy(runtime: Runtime) -> None:
    """Destroy the default group, if `process_group` has made one."""
    if runtime.backend != "none":
        dist.destroy_process_group()
        wait_for_threads()


def read_launch(environment: Mapping[str, str], init_method: str = ENVIRONMENT) -> Launch | None:
    """Read torchrun's variables. Return None if the process runs alone.

    Raises UserError if some of the variables are missing or are no numbers.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        if init_method != ENVIRONMENT:
            raise UserError(
                f"init method {init_method}: RANK and WORLD_SIZE are not set; set them for each "
                "process, or omit it to run alone"
            )
        return None
    required = ["RANK", "WORLD_SIZE"]
    if init_method == ENVIRONMENT:
        required += ["MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in required if not environment.get(name)]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} not set, although RANK or WORLD_SIZE is; start the script "
            "with torchrun, which sets all of them, or unset RANK and WORLD_SIZE to run alone"
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        text = environment.get(name, "0")
        if not text.isdecimal():
            raise UserError(
                f"{name}: must be an integer, got {text!r}; start the script with torchrun, which "
                "sets it"
            )
        numbers[name] = int(text)
    launch = Launch(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"], init_method)
    if launch.rank >= launch.world_size:
        raise UserError(
            f"RANK: must be less than WORLD_SIZE={launch.world_size}, got {launch.rank}; ranks "
            "count from 0"
        )
    return launch


def _join(launch: Launch, hardware: Hardware, timeout: float | None, devices: int) -> Runtime:
    """Join the process group, and return this process's Runtime."""
    use_loopback_for_local_peers()

    # On a TPU, the init method xla:// assigns ranks in the order of the chips.
    shared, rank, world_size = _meet(launch)
    prefix = f"restart {_number_of_restarts(os.environ)}, group {next(_group_numbers)}"
    store = PrefixStore(prefix, shared)
    _wait_for_all(store, world_size, launch.init_method)
    limit = None if timeout is None else timedelta(seconds=timeout)
    dist.init_process_group(
        hardware.backend,
        store=PrefixStore("default_pg", store),
        rank=rank,
        world_size=world_size,
        timeout=limit,
    )
    device = hardware.take(launch.local_rank, devices)
    hardware.check_world(rank, world_size)

    # A file store keeps all former values, so positions are not written to it.
    stragglers = None
    seconds = (limit or default_pg_timeout).total_seconds()
    if not launch.init_method.startswith("file:"):
        positions = PrefixStore("stragglers", store)
        report = partial(_report_slow_rank, hardware, rank)
        stragglers = StragglerDetector(positions, rank, world_size, seconds, report)

    cpu_group = None
    if hardware.needs_cpu_group:
        cpu_group = dist.new_group(backend="gloo", timeout=limit)
    return Runtime(
        rank=rank,
        world_size=world_size,
        local_rank=launch.local_rank,
        device=device,
        hardware=hardware,
        backend=hardware.backend.rpartition(":")[2],
        cpu_group=cpu_group,
        stragglers=stragglers,
        store=PrefixStore("runtime", store),
        timeout=seconds,
    )


def _report_slow_rank(hardware: Hardware, rank: int, message: str) -> None:
    """Report that this rank waits in a collective for too long. With gloo, end the process.

    No exception can be raised in a thread while it waits in gloo. As after SlowRankError, torchrun
    has the message in its summary, and the log ends with it. NCCL's watchdog ends the process
    itself, when it has written the record of the last collectives.
    """
    message = f"{message}. {hardware.describe_record(rank)}".removesuffix(". ")
    get_error_handler().record_exception(SlowRankError(message))
    print(f"ddp_trainer.errors.SlowRankError: {message}", file=sys.stderr, flush=True)
    if hardware.backend == "gloo":
        os._exit(1)


def _number_of_restarts(environment: Mapping[str, str]) -> str:
    """Return how often torchrun's --max-restarts has started the processes again.

    The store then still has the entries of the earlier processes. On several nodes the number is
    not known: each agent counts only the restarts begun by itself.
    """
    if environment.get("GROUP_WORLD_SIZE") != "1":
        return "0"
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0")


def _meet(launch: Launch) -> tuple[Store, int, int]:
    """Return the common store of the ranks, this process's rank, and the world size.

    Raises UserError if the init method is unknown or its folder does not exist.
    """
    url = urlsplit(launch.init_method)
    folder = Path(url.path).parent
    # torch's FileStore would wait for the folder.
    if url.scheme == "file" and not folder.is_dir():
        raise UserError(f"init method {launch.init_method}: folder {folder} not found")
    try:
        meeting = rendezvous(launch.init_method, launch.rank, launch.world_size)
        found: tuple[Store, int, int] = next(meeting)
    except (RuntimeError, ValueError) as error:
        if url.scheme != "file" and "No rendezvous handler" not in str(error):
            raise
        raise UserError(
            f"init method {launch.init_method}: expected env://, "
            "file:///a/path/that/all/ranks/see or, with the device xla, xla://"
        ) from error
    return found


def _wait_for_all(store: Store, world_size: int, init_method: str) -> None:
    """Wait until every rank has joined.

    The group's own timeout is meant for steps, and may be shorter than an import.
    """
    joined = store.add("joined", 1)
    if joined == world_size:
        store.set("all joined", "")
    if joined > world_size:
        if init_method == ENVIRONMENT:
            raise UserError(USED_STORE)
        raise UserError(
            f"init method {init_method}: the file was used by another run, whose processes are "
            "gone; remove it or choose another file"
        )
    store.wait(["all joined"], JOIN_TIMEOUT)
