"""The slow rank is found from the ranks' positions in the store."""

import re
import threading
import time
from dataclasses import replace

import psutil
import pytest
import torch.distributed as dist

from ddp_trainer.ranks import stragglers
from ddp_trainer.ranks.stragglers import (
    Position,
    StragglerDetector,
    describe_frozen,
    describe_slowest,
)

from .launch import DEADLINE, TRAINER, Run, new_python, new_python_of, torchrun


def at(*positions: tuple[int, bool, float]) -> dict[int, Position]:
    return {
        rank: Position(step, 2 if backward else 1, time, f"node {rank} (worker-{rank})")
        for rank, (step, backward, time) in enumerate(positions)
    }


def test_the_slow_rank_its_node_step_and_seconds_are_named():
    message = describe_slowest(at((8, True, 95.0), (7, True, 90.0), (8, True, 96.0)), 100.0, 5.0)
    assert message.startswith(
        "rank 1 on node 1 (worker-1) is slow or stuck: it was last seen in step 7, 10.0 s ago; "
        "rank 0 on node 0 (worker-0) has waited for it in step 8 for 5.0 s, longer than the "
        "timeout of 5 s."
    )


@pytest.mark.parametrize(
    ("positions", "slow"),
    [
        # Slow in the forward pass.
        ([(3, True, 9), (3, False, 9)], "rank 1 on"),
        (
            [(0, False, 1), (1, False, 2)],
            "rank 0 on node 0 (worker-0) is slow or stuck: it was last seen before its",
        ),
        # Of two ranks behind, the one with the older last sign is named.
        ([(5, True, 4), (4, True, 3), (4, True, 2)], "rank 2 on"),
    ],
)
def test_the_rank_furthest_behind_is_named(positions, slow):
    assert describe_slowest(at(*positions), 10.0, 1.0).startswith(slow)


def test_no_rank_is_named_if_all_are_equally_far():
    assert describe_slowest(at((2, True, 1.0), (2, True, 9.0)), 10.0, 1.0) is None


def test_positions_are_read_from_the_store():
    store = dist.HashStore()
    detectors = [StragglerDetector(store, rank, 2, timeout=2.0) for rank in range(2)]
    detectors[0].finished(4)
    detectors[0].forward()
    deadline = time.monotonic() + 120
    while not (said := detectors[1].describe_slow_rank()):
        assert time.monotonic() < deadline, "the position was never written"
    assert re.match(r"rank 1 on \S.* before its first step.*rank 0 on .* in step 5", said)
    for detector in detectors:
        detector.close()


def test_a_rank_that_has_finished_its_inputs_is_not_behind():
    """Under Join, such a rank still takes part in the sums of its peers."""
    store = dist.HashStore()
    through, stuck = [StragglerDetector(store, rank, 2, timeout=2.0) for rank in range(2)]
    through.finished(9)
    through.forward()
    through.finished(30)
    through.forget_passes()
    stuck.finished(14)
    stuck.forward()
    deadline = time.monotonic() + 120
    while not re.match(r"rank 1 on .* in step 15", said := through.describe_slow_rank() or ""):
        assert time.monotonic() < deadline, said
    for detector in (through, stuck):
        detector.close()


@pytest.mark.parametrize("others", [1, 20])
def test_ranks_that_are_as_far_behind_are_listed(others):
    behind = [(4, True, 3.0 + rank) for rank in range(others + 1)]
    message = describe_slowest(at((5, True, 4.0), *behind), 10.0, 1.0)
    assert message.startswith("rank 1 on node 1 (worker-1) is slow or stuck")
    listed = {
        1: "As far behind: rank 2. ",
        20: "As far behind: rank 2, 3, 4, 5, 6, 7, 8, 9 and 12 more. ",
    }
    assert listed[others] in message


