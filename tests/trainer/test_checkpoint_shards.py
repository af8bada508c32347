"""Checkpoints of a model sharded by FSDP2: every rank writes and reads its own part."""

import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from ddp_trainer.checkpoint import shard_writer
from ddp_trainer.checkpoint import shards as checkpoint_shards
from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.checkpoint.claim import Claim, TakenOver
from ddp_trainer.checkpoint.folder import INDEX, Retention
from ddp_trainer.checkpoint.listing import listed
from ddp_trainer.checkpoint.shards import ShardedState
from ddp_trainer.checkpoint.staging import Staging
from ddp_trainer.checkpoint.weights import read_part
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.errors import UserError
from ddp_trainer.ranks.runtime import Runtime

from . import launch
from .every_rank import Outcomes, on_every_rank

SAMPLES = 24


@pytest.fixture(scope="module")
def ranks(launched) -> Outcomes:
    """Return what the marked functions returned on each of two ranks."""
    return launched(2)


class Job:
    """A sharded model with its optimizer, and parts without shards.

    The first layer has fewer rows than there may be ranks, so a rank may have none of them.
    """

    def __init__(self, runtime: Runtime, folder: Path | str, width: int = 5, **options) -> None:
        torch.manual_seed(1)
        self.runtime = runtime
        layers = [nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, width), nn.BatchNorm1d(width)]
        self.model = nn.Sequential(*layers, nn.Linear(width, 1))
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.checkpoints = Checkpoints(folder, runtime, parts, **options)
        self.step = self.checkpoints.restore()

    def train(self, until: int) -> "Job":
        while self.step < until:
            data = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(self.step))
            own = data.chunk(self.runtime.world_size)[self.runtime.rank]
            self.model(own).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
        return self

    def save(self) -> Path | None:
        path = self.checkpoints.save(self.step)
        self.checkpoints.wait()
        return path

    def state(self) -> list[torch.Tensor]:
        """Return the whole parameters and momenta."""
        momenta = [state["exp_avg"] for state in self.optimizer.state.values()]
        return [tensor.full_tensor() for tensor in (*self.model.parameters(), *momenta)]


def are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# One number of ranks


@on_every_rank
def in_pieces_and_whole(runtime):
    whole = Job(runtime, "whole").train(7).state()
    for until in (2, 5):
        Job(runtime, "pieces").train(until).save()
    pieces = Job(runtime, "pieces").train(7)
    return are_equal(pieces.state(), whole), pieces.optimizer.param_groups[0]["lr"]


def test_a_run_in_pieces_is_bit_equal_to_an_unbroken_one(ranks):
    for is_equal, learning_rate in ranks.values(in_pieces_and_whole):
        assert is_equal
        assert learning_rate == pytest.approx(1e-5)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def forget_the_shards(path: Path) -> None:
    torch.save({**torch.load(path, weights_only=True), "shards": {"a": "b"}}, path)


# What happens to a checkpoint, to which file of it, and how it is reported.
DAMAGE = {
    "altered": (flip_a_byte, "shard-00002*", "the checksum of shard-00002"),
    "cut": (cut, "shard-00001*", "bytes instead of"),
    "removed": (Path.unlink, "shard-00002*", "No such file or directory"),
    "index cut": (cut, INDEX, "not a zip file"),
    "index removed": (Path.unlink, INDEX, f"{INDEX}: No such file or directory"),
    "index without shards": (forget_the_shards, INDEX, "does not list the shards"),
    "more shards": (
        lambda path: shutil.copy(path, path.with_name("shard-9.safetensors")),
        "shard-00001*",
        "does not list shard-9.safetensors",
    ),
}


@on_every_rank
def after_damage(runtime):
    """Return the step of a start after each damage, and the names in the folder."""
    found = {}
    for name, (damage, file, _) in DAMAGE.items():
        folder = Path("damage") / name.replace(" ", "-")
        job = Job(runtime, folder).train(1)
        job.save()
        good = job.state()
        path = job.train(2).save()
        if path:
            damage(next(path.glob(file)))
        runtime.barrier()
        again = Job(runtime, folder)
        found[name] = again.step, are_equal(again.state(), good), names_in(folder)
    return found


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_replaced_by_the_one_before_it(ranks, damage):
    for found in ranks.values(after_damage):
        step, is_equal, names = found[damage]
        assert (step, is_equal) == (1, True)
        assert names == ["step-g0001-0000000001.sharded", "step-g0001-0000000002.unreadable"]


