"""A Runtime on the script's own process group, with a loop of its own and FSDP2.

The ranks of one launch train a whole run, a run stopped by a signal, and its continuation.
"""

import os
import random
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ddp_trainer.checkpoint.checkpoints import Checkpoints
from ddp_trainer.data.loader import ShardLoader
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.errors import Interrupted, RetryableError, UserError
from ddp_trainer.ranks import group, own_store
from ddp_trainer.ranks.group import attach
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.evaluation import evaluate, evaluation_shards
from ddp_trainer.run.interrupt import StopVote
from ddpjob.local.ports import free_port

from . import launch

SAMPLES = 44
STEPS = 8


def train(folder, signal_at=None):
    """Train with FSDP2 in a plain loop. Return the weights and a figure over all samples."""
    torch.manual_seed(3)
    data = torch.randn(SAMPLES, 8)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 1))
    for layer in (model[0], model[3], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with attach() as runtime:
        sampler = GlobalBatchSampler(SAMPLES, 8, runtime.rank, runtime.world_size)
        loader = ShardLoader(data, sampler)
        parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
        checkpoints = Checkpoints(folder, runtime, parts)
        stop = StopVote(runtime, checkpoints)
        step = checkpoints.restore()
        while step < STEPS:
            for shard, batch in loader:
                loss = model(batch).square().sum()
                (loss * (runtime.world_size / shard.batch_size)).backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step == signal_at and runtime.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                stop.vote_at_next_step()
                stop.after_step(step)
                if step == STEPS:
                    break
        shards = evaluation_shards(SAMPLES, 8, runtime)
        sums = evaluate(
            model,
            shards,
            lambda shard: {"sum": model(data[shard.indices]).sum(), "n": len(shard.indices)},
            runtime=runtime,
        )
    whole = [parameter.full_tensor().detach() for parameter in model.parameters()]
    return torch.cat([tensor.flatten() for tensor in whole]), sums


def generators():
    numbers = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    return numbers, dict(os.environ)


def number_of_groups():
    return len(dist.distributed_c10d._world.pg_map)


def leave_by_an_exception(folder):
    """Return whether the pending checkpoint was written, and what the default group then adds."""
    with suppress(ZeroDivisionError), attach() as runtime:
        big = {"state": torch.zeros(1 << 20)}
        part = SimpleNamespace(state_dict=lambda: big, load_state_dict=big.update)
        checkpoints = Checkpoints(folder, runtime, {"big": part})
        path = runtime.broadcast(checkpoints.save(1))
        raise ZeroDivisionError
    total = torch.ones(1)
    dist.all_reduce(total)
    return Path(path).is_file(), int(total)


def everything():
    """Return what each rank found, for the tests below."""
    found = {}
    dist.init_process_group("gloo")
    before = generators()
    with attach() as runtime:
        found["place"] = (runtime.rank, runtime.world_size, runtime.local_rank, str(runtime.device))
        found["gathered"] = runtime.gather(runtime.rank)
    found["nothing changed"] = generators() == before
    found["whole"] = train("whole")
    try:
        train("broken", signal_at=3)
    except Interrupted as interrupted:
        found["interrupted"] = str(interrupted)
    found["saved"] = sorted(path.name for path in Path("broken").glob("step-*"))
    found["resumed"] = train("broken")
    found["after an exception"] = leave_by_an_exception("pending")
    found["groups"] = number_of_groups()
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attach")
    tests = Path(__file__).parents[1]
    runs = launch.ranks("-m", "trainer.test_attach", folder, PYTHONPATH=tests)
    assert launch.finish(runs) == [0, 0], "\n".join(run.stderr for run in runs)
    outcomes = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return SimpleNamespace(outcomes=outcomes, stderr="".join(run.stderr for run in runs))


def test_a_runtime_has_its_place_in_the_group_and_changes_nothing_else(found):
    for rank, outcome in enumerate(found.outcomes):
        assert outcome["place"] == (rank, 2, rank, "cpu")
        assert outcome["gathered"] == [0, 1]
        assert outcome["nothing changed"]


def test_a_loop_with_fsdp2_stops_at_a_signal_and_resumes_bit_by_bit(found):
    for rank, outcome in enumerate(found.outcomes):
        who = "received" if rank == 1 else "another rank received"
        assert outcome["interrupted"] == f"{who} SIGTERM; stopped after step 3"
        assert outcome["saved"] == ["step-g0001-0000000003.sharded"]
        (weights, sums), (resumed, sums_of_resumed) = outcome["whole"], outcome["resumed"]
        assert torch.equal(weights, resumed)
        assert sums == sums_of_resumed
        assert sums["n"] == SAMPLES
    sentence = r"stopped by SIGTERM after step 3; its checkpoint is \S*broken/step-g0001-"
    assert re.search(sentence, found.stderr)


def test_after_an_exception_the_checkpoint_is_written_and_the_group_goes_on(found):
    for outcome in found.outcomes:
        assert outcome["after an exception"] == (True, 2)
        assert outcome["groups"] == 1


# Without a group


def test_a_process_without_a_group_is_alone():
    with attach() as runtime:
        assert (runtime.rank, runtime.world_size, runtime.backend) == (0, 1, "none")
    with attach(device="cpu") as runtime:
        assert runtime.device == torch.device("cpu")


def test_a_group_that_is_not_initialised_yet_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="there is no default process group; initialise it before"):
        attach().__enter__()


