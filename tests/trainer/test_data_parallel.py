"""A wrapped model: the same methods and keys at every world size, and any input and output."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.data.sampler import GlobalBatchSampler, Shard
from ddp_trainer.ranks import data_parallel
from ddp_trainer.ranks.data_parallel import SYNC_BUFFERS, accumulate
from ddp_trainer.ranks.runtime import Runtime

from .every_rank import on_every_rank
from .small_data import FEATURES, difference, samples
from .until_step import train_until


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 10))


# The wrapper


@on_every_rank
def keys_of_a_wrapped_model(runtime):
    model = net()
    wrapped = runtime.wrap(model)
    assert wrapped.module is model
    assert isinstance(wrapped, DistributedDataParallel) == (runtime.world_size > 1)
    state = {name: value + 1 for name, value in wrapped.state_dict().items()}
    wrapped.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    outer = nn.ModuleDict({"inner": wrapped})
    return list(wrapped.state_dict()), list(outer.state_dict())


def test_the_keys_are_those_of_the_model_at_every_world_size(ranks, single):
    keys = list(net().state_dict())
    expected = (keys, [f"inner.{key}" for key in keys])
    assert ranks.first(keys_of_a_wrapped_model) == single.first(keys_of_a_wrapped_model) == expected


# Accumulation. 29 samples in batches of 16 and 13, in parts of three: the ranks have different
# numbers of parts.


def accumulated(runtime: Runtime, size: int, *, clip: float | None = None) -> list[torch.Tensor]:
    """Train on batches in parts of `size` samples, in float64. Return the gradients of each."""
    inputs, labels = samples(29)
    inputs = inputs.double()
    model = net().double()
    ddp = runtime.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for shard in GlobalBatchSampler(29, 16, runtime.rank, runtime.world_size, at_least=1):
        for part in accumulate(ddp, shard.split(size)):
            chosen = torch.from_numpy(part.indices)
            loss = F.cross_entropy(ddp(inputs[chosen]), labels[chosen], reduction="sum")
            (loss * (runtime.world_size / part.batch_size)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        runtime.step(optimizer)
    return gradients


@on_every_rank
def accumulated_and_whole(runtime):
    parts = [accumulated(runtime, size) for size in (1, 3, 100)]
    return *parts, accumulated(runtime, 3, clip=0.01)


def test_gradients_of_parts_are_those_of_the_large_batch(ranks, single):
    *_, expected, _ = single.first(accumulated_and_whole)
    for found in (
        *ranks.first(accumulated_and_whole)[:3],
        *single.first(accumulated_and_whole)[:2],
    ):
        for own, whole in zip(found, expected, strict=True):
            assert difference(own, whole) <= 1e-12


def test_clipping_sees_the_gradient_of_the_whole_batch(ranks, single):
    expected = single.first(accumulated_and_whole)[3]
    for found in ranks.values(accumulated_and_whole):
        for own, whole in zip(found[3], expected, strict=True):
            assert difference(own, whole) <= 1e-12
            assert float(own.norm()) == pytest.approx(0.01, rel=1e-3)


@on_every_rank
def exchanges(runtime):
    """Return how often the ranks exchanged gradients for a batch in three parts."""
    ddp = runtime.wrap(net())
    count = 0

    def note_and_keep(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal count
        count += 1
        kept: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        kept.set_result(bucket.buffer())
        return kept

    if isinstance(ddp, DistributedDataParallel):
        ddp.register_comm_hook(None, note_and_keep)
    for part in accumulate(ddp, samples(9)[0].split(3)):
        ddp(part).sum().backward()
    return count


def test_a_batch_in_parts_costs_one_exchange(ranks, single):
    assert ranks.values(exchanges) == [1] * ranks.count
    assert single.first(exchanges) == 0


def test_a_batch_without_parts_is_refused():
    with pytest.raises(ValueError, match="at least one part"):
        list(accumulate(Runtime().wrap(net()), []))


# Models and settings of all kinds. Each is trained in one piece and in two, with results equal bit
# by bit. To reach this, `warm_up` must leave DDP's buckets in their final order.


class ReturnsTuple(nn.Module):
    """A model with its own loss, as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.net(inputs)
        loss = None if labels is None else F.cross_entropy(logits, labels, reduction="sum")
        return logits, loss