@on_every_rank
def error_without_a_readable_checkpoint(runtime):
    return message_of(lambda: only_damaged(runtime))


def only_damaged(runtime: Runtime) -> None:
    path = Job(runtime, "unreadable").train(1).save()
    if path:
        flip_a_byte(next(path.glob("shard-00002*")))
    runtime.barrier()
    Job(runtime, "unreadable")


def message_of(action) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return "no error"


def test_without_a_readable_checkpoint_no_rank_starts_again_silently(ranks):
    for error in ranks.values(error_without_a_readable_checkpoint):
        assert re.search(
            r"no checkpoint in .*/unreadable can be read .the checksum of shard-0", error
        )


@on_every_rank
def errors_of_other_models(runtime):
    Job(runtime, "narrow").train(1).save()
    plain = {"model": nn.Linear(1, 1)}
    first = Checkpoints("plain", runtime, plain)
    first.save(1)
    first.wait()
    return [
        message_of(lambda: Job(runtime, "narrow", width=7)),
        message_of(Checkpoints("narrow", runtime, plain).restore),
        message_of(lambda: Job(runtime, "plain")),
    ]


def test_another_model_is_refused(ranks):
    shape = "does not fit this model (model.2.weight has the shape [5, 3] in the"
    for other_shape, not_sharded, sharded in ranks.values(errors_of_other_models):
        assert shape in other_shape
        assert "made with a model that is sharded, but this run's model is not" in not_sharded
        assert "made with a model that is not sharded, but this run's model is" in sharded


@on_every_rank
def how_often_the_ranks_plan(runtime):
    job = Job(runtime, "planned", retention=Retention(newest=4))
    planned = []
    save = shard_writer.save

    def count_and_save(*arguments, **options):
        planned.append(job.step)
        return save(*arguments, **options)

    shard_writer.save = count_and_save
    try:
        for step in (1, 2, 3):
            job.train(step).save()
        expected = job.state()
        # The tensors of only one rank are others than before.
        if runtime.rank == runtime.world_size - 1:
            job.model[3].running_mean = torch.zeros(5, dtype=torch.float64)
        job.step = 4
        job.save()
    finally:
        shard_writer.save = save
    job.step = job.checkpoints.restore(3)
    return planned, are_equal(job.state(), expected)


def test_the_ranks_plan_anew_only_if_tensors_have_changed(ranks):
    for planned, is_equal in ranks.values(how_often_the_ranks_plan):
        assert planned == [1, 4]
        assert is_equal


@on_every_rank
def what_a_refused_restore_changes(runtime):
    def a_start(folder, job, count):
        own = torch.optim.AdamW(list(job.model.parameters())[:count], lr=0.5)
        sampler = GlobalBatchSampler(8, 2)
        parts = {"sampler": sampler, "model": job.model, "optimizer": own}
        return sampler, Checkpoints(folder, runtime, parts)

    job, other = Job(runtime, "trained").train(3), Job(runtime, "untrained").train(1)
    before = [tensor.clone() for tensor in other.state()]
    found = []
    for count, other_count in ((2, 4), (4, 2)):
        sampler, checkpoints = a_start(f"refused-{count}", job, count)
        next(iter(sampler))
        job.model(torch.ones(4, 8)).sum().backward()
        checkpoints._parts["optimizer"].step()
        checkpoints.save(1)
        checkpoints.wait()
        sampler, checkpoints = a_start(f"refused-{count}", other, other_count)
        found.append((message_of(checkpoints.restore), sampler.offset))
    return found, are_equal(other.state(), before)


def test_a_refused_restore_changes_no_shard(ranks):
    for found, is_equal in ranks.values(what_a_refused_restore_changes):
        (more, offset), (fewer, other_offset) = found
        assert "only the optimizer of this run has 2.bias" in more
        assert "optimizer.state.2.weight.step has the shape [] in the checkpoint and None" in fewer
        assert (offset, other_offset, is_equal) == (0, 0, True)


@on_every_rank
def error_of_a_rank_that_cannot_write(runtime):
    job = Job(runtime, "full").train(1)
    job.save()
    job.train(2).checkpoints.save(2)
    # The thread may have written already, so the next write fails.
    job.checkpoints.wait()
    write = Staging.write

    def fail(staging, folder, rank):
        if rank == 1:
            raise OSError(28, "No space left on device")
        return write(staging, folder, rank)

    Staging.write = fail
    try:
        return message_of(job.train(3).save), names_in(Path("full"))
    finally:
        Staging.write = write


