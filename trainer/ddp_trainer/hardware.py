"""The device layer: what differs between kinds of hardware, and nothing else.

cpu     gloo
cuda    NVIDIA GPUs, NCCL
neuron  AWS Trainium 2 and 3 by TorchNeuron (torch 2.13 on), which is a device like CUDA
xla     torch_xla (its last release is 2.9): AWS Trainium 1, Google TPU, or PJRT on a CPU

Workloads ask the Runtime for what they need and are the same on all four. torch_xla and torch_neuronx are imported only
where they are chosen. What of this ran where is in docs/workloads/xla.md.
"""

import ctypes
import importlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ddp_trainer.errors import UserError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


class Hardware:
    """The CPU, and what the others do not do differently."""

    name = "cpu"
    backend = "gloo"  # as init_process_group takes it; it must carry tensors on the CPU too, or `needs_cpu_group`
    needs_cpu_group = False
    pairs = True  # whether two ranks can do something together that the others take no part in
    wants_equal_shapes = False  # whether batches of another size, or of other sizes on other ranks, are to be avoided
    sums = torch.float64  # what losses and counts are added up in
    fused_optimizers: bool | None = (
        True  # one pass over each parameter, not one an operation; None: as torch chooses
    )

    def prepare(self, local_rank: int, each: int) -> None:
        """What has to be before the group is joined. Raises UserError where a process of `each` devices would lack one."""
        schedule_as_batch()
        keep_freed_memory()

    def take(self, local_rank: int, each: int) -> torch.device:
        """The (first) device of this process, which is the current one from now on. After the group was joined."""
        return torch.device("cpu")

    def check_world(self, rank: int, world_size: int) -> None:
        """Raise UserError where the hardware's own idea of the ranks is another one. After `take`."""

    def seed(self, seed: int) -> None:
        """Begin all random numbers of this process anew."""
        torch.manual_seed(seed)

    def computes_in_bf16(self) -> bool:
        """Whether it multiplies bfloat16 itself. Without that, autocast would convert to and fro and be slower."""
        capabilities = (
            torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        )
        return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))

    def image_layout(self, *, bf16: bool) -> torch.memory_format:
        """The order in memory of an image's dimensions, and of a convolution's weights, in which it convolves fastest.

        For weights: `model.to(memory_format=…)` before `Runtime.wrap`, never after it. DDP gives gradients the order that the
        parameters have then, and the CPU's fused optimizers go through parameter, gradient and momentum by memory: where the
        order differs they compute nonsense without a word (seen with torch 2.13).
        """
        return torch.channels_last

    def end_step(self) -> None:
        """A training step or a batch of an evaluation is over: run what was only recorded so far."""

    def wait(self) -> None:
        """Return when the device has done all that it was given."""

    def random_state(self) -> dict[str, Tensor]:
        """The states of this process's random number generators, to be put into a checkpoint."""
        return {"cpu": torch.get_rng_state()}

    def set_random_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `random_state` returned; what was saved on another kind of hardware is left alone."""
        torch.set_rng_state(state["cpu"])

    @contextmanager
    def random_state_kept(self) -> Iterator[None]:
        """What is drawn inside does not change what is drawn afterwards."""
        state = self.random_state()
        try:
            yield
        finally:
            self.set_random_state(state)


class Accelerator(Hardware):
    """A device that PyTorch addresses by name and number, with a module `torch.<name>` of the documented form."""

    def prepare(self, local_rank: int, each: int) -> None:
        """See Hardware."""
        there = self._module.device_count()
        if (local_rank + 1) * each > there:
            needs = f"no {self.name} device" if each == 1 else f"no {each} {self.name} devices"
            raise UserError(
                f"LOCAL_RANK {local_rank} has {needs}, this process sees {there}: start fewer processes per node, "
                "or give --device cpu to train on the CPU"
            )

    def take(self, local_rank: int, each: int) -> torch.device:
        """See Hardware."""
        device = torch.device(self.name, local_rank * each)
        self._module.set_device(device)
        return device

    def wait(self) -> None:
        """See Hardware."""
        self._module.synchronize()

    def random_state(self) -> dict[str, Tensor]:
        """See Hardware."""
        return super().random_state() | {self.name: self._module.get_rng_state()}

    def set_random_state(self, state: dict[str, Tensor]) -> None:
        """See Hardware."""
        super().set_random_state(state)
        if self.name in state:
            self._module.set_rng_state(state[self.name])

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.name)


class Cuda(Accelerator):
    """NVIDIA GPUs. gloo carries what lives on the CPU: signals, checkpoints on their way to the ranks."""

    name = "cuda"
    backend = "cpu:gloo,cuda:nccl"

    def prepare(self, local_rank: int, each: int) -> None:
        """See Hardware. The device is the current one before NCCL begins, so that nothing of its lands on GPU 0."""
        super().prepare(local_rank, each)
        self.take(local_rank, each)

    def computes_in_bf16(self) -> bool:
        """See Hardware."""
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def image_layout(self, *, bf16: bool) -> torch.memory_format:
        """See Hardware. PyTorch's guide recommends channels_last where Tensor Cores compute; no GPU was measured."""
        return torch.channels_last if bf16 else torch.contiguous_format


