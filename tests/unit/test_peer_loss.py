"""The words of libraries for a lost peer, and similar words of a user's own errors.

The samples are from killed processes, from cut networks, and from logs in issues of PyTorch, gloo,
NCCL and the Neuron SDK.
"""

import json
import time
from pathlib import Path

import pytest

from ddpjob.core.observe.peer_loss import FOLLOWER, LOST, UNCLEAR, WAITED

SAMPLES = json.loads((Path(__file__).parent / "data" / "peer_loss.json").read_text())


@pytest.mark.parametrize("text", [*SAMPLES["lost"], *SAMPLES["waited"]])
def test_a_process_that_lost_its_peer_is_a_follower(text):
    assert FOLLOWER.search(text)


@pytest.mark.parametrize("text", SAMPLES["own"])
def test_an_error_of_the_script_itself_is_not_taken_for_a_lost_peer(text):
    assert not FOLLOWER.search(text)


def test_every_pattern_has_a_source():
    assert all(words.source and words.library for words in (*LOST, *WAITED, *UNCLEAR))


def test_a_hostile_text_costs_no_more_than_a_long_one():
    # Nested repeats without a bound would take minutes for the second.
    hostile = ("[" * 200 + "/gloo/transport/tcp/" + "a" * 200) * 10
    started = time.perf_counter()
    FOLLOWER.search("x" * len(hostile))
    plain = time.perf_counter() - started
    started = time.perf_counter()
    FOLLOWER.search(hostile)
    assert time.perf_counter() - started < 100 * plain + 0.05
