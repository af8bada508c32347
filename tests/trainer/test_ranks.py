"""What several ranks must agree on: the same parameters, exact sums at uneven sizes, bit-exact resumes."""

import math
import os
import platform
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_trainer.batch_norm import synchronise
from ddp_trainer.runtime import Runtime

from .launch import alone, finish, ranks

EXPERIMENTS = Path(__file__).with_name("experiments.py")


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def outcomes(request, tmp_path_factory):
    """What experiments.py found on each rank."""
    folder = tmp_path_factory.mktemp(f"world-{request.param}")
    runs = ranks(EXPERIMENTS, folder, processes=request.param)
    assert finish(runs) == [0] * request.param, "\n".join(run.stderr for run in runs)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(request.param)]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The same on one process."""
    folder = tmp_path_factory.mktemp("world-1")
    run = alone(EXPERIMENTS, folder)
    assert run.finish() == 0, run.stderr
    return torch.load(folder / "rank-0.pt")


def test_parameters_are_equal_on_all_ranks(outcomes):
    for outcome in outcomes[1:]:
        assert torch.equal(outcome["uneven"], outcomes[0]["uneven"])


@pytest.mark.parametrize("last_batch", ["uneven", "empty"])
def test_a_hundred_steps_train_like_a_single_process_at_equal_global_batch(
    outcomes, single, last_batch
):
    """Also where the last batch of an epoch is uneven, or leaves ranks without a sample."""
    assert difference({"all": outcomes[0][last_batch]}, {"all": single[last_batch]}) <= 1e-5


def test_a_step_of_the_digits_net_is_that_of_a_single_process(outcomes, single):
    """A step, not a hundred: rounding may decide a ReLU or a pooled maximum another way, and training multiplies that."""
    for outcome in outcomes:
        assert difference({"all": outcome["digits"]}, {"all": single["digits"]}) <= 1e-6


def test_one_altered_number_or_another_order_is_no_equality(outcomes):
    for outcome in outcomes:
        assert outcome["equalities"] == [True, False, False]


def test_gradients_lie_in_the_buckets(outcomes, single):
    for outcome in outcomes:
        assert outcome["in buckets"] == [True] * 4
    assert single["in buckets"] == [False] * 4, "without DDP each has memory of its own"


def test_repeats_that_fill_up_empty_shares_change_nothing(outcomes, single):
    assert difference({"all": outcomes[0]["filled up"]}, {"all": single["empty"]}) <= 1e-5


def test_a_run_in_pieces_is_bit_equal_to_an_unbroken_one(outcomes):
    for outcome in outcomes:
        assert torch.equal(outcome["in three pieces"], outcome["unbroken"])


def test_ranks_without_samples_take_part_and_leave_batch_norm_intact(outcomes):
    for outcome in outcomes:
        found = outcome["few samples"]
        assert found["training"].all()
        assert found["buffers"].isfinite().all()
        for name in (name for name in found if name.startswith("gradients")):
            assert found[name].isfinite().all()
            assert found[name].any()
            assert torch.equal(found[name], outcomes[0]["few samples"][name])


def difference(ours, reference):
    """The norm of the difference of two models' tensors, as a share of the norm of the second's."""
    ours, reference = (
        torch.cat([model[name].detach().double().flatten() for name in reference])
        for model in (ours, reference)
    )
    return float((ours - reference).norm() / reference.norm())


def test_batch_norm_trains_like_a_plain_loop_that_normalises_per_shard(outcomes, single):
    reference = single["shards"][len(outcomes)]
    assert difference(outcomes[0]["batch norm"], reference) <= 1e-10
    assert (
        difference(single["batch norm"], reference) > 1e-3
    )  # which is not what a single process does


def test_synchronised_batch_norm_trains_like_a_single_process_without_it(outcomes, single):
    for outcome in outcomes:
        assert (
            difference(outcome["synchronised"], single["batch norm"]) <= 1e-10
        )  # its running statistics included


def test_synchronised_batch_norm_sees_the_repeats_that_fill_up_shares(outcomes, single):
    reference = single["repeats"][len(outcomes)]
    for outcome in outcomes:
        assert difference(outcome["synchronised, filled up"], reference) <= 1e-10
    assert (
        difference(outcomes[0]["synchronised"], reference) > 1e-4
    )  # which the statistics of the batch itself are not


def test_layout_and_fused_optimizer_train_like_a_plain_loop(outcomes, single):
    for arm in [*outcomes[0]["images"], *single["images"]]:
        assert difference(arm, single["plain images"]) <= 1e-5


def test_synchronised_batch_norm_normalises_images_under_autocast_as_batch_norm_does():
    torch.manual_seed(0)
    plain, ours = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    synchronise(ours, Runtime())
    images = torch.randn(4, 3, 5, 5, dtype=torch.bfloat16) * 7 + 3
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(images), ours(images)
    assert found.dtype == expected.dtype
    assert torch.allclose(found.float(), expected.float(), atol=0.05)
    assert torch.allclose(ours.running_mean, plain.running_mean, rtol=1e-4)
    assert torch.allclose(ours.running_var, plain.running_var, rtol=1e-4)
    assert torch.equal(ours.eval()(images), plain.eval()(images).to(found.dtype))


def test_an_evaluation_counts_every_sample_exactly_once(outcomes):
    for outcome in outcomes:
        assert sorted(outcome["evaluated"]) == list(range(31))


def test_what_one_rank_complains_of_all_ranks_raise(outcomes):
    for outcome in outcomes:
        assert outcome["complaint"] == f"rank {len(outcomes) - 1}: its data are missing"


def test_no_group_is_left_whose_threads_could_abort_a_finished_process(outcomes):
    for outcome in outcomes:
        assert outcome["group destroyed"]


def test_the_threads_that_reduce_do_not_displace_those_that_compute(outcomes):
    expected = (
        {os.SCHED_BATCH} if sys.platform == "linux" else set()
    )  # elsewhere there is no such policy
    for outcome in outcomes:
        assert set(outcome["policies of new threads"]) == expected


def test_memory_that_was_freed_is_taken_again_without_linux(outcomes):
    limit = (
        100 if platform.libc_ver()[0] == "glibc" else math.inf
    )  # of 15360 pages; no other malloc is told anything
    for outcome in outcomes:
        assert outcome["page faults"] < limit