class Neuron(Accelerator):
    """Trainium 2 and 3 by TorchNeuron: one NeuronCore a process, by its LOCAL_RANK."""

    name = "neuron"
    backend = "cpu:gloo,neuron:neuron"
    sums = torch.float32  # the cores have no float64
    fused_optimizers = None

    def __init__(self) -> None:
        _import("torch_neuronx", "TorchNeuron", "use the image that AWS publishes for it")
        if not hasattr(torch, "neuron"):
            raise UserError(
                "the torch_neuronx here is the older one, which works through torch_xla: give --device xla"
            )

    def computes_in_bf16(self) -> bool:
        """See Hardware."""
        return True

    def image_layout(self, *, bf16: bool) -> torch.memory_format:
        """See Hardware. The compiler chooses layouts."""
        return torch.contiguous_format


class Xla(Hardware):
    """Whatever PJRT_DEVICE names, by torch_xla: operations are recorded, and a step is compiled and run at its end.

    Under torchrun, and under --spawn, which sets the same variables, torch_xla gives each process of a node the core
    of its LOCAL_RANK. Its process group carries no tensors of the CPU, so a gloo group of ours does.
    """

    name = "xla"
    backend = "xla"
    needs_cpu_group = True
    pairs = False
    wants_equal_shapes = (
        True  # torch_xla asks for the same graph on all ranks, and compiles each anew
    )
    sums = torch.float32  # neither Trainium nor TPU has float64
    fused_optimizers = None

    def __init__(self) -> None:
        _import("torch_xla", "torch_xla", "pip install torch==2.9.0 torch_xla==2.9.0")
        self._xla = importlib.import_module("torch_xla")
        self._runtime = importlib.import_module("torch_xla.runtime")
        self._model = importlib.import_module("torch_xla.core.xla_model")
        importlib.import_module(
            "torch_xla.distributed.xla_backend"
        )  # registers the group "xla" and the method xla://

    def prepare(self, local_rank: int, each: int) -> None:
        """See Hardware."""
        if each > 1:
            raise UserError(
                f"this workload needs {each} devices in a process, and torch_xla gives each process one core: "
                "run it on GPUs, or with --device cpu"
            )

    def take(self, local_rank: int, each: int) -> torch.device:
        """See Hardware. It has the number 0 in every process: a process sees only its own."""
        device: torch.device = self._xla.device()
        # The init method xla:// does this too. Without it each process is a world of its own to torch_xla, whose
        # all-reduce then does nothing.
        self._model.set_replication(device, self._model.get_xla_supported_devices())
        return device

    def check_world(self, rank: int, world_size: int) -> None:
        """See Hardware."""
        theirs = self._runtime.global_ordinal(), self._runtime.world_size()
        if theirs != (rank, world_size):
            kind = self._runtime.device_type()
            raise UserError(
                f"this process is rank {rank} of {world_size}, but for torch_xla on {kind} it is {theirs[0]} of "
                f"{theirs[1]}: "
                + (
                    "PJRT on a CPU knows no other process, so start one only"
                    if kind == "CPU"
                    else "start as many processes a node as it has cores, and on a TPU add --init-method xla://"
                )
            )

    def seed(self, seed: int) -> None:
        """See Hardware."""
        super().seed(seed)
        self._xla.manual_seed(seed)

    def computes_in_bf16(self) -> bool:
        """See Hardware."""
        return bool(self._runtime.device_type() != "CPU")

    def image_layout(self, *, bf16: bool) -> torch.memory_format:
        """See Hardware. The compiler chooses layouts."""
        return torch.contiguous_format

    def end_step(self) -> None:
        """See Hardware."""
        self._xla.sync()

    def wait(self) -> None:
        """See Hardware."""
        self._xla.sync(wait=True)
        self._model.wait_device_ops()

    def random_state(self) -> dict[str, Tensor]:
        """See Hardware. XLA's state is a number of 64 bits without a sign, kept here as eight bytes."""
        number = int(self._model.get_rng_state())
        return super().random_state() | {
            "xla": torch.tensor(list(number.to_bytes(8, "little")), dtype=torch.uint8)
        }

    def set_random_state(self, state: dict[str, Tensor]) -> None:
        """See Hardware."""
        super().set_random_state(state)
        if "xla" in state:
            self._model.set_rng_state(int.from_bytes(bytes(state["xla"].tolist()), "little"))