def test_all_ranks_raise_the_error_of_one_that_cannot_write(ranks):
    for error, names in ranks.values(error_of_a_rank_that_cannot_write):
        assert "rank 1: " in error
        assert "No space left on device" in error
        assert names == [f"step-g0001-000000000{step}.sharded" for step in (1, 2)]


@on_every_rank
def what_retention_keeps(runtime):
    job = Job(runtime, "kept", retention=Retention(newest=1, every=4))
    for step, score in ((1, 0.5), (2, 0.9), (4, 0.1), (5, 0.2), (6, 0.3)):
        job.train(step).checkpoints.save(step, score=score)
    # The step is saved already.
    job.checkpoints.save_once(6)
    error = message_of(job.save)
    return names_in(Path("kept")), Job(runtime, "kept").step, error


def test_the_newest_the_best_and_every_fourth_are_kept(ranks):
    for names, step, error in ranks.values(what_retention_keeps):
        steps = ("0000000002", "0000000004", "0000000006")
        assert names == [f"step-g0001-{step}.sharded" for step in steps]
        assert step == 6
        assert "step 6 is not above 6" in error


@on_every_rank
def error_of_an_older_start(runtime):
    job = Job(runtime, "fenced").train(1)
    job.save()
    runtime.on_main(lambda: Claim.take(Path("fenced")).number)
    try:
        job.train(2).save()
    except TakenOver:
        return "taken over", names_in(Path("fenced"))


def test_an_older_start_writes_nothing(ranks):
    for found in ranks.values(error_of_an_older_start):
        assert found == ("taken over", ["step-g0001-0000000001.sharded"])


@on_every_rank
def error_of_a_start_that_is_taken_over_during_a_save(runtime):
    """Pause a start in a save, take it over, and return the names in its folder."""
    job = Job(runtime, "paused").train(1)
    job.save()
    read = ShardedState.read_saved

    def pause_and_read(state):
        # Each rank has seen the draft. The other start removes it.
        runtime.barrier()
        runtime.on_main(lambda: Claim.take(Path("paused")).number)
        return read(state)

    ShardedState.read_saved = pause_and_read
    try:
        job.train(2).save()
    except TakenOver:
        return sorted(path.name for path in Path("paused").iterdir())
    finally:
        ShardedState.read_saved = read


def test_a_start_that_is_taken_over_during_a_save_does_not_come_back(ranks):
    for names in ranks.values(error_of_a_start_that_is_taken_over_during_a_save):
        assert names == [".claim-g0002", "step-g0001-0000000001.sharded"]


# What is not sharded, and what has no state


@on_every_rank
def plain_part_beside_a_sharded_model(runtime):
    """Change a plain part while a thread writes the checkpoint, and return the restored value."""
    job = Job(runtime, "beside").train(1)
    plain = nn.Linear(1, 1)
    nn.init.constant_(plain.weight, 1.0)
    parts = {"model": job.model, "plain": plain}
    changed = threading.Event()
    write = Staging.write

    def wait_and_write(staging, folder, rank):
        assert changed.wait(30)
        return write(staging, folder, rank)

    Staging.write = wait_and_write
    try:
        checkpoints = Checkpoints("beside-plain", runtime, parts)
        checkpoints.save(1)
        nn.init.constant_(plain.weight, 2.0)
        changed.set()
        checkpoints.wait()
    finally:
        Staging.write = write
    Checkpoints("beside-plain", runtime, parts).restore()
    return plain.weight.item()


def test_a_plain_part_is_saved_as_it_was_at_the_save(ranks):
    assert ranks.values(plain_part_beside_a_sharded_model) == [1.0, 1.0]