@pytest.mark.parametrize(
    ("beats", "said"),
    [
        (
            [1, 0, 2],
            r"rank 1 on node 1 \(worker-1\) is frozen or cut off: it was last seen in step 7, .*"
            r" nothing for at least 3 s\. Check",
        ),
        ([0, 1, 0], r"rank 0 on node 0 \(worker-0\) is frozen .* Likewise: rank 2\. Check"),
        # A rank that is slow in its backward pass looks like the waiting ones.
        ([1, 1, 1], None),
        ([0, 0, 0], None),
    ],
)
def test_of_equally_far_ranks_those_that_write_nothing_are_named(beats, said):
    before = at(*[(7, True, 90.0)] * 3)
    after = {
        rank: replace(entry, beats=entry.beats + more)
        for (rank, entry), more in zip(before.items(), beats, strict=True)
    }
    found = describe_frozen(before, after, 3.0)
    assert re.match(said, found) if said else found is None


def test_of_two_ranks_behind_a_third_the_one_that_writes_nothing_is_named():
    """In a ring, a rank may be a step ahead of its neighbour that waits for the frozen rank."""
    before = at((7, True, 90.0), (6, True, 80.0), (6, True, 81.0))
    after = {rank: replace(entry, beats=int(rank != 2)) for rank, entry in before.items()}
    assert describe_frozen(before, after, 3.0).startswith("rank 2 on")
    assert describe_frozen(before, {**after, 2: replace(before[2], beats=1)}, 3.0) is None


def test_only_a_rank_that_stops_writing_is_named():
    store = dist.HashStore()
    asking, waiting, stopped = [StragglerDetector(store, rank, 3, timeout=1.0) for rank in range(3)]
    stopped.close()
    deadline = time.monotonic() + 120
    while not asking.describe_slow_rank():
        assert time.monotonic() < deadline, "no rank was named"
    waiting.close()
    said = asking.describe_slow_rank()
    assert re.match(
        r"rank 2 on .* is frozen or cut off: it was last seen before its first step", said
    )
    assert "Likewise" not in said
    asking.close()


def test_a_store_that_does_not_answer_ends_the_wait():
    """On a frozen host, the timeout of the read itself does not end it."""
    thawed = threading.Event()

    class Frozen(dist.HashStore):
        def wait(self, *_):
            thawed.wait()
            raise RuntimeError("no rank has written")

    asked = StragglerDetector(Frozen(), 0, 2, timeout=100)
    assert "the rendezvous store does not answer" in asked.describe_slow_rank()
    thawed.set()
    asked.close()


def ranks_of(run: Run) -> dict[str, psutil.Process]:
    """Return what torchrun has started, by rank."""
    children = psutil.Process(run.process.pid).children()
    return {child.environ()["RANK"]: child for child in children if "RANK" in child.environ()}


def test_of_three_ranks_the_one_that_freezes_is_named(tmp_path):
    run = torchrun(
        *TRAINER,
        "toy",
        "--model",
        "wide",
        "--steps",
        100000,
        "--timeout",
        10,
        "--log-every",
        1,
        processes=3,
        start=new_python,
        # The stand-in of a fork would be suspended in place of it.
        PYTHON_EXEC=new_python_of(2, tmp_path),
    )
    run.wait_for("train")
    workers = ranks_of(run)
    workers["2"].suspend()
    workers["0"].wait(DEADLINE)
    # A suspended process ignores torchrun's SIGTERM, and SIGKILL would come after 30 s.
    workers["2"].kill()
    assert run.finish() == 1
    named = re.findall(
        r"SlowRankError: rank (\d) on node 0 \(\S+\) is (?:frozen or cut off|slow or stuck)",
        run.stderr,
    )
    assert set(named) == {"2"}, run.stderr


def test_a_timeout_below_the_skew_names_the_slow_rank():
    run = torchrun(*TRAINER, "skewed", "--steps", 3, "--skew", 20, "--timeout", 3)
    assert run.finish() == 1
    assert re.search(
        r"SlowRankError: rank 1 on node 0 \(\S+\) is slow or stuck: it was last seen before its "
        r"first step, [\d.]+ s ago; rank 0 on node 0 \(\S+\) has waited for it in step 1 for "
        r"[\d.]+ s, longer than the timeout of 3 s",
        run.stderr,
    ), run.stderr