def test_a_group_of_one_process_has_a_store_too_and_is_not_made_twice():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with attach() as runtime:
            assert (runtime.world_size, runtime.gather("x"), runtime.backend) == (1, ["x"], "gloo")
            runtime.store.set("name", "value")
            assert runtime.store.get("name") == b"value"
        with pytest.raises(UserError, match=r"has a process group already; use attach\(\)"):
            group.process_group().__enter__()
    finally:
        dist.destroy_process_group()


# Devices and addresses


@pytest.mark.parametrize(
    ("config", "local_rank", "device"),
    [
        ("cpu:gloo,cuda:nccl", 1, "cuda:1"),
        ("cuda:nccl", 5, "cuda:0"),
        ("cpu:gloo,cuda:gloo", 1, "cpu"),
        ("", 0, "cuda:0"),
    ],
)
def test_the_device_is_that_of_the_groups_backend(config, local_rank, device, monkeypatch):
    accelerator = SimpleNamespace(
        current_accelerator=lambda: torch.device("cuda"), device_count=lambda: 2
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    assert group._device_of_group(config, local_rank) == torch.device(device)


def test_the_address_of_rank_0_is_the_launchers_unless_that_is_the_loopback(monkeypatch):
    monkeypatch.setattr(own_store.socket, "gethostname", lambda: "here")
    assert own_store.address({"MASTER_ADDR": "job-0.net"}) == "job-0.net"
    assert own_store.address({"MASTER_ADDR": "127.0.0.1"}) == own_store.address({}) == "here"
    assert own_store.place() == own_store.place()
    monkeypatch.setattr(own_store, "BOOT_ID", Path("/nothing"))
    assert own_store.place() == "here"


def test_a_rank_that_cannot_reach_rank_0_is_told_what_to_do(monkeypatch):
    meeting = ("127.0.0.1", free_port(), "another machine")
    monkeypatch.setattr(Runtime, "broadcast", lambda runtime, own: meeting)
    monkeypatch.setattr(Runtime, "is_main", False)
    monkeypatch.setattr(own_store, "CONNECT_TIMEOUT", own_store.timedelta(seconds=1))
    with pytest.raises(RetryableError, match=r"cannot connect to rank 0 at 127.*set MASTER_ADDR"):
        own_store.open_store(Runtime())


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    torch.set_num_threads(1)
    outcome = everything()
    torch.save(outcome, f"{os.environ['RANK']}.pt")
