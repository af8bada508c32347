"""The device layer: the differences between kinds of hardware.

cpu     gloo
cuda    NVIDIA GPUs, NCCL
neuron  AWS Trainium 2 and 3 with TorchNeuron (torch 2.13 and newer), a device like CUDA
xla     torch_xla (last release: 2.9): AWS Trainium 1, Google TPU, or PJRT on a CPU

Workloads are the same on all four: they ask the Runtime. torch_xla and torch_neuronx are imported
only if they are chosen. docs/workloads/xla.md says what was tested where.
"""

import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from ddp_trainer.errors import RetryableError, UserError
from ddp_trainer.ranks import generators

# Settings of NCCL's flight recorder, each with its name, its older name, and its value: the number
# of remembered collectives, writing them after a timeout, and the file. NCCL appends the rank to
# the name of the file.
RECORD_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
FLIGHT_RECORDER = {
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
    ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
    RECORD_FILE: f"{tempfile.gettempdir()}/nccl_trace_rank_",
}

# CPU instructions that multiply bfloat16.
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")


class Hardware:
    """The CPU, and the defaults of the other kinds.

    - `backend`: as init_process_group takes it. It must carry tensors on the CPU too, or
      `needs_cpu_group` is True.
    - `pairs`: two ranks can communicate without the others.
    - `wants_equal_shapes`: batches of different sizes, over time or between ranks, should be
      avoided.
    - `sums`: the type of sums of losses and counts.
    - `fused_optimizers`: one pass over each parameter instead of one per operation; None lets torch
      choose.
    """

    name = "cpu"
    backend = "gloo"
    needs_cpu_group = False
    pairs = True
    wants_equal_shapes = False
    sums = torch.float64
    fused_optimizers: bool | None = True

    def prepare(self, local_rank: int, each: int) -> None:
        """Set up the process before it joins the process group.

        Raises UserError if a process with `each` devices would lack one.
        """

    def describe_record(self, rank: int) -> str:
        """Return a sentence on the record of a rank's last collectives, after a timeout."""
        return ""

    def take(self, local_rank: int, each: int) -> torch.device:
        """Make the (first) device of this process the current one, and return it.

        It is called after the process has joined the group.
        """
        return torch.device("cpu")

    def check_world(self, rank: int, world_size: int) -> None:
        """Raise UserError if the hardware has other ranks. It is called after `take`."""

    def seed(self, seed: int) -> None:
        """Seed all random number generators of this process: of torch, numpy and `random`."""
        torch.manual_seed(seed)
        generators.seed_all(seed)

    def computes_in_bf16(self) -> bool:
        """Return True if the hardware multiplies bfloat16.

        Otherwise autocast would only convert, and be slower.
        """
        if not hasattr(torch.cpu, "get_capabilities"):
            return False
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name) for name in BF16_INSTRUCTIONS)

    def image_layout(self, *, bf16: bool) -> torch.memory_format:
        """Return the memory format of images and weights for the fastest convolutions.

        Convert weights by `model.to(memory_format=…)` before `Runtime.wrap`, never after it. In
        `wrap`, DDP gives gradients the order of the parameters. The CPU's fused optimizers go
        through parameter, gradient and momentum in memory order: if the orders differ, they compute
        wrong values without an error (seen with torch 2.13).
        """
        return torch.channels_last

    def end_step(self) -> None:
        """Run what was only recorded so far, after a training step or a batch of an evaluation."""

    def wait(self) -> None:
        """Wait until the device has finished all its work."""

    def random_state(self) -> dict[str, Any]:
        """Return the states of the random number generators, for a checkpoint."""
        return {"cpu": torch.get_rng_state(), **generators.read_states()}

    def set_random_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `random_state`. States of other kinds of hardware are ignored."""
        torch.set_rng_state(state["cpu"])
        generators.set_states(state)

    @contextmanager
    def random_state_kept(self) -> Iterator[None]:
        """Restore the random number generators at the end of the block."""
        state = self.random_state()
        try:
            yield
        finally:
            self.set_random_state(state)


class Accelerator(Hardware):
    """A device with a name and a number, and a module `torch.<name>`."""

    def prepare(self, local_rank: int, each: int) -> None:
        found = self._module.device_count()
        if (local_rank + 1) * each > found:
            wanted = "a device" if each == 1 else f"{each} devices"
            raise RetryableError(
                f"LOCAL_RANK {local_rank} needs {wanted} of kind {self.name}, but this process "
                f"sees {found} in all; start fewer processes per node, or choose the device cpu"
            )

    def take(self, local_rank: int, each: int) -> torch.device:
        device = torch.device(self.name, local_rank * each)
        self._module.set_device(device)
        return device

    def wait(self) -> None:
        self._module.synchronize()

    def random_state(self) -> dict[str, Any]:
        return super().random_state() | {self.name: self._module.get_rng_state()}

    def set_random_state(self, state: dict[str, Any]) -> None:
        super().set_random_state(state)
        if self.name in state:
            self._module.set_rng_state(state[self.name])

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.name)


class Cuda(Accelerator):
    """NVIDIA GPUs. gloo carries tensors on the CPU: signals, and checkpoints sent to the ranks."""

    name = "cuda"
    backend = "cpu:gloo,cuda:nccl"

    def prepare(self, local_rank: int, each: int) -> None:
        super().prepare(local_rank, each)
        for names, value in FLIGHT_RECORDER.items():
            # A value of the user is kept, also under the older name.
            if not any(name in os.environ for name in names):
                os.environ[names[0]] = value
        # Before NCCL starts, so none of its memory is taken from GPU 0.
        self.take(local_rank, each)

    def describe_record(self, rank: int) -> str:
        prefix = next(os.environ[name] for name in RECORD_FILE if name in os.environ)
        return (
            f"NCCL writes this rank's last collectives to {prefix}{rank}; torchfrtrace reads such "
            "files of all ranks"
        )

    def computes_in_bf16(self) -> bool:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def image_layout(self, *, bf16: bool) -> torch.memory_format:
        # PyTorch's guide recommends channels_last for Tensor Cores. No GPU was measured.
        return torch.channels_last if bf16 else torch.contiguous_format


class Neuron(Accelerator):
    """Trainium 2 and 3 with TorchNeuron. Each process has the NeuronCore of its LOCAL_RANK."""

    name = "neuron"
    backend = "cpu:gloo,neuron:neuron"
    # NeuronCores have no float64.
    sums = torch.float32
    fused_optimizers = None

    def __init__(self) -> None:
        _require_module("torch_neuronx", "TorchNeuron", "use the image that AWS publishes for it")
        if not hasattr(torch, "neuron"):
            raise UserError(
                "this torch_neuronx is the older one, which works through torch_xla; choose "
                "the device xla"
            )

    def computes_in_bf16(self) -> bool:
        return True

    def image_layout(self, *, bf16: bool) -> torch.memory_format:
        # The compiler chooses layouts.
        return torch.contiguous_format


class Xla(Hardware):
    """The device in PJRT_DEVICE, with torch_xla: a step is recorded, then compiled and run.

    torchrun and --spawn set the same variables. With them, torch_xla gives each process of a node
    the core of its LOCAL_RANK. Its process group carries no tensors of the CPU, so a second group
    with gloo does.
    """

    name = "xla"
    backend = "xla"
    needs_cpu_group = True
    pairs = False
    # torch_xla needs the same graph on all ranks, and compiles each new one.
    wants_equal_shapes = True
    # Neither Trainium nor TPU has float64.
    sums = torch.float32
    fused_optimizers = None

    def __init__(self) -> None:
        advice = "pip install torch==2.9.0 torch_xla==2.9.0"
        _require_module("torch_xla", "torch_xla", advice)
        self._xla = importlib.import_module("torch_xla")
        self._runtime = importlib.import_module("torch_xla.runtime")
        self._model = importlib.import_module("torch_xla.core.xla_model")
        # This import registers the backend "xla" and the init method xla://.
        importlib.import_module("torch_xla.distributed.xla_backend")

    def prepare(self, local_rank: int, each: int) -> None:
        if each > 1:
            raise UserError(
                f"this workload needs {each} devices per process, but torch_xla gives each process "
                "one core; run it on GPUs, or choose the device cpu"
            )

    def take(self, local_rank: int, each: int) -> torch.device:
        # The device has the number 0 in every process, because a process sees only its own.
        device: torch.device = self._xla.device()
        # The init method xla:// does this too. Without it, torch_xla assumes a world size of 1, and
        # its all-reduce does nothing.
        self._model.set_replication(device, self._model.get_xla_supported_devices())
        return device

    def check_world(self, rank: int, world_size: int) -> None:
        xla_rank = self._runtime.global_ordinal()
        xla_world_size = self._runtime.world_size()
        if (xla_rank, xla_world_size) == (rank, world_size):
            return
        kind = self._runtime.device_type()
        if kind == "CPU":
            advice = "PJRT on a CPU supports one process only, so start one"
        else:
            advice = (
                "start as many processes per node as it has cores, and on a TPU use "
                "the init method xla://"
            )
        raise UserError(
            f"this process is rank {rank} of {world_size}, but torch_xla on {kind} counts it as "
            f"rank {xla_rank} of {xla_world_size}; {advice}"
        )

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self._xla.manual_seed(seed)

    def computes_in_bf16(self) -> bool:
        return bool(self._runtime.device_type() != "CPU")

    def image_layout(self, *, bf16: bool) -> torch.memory_format:
        # The compiler chooses layouts.
        return torch.contiguous_format

    def end_step(self) -> None:
        self._xla.sync()

    def wait(self) -> None:
        self._xla.sync(wait=True)
        self._model.wait_device_ops()

    def random_state(self) -> dict[str, Any]:
        # XLA's state is an unsigned 64-bit number. A tensor of eight bytes can hold it.
        state = int(self._model.get_rng_state()).to_bytes(8, "little")
        return super().random_state() | {"xla": torch.tensor(list(state), dtype=torch.uint8)}

    def set_random_state(self, state: dict[str, Any]) -> None:
        super().set_random_state(state)
        if "xla" in state:
            self._model.set_rng_state(int.from_bytes(bytes(state["xla"].tolist()), "little"))


KINDS: dict[str, type[Hardware]] = {"cpu": Hardware, "cuda": Cuda, "xla": Xla, "neuron": Neuron}


def choose(name: str) -> Hardware:
    """Return the hardware of this name; `auto` is what this process finds.

    Raises UserError if it does not exist here.
    """
    found = _find() if name == "auto" else name
    if found not in KINDS:
        raise UserError(f"device {name!r}: expected auto, {', '.join(KINDS)}")
    if found == "cuda" and not torch.cuda.is_available():
        raise RetryableError(
            "device cuda: PyTorch finds no GPU; check nvidia-smi, or choose the device cpu"
        )
    return KINDS[found]()


def _find() -> str:
    """Return CUDA if it is visible, else the kind of Trainium or TPU, else the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    # An image for Trainium 1 has libneuronxla. PJRT_DEVICE asks for XLA on other hardware.
    wants_xla = find_spec("libneuronxla") or os.environ.get("PJRT_DEVICE")
    if find_spec("torch_xla") and wants_xla:
        return "xla"
    return "neuron" if find_spec("torch_neuronx") else "cpu"


def _require_module(module: str, name: str, advice: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{name} cannot be imported ({error}); {advice}, or choose the device cpu"
        ) from error