def test_of_three_ranks_the_two_that_sleep_are_named():
    run = torchrun(*TRAINER, "skewed", "--steps", 3, "--skew", 20, "--timeout", 3, processes=3)
    assert run.finish() == 1
    assert re.search(
        r"SlowRankError: rank [12] .* rank 0 on node 0 .* As far behind: rank [12]\.", run.stderr
    ), run.stderr


def test_the_timeout_holds_although_gloo_begins_it_anew_with_each_message():
    # gloo alone lets rank 0 wait for 7 s: half of the time for rank 1, and half for rank 2.
    run = torchrun(*TRAINER, "skewed", "--steps", 1, "--skew", 7, "--timeout", 4, processes=3)
    assert run.finish() == 1
    assert re.search(
        r"SlowRankError: rank 2 on node 0 \(\S+\) is slow or stuck: it was last seen before its "
        r"first step, .* rank 0 on node 0 \(\S+\) has waited for it in step 1",
        run.stderr,
    ), run.stderr


@pytest.fixture
def stuck(monkeypatch):
    """Return the detectors of rank 0, waiting in step 6, and of its slow peer, and messages."""
    for name, seconds in (("SILENCE", 0.4), ("BEAT", 0.1), ("SHORTEST_PAUSE", 0.05)):
        monkeypatch.setattr(stragglers, name, seconds)
    monkeypatch.setattr(stragglers, "MARGIN", 0.1)
    store = dist.HashStore()
    messages: list[str] = []
    detectors = [StragglerDetector(store, rank, 2, 0.5, messages.append) for rank in range(2)]
    for detector, steps in zip(detectors, (6, 5), strict=True):
        for step in range(steps):
            detector.finished(step)
            detector.forward()
            detector.backward()
    yield *detectors, messages
    for detector in detectors:
        detector.close()


def test_a_rank_that_waits_for_one_that_makes_no_progress_is_told(stuck):
    _, _, messages = stuck
    deadline = time.monotonic() + 120
    while not messages:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert re.match(r"rank 1 on .* is slow or stuck: it was last seen in step 5", messages[0])


def test_nobody_is_told_between_two_steps_although_a_process_is_silent(stuck):
    """An evaluation may take longer than the timeout, and a busy process writes no position."""
    waiting, silent, messages = stuck
    waiting.finished(6)
    silent.finished(5)
    silent.forward()
    silent.close()
    end = time.monotonic() + 3
    while time.monotonic() < end:
        time.sleep(0.05)
    assert messages == []


def test_a_rank_in_a_later_part_of_a_step_is_ahead():
    """With accumulation, a step has several forward and backward passes."""
    store = dist.HashStore()
    fast, slow = [StragglerDetector(store, rank, 2, timeout=2.0) for rank in range(2)]
    for detector, passes in ((fast, 3), (slow, 2)):
        detector.finished(7)
        for number in range(passes):
            detector.backward() if number % 2 else detector.forward()
    deadline = time.monotonic() + 120
    while not re.match(r"rank 1 on .* in step 8", said := fast.describe_slow_rank() or ""):
        assert time.monotonic() < deadline, said
    for detector in (fast, slow):
        detector.close()


def test_a_rank_that_waits_for_one_that_makes_progress_is_not_told(stuck):
    waiting, slow, messages = stuck
    # Under Join, a finished rank waits while the others take their steps.
    waiting.finished(1000)
    waiting.forget_passes()
    end = time.monotonic() + 3
    step = 5
    while time.monotonic() < end:
        step += 1
        slow.finished(step)
        slow.forward()
        slow.backward()
        time.sleep(0.05)
    assert messages == []


def test_a_timeout_above_the_skew_completes_and_reports_the_waits():
    run = torchrun(*TRAINER, "skewed", "--steps", 3, "--skew", 0.5, "--timeout", 30)
    assert run.finish() == 0, run.stderr
    fast, slow = run.of("end")[0]["result"]["seconds_waited_per_step"]
    assert fast >= 0.4 > slow


def test_join_lets_ranks_have_different_numbers_of_inputs():
    run = torchrun(*TRAINER, "skewed", "--uneven", "--steps", 10)
    assert run.finish() == 0, run.stderr
    result = run.of("end")[0]["result"]
    assert result["batches"] == [10, 30]
    assert result["parameters_equal"]
