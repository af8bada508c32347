"""Termination messages and logs: those of the agent, and those of torchrun alone."""

import json
from pathlib import Path

from .times import NOW

# The last 2048 bytes of the logs of torchrun 2.13. A kubelet keeps only this part of a log.
TAILS = Path(__file__).parents[1] / "data" / "torchrun"


def torchrun_tail(name: str) -> str:
    """Return a log as the API server shows it, with a character that was cut in two replaced."""
    return (TAILS / f"{name}.txt").read_text(encoding="utf-8", errors="replace")


def agent_report(
    attempt=0, cause="Failure", *, rank=1, exit_code=1, exception="ValueError: boom", **others
):
    """Return the termination message of an agent. `others` are further entries of it."""
    report = {
        "agent": 1,
        "attempt": attempt,
        "cause": cause,
        "rank": rank,
        "exitCode": exit_code,
        "exception": exception,
        "time": NOW.timestamp(),
        "lines": ["the last line"],
        **others,
    }
    return json.dumps(report)


FOLLOWER_ERROR = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
    "Connection closed by peer [10.244.1.3]:48525."
)


def torchrun_summary(rank=1, code=1, error="ValueError: boom", when=NOW):
    """Return torchrun's failure summary in the form of the files under data/torchrun."""
    return (
        f"[rank{rank}]: {error}\n"
        f"E{when:%m%d %H:%M:%S.%f} 7 torch/distributed/elastic/multiprocessing/api.py:1002] "
        f"failed (exitcode: {code}) local_rank: 0 (pid: 42) of binary: /usr/local/bin/python\n"
        "Traceback (most recent call last):\n"
        '  File "/usr/local/bin/torchrun", line 6, in <module>\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "Root Cause (first observed failure):\n"
        "[0]:\n"
        f"  time      : {when:%Y-%m-%d_%H:%M:%S}\n"
        "  host      : localhost\n"
        f"  rank      : {rank} (local_rank: 0)\n"
        f"  exitcode  : {code} (pid: 42) \n"
        "  error_file: <N/A>\n"
        "  traceback : To enable traceback see: "
        "https://pytorch.org/docs/stable/elastic/errors.html\n"
    )


def follower_summary(rank=0, when=NOW):
    """Return the summary of a rank that lost its peer."""
    return torchrun_summary(rank, 1, FOLLOWER_ERROR, when)


# The message of a pod with a rank that failed by itself, and of one that lost its peer.
FAILURE = torchrun_summary(rank=1)
FOLLOWER = follower_summary(rank=0)


def slow_rank_summary(rank=1, when=NOW):
    """Return the summary of a rank that waited too long for rank 0."""
    error = (
        "ddp_trainer.errors.SlowRankError: rank 0 on node 0 (a0-n0) is slow or stuck: it was "
        "last seen in step 47, 5.2 s ago"
    )
    return torchrun_summary(rank, 1, error, when)