KINDS: dict[str, type[Hardware]] = {"cpu": Hardware, "cuda": Cuda, "xla": Xla, "neuron": Neuron}


def choose(name: str) -> Hardware:
    """The hardware of that name, or with `auto` what this process finds. Raises UserError where it is not there."""
    found = _found() if name == "auto" else name
    if found == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda: PyTorch finds no GPU here; look at nvidia-smi, or give --device cpu"
        )
    return KINDS[found]()


def schedule_as_batch() -> None:
    """Tell Linux that this thread, and those that it starts from now on, compute for long: SCHED_BATCH of sched(7).

    What wakes up then does not displace what runs. gloo's threads wake several times in an all-reduce, which takes
    milliseconds longer under the default policy: bench/README.md has what a step of a small net gains.
    Needs no privilege; whoever shares the machine loses nothing by it.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux alone has it
        with suppress(OSError):  # a sandbox may forbid it, and training works without
            if (
                os.sched_getscheduler(0) == os.SCHED_OTHER
            ):  # else somebody has chosen another policy
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def keep_freed_memory(up_to: int = 32 << 20) -> None:
    """Tell glibc's malloc to keep what is freed for what is taken next; pieces of more than `up_to` bytes come and go.

    A step takes and frees the same tensors as the step before. By default much of that goes back to Linux each time and
    comes again page by page, cleared (docs/decisions/0008-freed-memory.md). The 32 MB are the most that every version
    takes (mallopt(3)). Whoever has set these two thresholds, or a tunable of malloc, is left in peace.
    """
    chosen = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} & os.environ.keys()
    if (
        not (chosen or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""))
        and platform.libc_ver()[0] == "glibc"
    ):
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(_M_MMAP_THRESHOLD, up_to):
            mallopt(_M_TRIM_THRESHOLD, -1)  # never


def _found() -> str:
    """CUDA where it is visible; else what an image for Trainium has, and XLA also where PJRT_DEVICE asks for it."""
    if torch.cuda.is_available():
        return "cuda"
    if find_spec("torch_xla") and (find_spec("libneuronxla") or os.environ.get("PJRT_DEVICE")):
        return "xla"
    return "neuron" if find_spec("torch_neuronx") else "cpu"


def _import(module: str, name: str, advice: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{name} cannot be imported here ({error}): {advice}, or give --device cpu"
        ) from error