class ReturnsDict(ReturnsTuple):
    """A model with named inputs and outputs, as those of transformers."""

    def forward(self, *, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.net(inputs)
        return {"loss": F.cross_entropy(logits, labels, reduction="sum"), "more": [logits, None]}


class SkipsParameters(nn.Module):
    """A model with some parameters that take no part in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.unused = nn.Linear(10, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


class RecomputesActivations(nn.Module):
    """A model that computes its hidden activations again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(lambda x: self.dropout(self.net[:2](x)), inputs, use_reentrant=False)
        return self.net[2](hidden)


class Quantises(nn.Module):
    """A model with a codebook in a buffer, learnt from the samples of its rank, as in VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("codebook", torch.linspace(-1, 1, 4 * 16).view(4, 16))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.net[:2](inputs)
        codes = torch.cdist(hidden.detach(), self.codebook).argmin(1)
        quantised = hidden + (self.codebook[codes] - hidden).detach()
        for code in codes.unique().tolist():
            self.codebook[code].lerp_(hidden[codes == code].detach().mean(0), 0.5)
        return self.net[2](quantised)


def loss_of_logits(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), labels, reduction="sum")


@dataclass(frozen=True)
class Kind:
    """One way to train: the model, its loss, DDP's settings, and what surrounds the passes."""

    model: Callable[[], nn.Module] = net
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = loss_of_logits
    settings: dict[str, Any] = field(default_factory=dict)
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_scaled: bool = False
    is_compiled: bool = False
    # Samples of a part of a batch.
    part_size: int = 100

    def warm_up(self, runtime: Runtime, ddp: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        runtime.warm_up(ddp, inputs)


class WithLabels(Kind):
    """A kind of model with the labels as a further input."""

    def warm_up(self, runtime: Runtime, ddp: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        runtime.warm_up(ddp, inputs, labels, loss=lambda output: output[1])


class WithNames(Kind):
    """A model with named inputs and outputs."""

    def warm_up(self, runtime: Runtime, ddp: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        runtime.warm_up(ddp, inputs=inputs, labels=labels)


KINDS = {
    "returns a tuple": WithLabels(
        ReturnsTuple, lambda model, inputs, labels: model(inputs, labels)[1]
    ),
    "returns a tuple with None": Kind(
        ReturnsTuple,
        lambda model, inputs, labels: F.cross_entropy(model(inputs)[0], labels, reduction="sum"),
    ),
    "returns a dict": WithNames(
        ReturnsDict, lambda model, inputs, labels: model(inputs=inputs, labels=labels)["loss"]
    ),
    "does not use all parameters": Kind(SkipsParameters, settings={"find_unused_parameters": True}),
    "accumulates gradients": Kind(part_size=2),
    "learns a codebook in a buffer": Kind(Quantises),
    "has a static graph": Kind(settings={"static_graph": True}),
    "recomputes activations": Kind(RecomputesActivations),
    "is compiled": Kind(is_compiled=True),
    "computes in bf16": Kind(precision=lambda: torch.autocast("cpu", torch.bfloat16)),
    "scales its gradients": Kind(
        precision=lambda: torch.autocast("cpu", torch.float16), is_scaled=True
    ),
}


def train(runtime: Runtime, kind: Kind, steps: int, folder: Path | None) -> Tensor:
    """Train for `steps` steps, from a checkpoint if there is one. Return all parameters."""
    inputs, labels = samples(29)
    model = kind.model()
    # Inductor would need a compiler and half a minute. What DDP sees is the same with this backend.
    trained = torch.compile(model, backend="aot_eager") if kind.is_compiled else model
    ddp = runtime.wrap(trained, **kind.settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=kind.is_scaled)
    sampler = GlobalBatchSampler(29, 8, runtime.rank, runtime.world_size)
    with kind.precision():
        kind.warm_up(runtime, ddp, inputs[:2], labels[:2])
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler, "scaler": scaler}

    def train_step(shard: Shard) -> None:
        for part in accumulate(ddp, shard.split(kind.part_size)):
            chosen = torch.from_numpy(part.indices)
            with kind.precision():
                loss_sum = kind.loss(ddp, inputs[chosen], labels[chosen])
            scaler.scale(loss_sum * (runtime.world_size / shard.batch_size)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    train_until(steps, Checkpoints(folder, runtime, parts), sampler, train_step)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@on_every_rank
def every_kind(runtime):
    """Return (the parameters after training in one piece, and in two) for each kind."""
    found = {}
    for name, kind in KINDS.items():
        torch.manual_seed(1)
        whole = train(runtime, kind, 6, None)
        torch.manual_seed(1)
        folder = Path(name.replace(" ", "-"))
        train(runtime, kind, 2, folder)
        found[name] = whole, train(runtime, kind, 6, folder)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_training_in_two_pieces_is_bit_equal(ranks, single, kind):
    for found in [*ranks.values(every_kind), single.first(every_kind)]:
        whole, pieces = found[kind]
        assert torch.equal(whole, pieces)
        assert not torch.equal(whole, nn.utils.parameters_to_vector(net().parameters()))


# The synchronisation of buffers


class OwnBatchNorm(nn.BatchNorm1d):
    """A BatchNorm. Its training may read the running statistics."""


SYNCHRONISED = {
    "no buffers": (net, {}, False),
    "BatchNorm": (lambda: nn.Sequential(net(), nn.BatchNorm1d(10)), {}, False),
    "a subclass": (lambda: OwnBatchNorm(10), {}, True),
    "a codebook": (Quantises, {}, True),
    "asked for": (lambda: nn.BatchNorm1d(10), {"forward_sync_buffers": True}, True),
    "asked for by its former name": (lambda: nn.BatchNorm1d(10), {"broadcast_buffers": True}, True),
    "refused": (Quantises, {"forward_sync_buffers": False}, False),
    "refused by its former name": (Quantises, {"broadcast_buffers": False}, False),
}


@on_every_rank
def buffers_synchronised(runtime):
    if runtime.world_size == 1:
        return {}
    models = {name: runtime.wrap(make(), **own) for name, (make, own, _) in SYNCHRONISED.items()}
    return {name: bool(getattr(ddp, SYNC_BUFFERS)) for name, ddp in models.items()}


@pytest.mark.skipif(
    SYNC_BUFFERS not in data_parallel.options_of_ddp(), reason="torch before 2.13 has another name"
)
def test_buffers_are_synchronised_unless_all_are_statistics_or_the_user_decides(ranks):
    expected = {name: synchronised for name, (*_, synchronised) in SYNCHRONISED.items()}
    for found in ranks.values(buffers_synchronised):
        assert found == expected


def test_a_former_torch_gets_the_option_under_its_former_name(monkeypatch):
    monkeypatch.setattr(data_parallel, "options_of_ddp", lambda: {"broadcast_buffers": None})
    for settings, expected in (({}, False), ({"forward_sync_buffers": True}, True)):
        found = data_parallel.ddp_settings(nn.BatchNorm1d(3), **settings)
        assert found == {"gradient_as_bucket_view": True, "broadcast_buffers": expected}


def test_an_output_without_a_gradient_is_refused():
    model = nn.ReLU()
    with pytest.raises(ValueError, match="no tensor with a gradient, but is Tensor; pass loss="):
        Runtime().warm_up(model, torch.ones(2))