class PartlyUsed(nn.Module):
    """A model with a layer that gets no gradient."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.used(inputs)


@on_every_rank
def parameters_with_state(runtime):
    """Return how many parameters have state before and after a save, and after a restore."""

    def a_job():
        torch.manual_seed(1)
        model = PartlyUsed()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        parts = {"model": model, "optimizer": optimizer}
        checkpoints = Checkpoints("partly", runtime, parts)
        return model, optimizer, checkpoints, checkpoints.restore()

    def train(model, optimizer):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return sum(parameter.full_tensor().sum().item() for parameter in model.parameters())

    model, optimizer, checkpoints, _ = a_job()
    checkpoints.save(0)
    counts = [len(optimizer.state)]
    train(model, optimizer)
    counts.append(len(optimizer.state))
    checkpoints.save(1)
    expected = train(model, optimizer)
    checkpoints.wait()
    model, optimizer, _, step = a_job()
    counts.append(len(optimizer.state))
    return counts, step, train(model, optimizer) == expected


def test_parameters_without_state_stay_without_it(ranks):
    for counts, step, is_equal in ranks.values(parameters_with_state):
        assert counts == [0, 2, 2]
        assert (step, is_equal) == (1, True)


@on_every_rank
def names_after_a_failed_read(runtime):
    """Return what a restore does if the storage of one rank fails."""
    job = Job(runtime, "storage").train(1)
    job.save()
    job.train(2).save()
    measure = checkpoint_shards.measure

    def fail(path):
        if "0000000002" in path.parent.name:
            raise OSError(5, "Input/output error")
        return measure(path)

    checkpoint_shards.measure = fail
    try:
        return Job(runtime, "storage").step, names_in(Path("storage"))
    finally:
        checkpoint_shards.measure = measure


def test_a_checkpoint_is_not_set_aside_if_the_storage_fails(ranks):
    for step, names in ranks.values(names_after_a_failed_read):
        assert step == 1
        assert names == [f"step-g0001-000000000{step}.sharded" for step in (1, 2)]


@on_every_rank
def whole_weights(runtime):
    job = Job(runtime, "export").train(2)
    found = read_part(runtime.broadcast(job.save()))
    assert found.keys() == job.model.state_dict().keys()
    # BatchNorm's statistics are those of rank 0.
    parameters = job.model.named_parameters()
    return all(torch.equal(found[name], value.full_tensor()) for name, value in parameters)


def test_the_whole_weights_can_be_read_from_the_shards(ranks):
    assert ranks.values(whole_weights) == [True, True]


@on_every_rank
def after_a_roll_back(runtime):
    """Go back one step, train this step again, and return the step and what was saved."""
    job = Job(runtime, "rolled-back").train(1)
    job.save()
    job.train(2).save()
    expected = job.state()
    job.step = job.checkpoints.restore(1)
    step = job.step
    job.train(2).save()
    again = Job(runtime, "rolled-back")
    is_equal = are_equal(job.state(), expected) and are_equal(again.state(), expected)
    return step, is_equal, names_in(Path("rolled-back"))


def test_a_sharded_run_goes_back_to_an_earlier_step(ranks):
    for step, is_equal, names in ranks.values(after_a_roll_back):
        assert (step, is_equal) == (1, True)
        # Step 2 of the first try is given up.
        assert names == ["step-g0001-0000000001.sharded", "step-g0002-0000000002.sharded"]


@on_every_rank
def saved_after_an_evaluation(runtime):
    """Restore one FSDP2 module saved after an evaluation: its parameters are whole then."""

    def a_job():
        model = nn.Linear(4, 2)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        parts = {"model": model, "optimizer": optimizer}
        return model, optimizer, Checkpoints("evaluated", runtime, parts)

    model, optimizer, checkpoints = a_job()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(2, 4))
    checkpoints.save(1)
    checkpoints.wait()
    expected = model.weight.full_tensor()
    model, optimizer, checkpoints = a_job()
    step = checkpoints.restore()
    return step, torch.equal(model.weight.full_tensor(), expected), len(optimizer.state)


def test_a_model_is_saved_after_an_evaluation(ranks):
    for found in ranks.values(saved_after_an_evaluation):
        assert found == (1, True, 2)


# Several models, and some of the parts


def two_models(runtime, folder, **options):
    """Return a generator and its critic with one optimizer, and the checkpoints."""
    torch.manual_seed(1)
    models = {"generator": nn.Linear(4, 4), "critic": nn.Linear(4, 1)}
    for model in models.values():
        fully_shard(model)
    parameters = [parameter for model in models.values() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    checkpoints = Checkpoints(folder, runtime, {**models, "optimizer": optimizer}, **options)
    return models, optimizer, checkpoints


def train_both(models, optimizer):
    models["critic"](models["generator"](torch.ones(2, 4))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    parameters = [parameter for model in models.values() for parameter in model.parameters()]
    return [parameter.full_tensor().detach() for parameter in parameters]


@on_every_rank
def one_optimizer_of_two_models(runtime):
    models, optimizer, checkpoints = two_models(runtime, "both")
    before = train_both(models, optimizer)
    path = runtime.broadcast(checkpoints.save(1))
    expected = train_both(models, optimizer)
    checkpoints.wait()
    models, optimizer, checkpoints = two_models(runtime, "both")
    step = checkpoints.restore()
    is_equal = are_equal(train_both(models, optimizer), expected)

    # Only one of the models.
    models, optimizer, checkpoints = two_models(runtime, "both")
    critic = next(models["critic"].parameters()).full_tensor().detach()
    checkpoints.restore(1, parts=["generator"])
    is_partial = torch.equal(next(models["generator"].parameters()).full_tensor(), before[0])
    is_partial &= torch.equal(next(models["critic"].parameters()).full_tensor(), critic)
    is_partial &= not optimizer.state

    # The whole weights of another run, as initial ones.
    weights = read_part(path, "generator")
    options = StateDictOptions(full_state_dict=True)
    models, optimizer, _ = two_models(runtime, None)
    set_model_state_dict(models["generator"], weights, options=options)
    is_initial = torch.equal(next(models["generator"].parameters()).full_tensor(), before[0])

    parts = {"generator": models["generator"], "optimizer": optimizer}
    alone = message_of(lambda: Checkpoints("alone", runtime, parts).save(1))
    return step, is_equal, is_partial, is_initial, alone


def test_one_optimizer_may_have_the_parameters_of_two_models(ranks):
    for step, is_equal, is_partial, is_initial, alone in ranks.values(one_optimizer_of_two_models):
        assert (step, is_equal) == (1, True)
        assert is_partial
        assert is_initial
        assert "optimizer has 2 parameters of models that are no parts of the checkpoint" in alone


@on_every_rank
def a_new_sharded_part(runtime):
    """Return the step and the weight of a part missing in the checkpoint."""
    job = Job(runtime, "new-part").train(1)
    job.save()
    ema = nn.Linear(8, 3)
    fully_shard(ema)
    nn.init.constant_(ema.weight, 5.0)
    parts = {"model": job.model, "optimizer": job.optimizer, "ema": ema}
    checkpoints = Checkpoints("new-part", runtime, parts)
    refused = message_of(checkpoints.restore)
    return refused, checkpoints.restore(new_parts=["ema"]), ema.weight.full_tensor().mean().item()


def test_a_new_sharded_part_keeps_its_state_if_it_is_expected(ranks):
    for refused, step, weight in ranks.values(a_new_sharded_part):
        assert "has no state of this ema" in refused
        assert (step, weight) == (1, 5.0)


@on_every_rank
def list_after_damage(runtime):
    path = runtime.broadcast(Job(runtime, "listed").train(1).save())
    whole, size = listed("listed")[0], sum(file.stat().st_size for file in path.iterdir())
    runtime.barrier()
    if runtime.is_main:
        cut(path / "shard-00002.safetensors")
    runtime.barrier()
    return whole.fault, whole.size == size, listed("listed")[0].fault


def test_a_sharded_checkpoint_is_listed(ranks):
    found = ranks.first(list_after_damage)
    assert found == ("", True, "shard-00002.safetensors is not complete")


# Other numbers of ranks

TRAINING = """
import json, sys
from ddp_trainer.ranks.group import process_group
from trainer.test_checkpoint_shards import Job

with process_group(device="cpu") as runtime:
    job = Job(runtime, sys.argv[1])
    before = [tensor.double().sum().item() for tensor in job.state()] if job.step else []
    begin = job.step
    job.train(int(sys.argv[2])).save()
    after = [tensor.double().sum().item() for tensor in job.state()]
    if runtime.is_main:
        line = {"event": "done", "begin": begin, "before": before, "after": after}
        print(json.dumps(line), flush=True)
"""


def test_other_numbers_of_ranks_continue_with_the_same_state(tmp_path):
    after: list[float] = []
    for number, processes in enumerate((2, 4, 1, 3)):
        runs = launch.ranks(
            "-c",
            TRAINING,
            tmp_path,
            2 * number + 2,
            processes=processes,
            PYTHONPATH=Path(__file__).parents[1],
        )
        assert launch.finish(runs) == [0] * processes, "\n".join(run.stderr for run in runs)
        (done,) = runs[0].of("done")
        assert done["begin"] == 2 * number
        assert done["before"] == after
        after = done["after"]
