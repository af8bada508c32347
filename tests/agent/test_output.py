"""The container's log: whole lines, with their rank."""

import json
from collections import Counter

import pytest

from ddpjob.agent import HEADER
from ddpjob.agent.output import Stream


def run(pod, script, ranks=1):
    found = pod(script)
    found.assign(0, ranks)
    found.start()
    assert found.end() == 0
    return found


def test_lines_of_several_ranks_carry_their_rank(pod):
    script = "import os, sys; print('one'); print('two', file=sys.stderr)"
    lines = Counter(run(pod, script, ranks=2).log.splitlines())
    expected = [f"[rank{rank}]: {word}" for rank in (0, 1) for word in ("one", "two")]
    assert all(lines[line] == 1 for line in expected)
    assert lines["torchrun starts"] == 1


def test_the_only_rank_of_a_node_writes_lines_as_they_are(pod):
    assert "one\n" in run(pod, "print('one')").log
    assert "[rank0]" not in run(pod, "print('one')").log


def test_lines_that_have_a_rank_get_no_second_one(pod):
    script = "import os; print(f\"[rank{os.environ['RANK']}]: Traceback\")"
    log = run(pod, script, ranks=2).log
    assert "[rank1]: Traceback\n" in log
    assert log.count("[rank1]") == 1


def test_lines_of_json_keep_their_form(pod):
    script = "import json; print(json.dumps({'event': 'train', 'step': 3}))"
    lines = run(pod, script, ranks=2).log.splitlines()
    assert [json.loads(line) for line in lines if line.startswith("{")] == [
        {"event": "train", "step": 3}
    ] * 2


def test_a_progress_bar_is_shown_while_it_grows(pod):
    # tqdm writes a carriage return before each state of its bar.
    script = """
import sys, time
for percent in range(1000):
    print(f"\\r{percent}%", end="", flush=True)
    time.sleep(0.02)
print("\\nend")
"""
    found = pod(script)
    program = found.programs / "output.py"
    text = program.read_text()
    assert "BAR_SECONDS = 10.0" in text
    program.write_text(text.replace("BAR_SECONDS = 10.0", "BAR_SECONDS = 0.5"))
    found.assign(0)
    found.start()
    found.wait_for("%\n", times=3)
    shown = [int(line[:-1]) for line in found.log.splitlines() if line.endswith("%")]
    assert shown == sorted(set(shown))
    assert shown[1] - shown[0] > 2


def taken(*pieces, at=0.0):
    """Pass these pieces to a stream at one time, and return its lines."""
    stream = Stream(0)
    return b"".join(line for piece in (*pieces, b"") for line in stream.take(piece, at))


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"one\r\ntwo\r\n", b"one\ntwo\n"),
        (b"\r10%\r20%\n", b"20%\n"),
        (b"100%\r9%\n", b"9%0%\n"),
        (b"bar\r   \rdone\n", b"done\n"),
        (b"half\r", b"half\n"),
        (b"\r5%", b"5%\n"),
        ("\rä|öü\rß\n".encode(), "ß|öü\n".encode()),
        # A terminal would show the object in the middle of the bar.
        (b'\r10% [###       ]{"step": 3}\n', b'10% [###       ]\n{"step": 3}\n'),
        (b'\r10% [###       ]\r{"step": 3}\n', b'10% [###       ]\n{"step": 3}\n'),
        (b'loss {"step": 3}\n', b'loss {"step": 3}\n'),
        (b"\xff\x00\r\xfe\n", b"\xff\x00\r\xfe\n"),
    ],
)
def test_a_line_is_what_a_terminal_shows(written, shown):
    assert taken(written) == shown
    # However it comes.
    assert taken(*(written[at : at + 1] for at in range(len(written)))) == shown
    if written.endswith(b"\n"):
        assert taken(b"before\n" + written + b"after\n") == b"before\n" + shown + b"after\n"


def test_an_open_bar_is_shown_at_most_every_ten_seconds():
    stream = Stream(0)
    shown = stream.take_bar(99.9)
    for second in range(35):
        stream.take(b"\r%d%%" % second, 100.0 + second)
        shown += stream.take_bar(100.0 + second)
    shown += stream.take_bar(200.0)
    # An unchanged bar is not shown again.
    assert stream.take_bar(300.0) == []
    assert shown == [b"10%\n", b"20%\n", b"30%\n", b"34%\n"]
    assert stream.take(b"\n", 301.0) == [b"34%\n"]


@pytest.mark.parametrize("found", [{"rank": 0}, {"rank": "0", "pid": 1, "process": 1}])
def test_a_header_that_nobody_of_the_agent_wrote_is_left_out(found):
    stream = Stream(0)
    stream.take(HEADER + json.dumps(found).encode() + b"\n", 100.0)
    assert not stream.worker


def test_a_bar_of_many_states_takes_no_memory():
    stream = Stream(0)
    for _ in range(20_000):
        stream.take(b"\r" + b"x" * 50, 1.0)
    assert len(stream.partial) < 200


@pytest.mark.parametrize(
    "line",
    [
        '\r10%|#   |{"event": "train", "step": 3, "steps": 9}',
        'INFO: {"event": "train", "step": 3, "steps": 9}',
    ],
)
def test_figures_are_found_at_the_end_of_a_line(pod, line):
    found = run(pod, f"print({line!r})")
    assert found.report["steps"] == {"0": [3, 3]}
    assert found.report["total"] == 9


def test_lines_of_ranks_are_not_mixed(pod):
    # Pieces without a newline, from four ranks at once.
    script = """
import os, sys
rank = os.environ["RANK"]
for number in range(500):
    for piece in (rank * 40, "-", str(number), "-", rank * 40):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\\n")
"""
    log = run(pod, script, ranks=4).log
    for rank in range(4):
        text = str(rank) * 40
        expected = [f"[rank{rank}]: {text}-{number}-{text}" for number in range(500)]
        assert [line for line in log.splitlines() if line.startswith(f"[rank{rank}]")] == expected


def test_a_line_of_a_megabyte_stays_whole(pod):
    script = """
import os, sys
line = os.environ["RANK"] * (1 << 20)
for _ in range(3):
    print(line)
"""
    log = run(pod, script, ranks=2).log
    lines = [line for line in log.splitlines() if line.startswith("[rank")]
    assert sorted(map(len, lines)) == [(1 << 20) + len("[rank0]: ")] * 6
    assert all(len(set(line.partition(": ")[2])) == 1 for line in lines)


def test_binary_output_is_copied_as_it_is(pod):
    script = """
import sys
sys.stdout.buffer.write(bytes(range(256)) * 1000 + b"\\n")
"""
    found = run(pod, script)
    assert bytes(range(256)) * 1000 in (found.folder / "log").read_bytes()


def test_the_last_line_needs_no_newline(pod):
    log = run(pod, "import sys; sys.stdout.write('last words')", ranks=2).log
    assert "[rank0]: last words\n" in log
    assert "[rank1]: last words\n" in log


def test_output_of_a_process_that_outlives_its_worker_is_kept(pod):
    script = """
import os, time
read_end, write_end = os.pipe()
if os.fork() == 0:
    print("child", flush=True)
    os.write(write_end, b"x")
    time.sleep(600)
os.read(read_end, 1)
print("parent")
"""
    log = run(pod, script).log
    assert "child\n" in log
    assert "parent\n" in log


def test_a_worker_that_uses_other_processes_works(pod):
    script = """
import multiprocessing, subprocess, sys
def double(number):
    return 2 * number
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(method, pool.map(double, [1, 2]))
    print(subprocess.check_output([sys.executable, "-c", "print('inner')"]).decode())
"""
    log = run(pod, script).log
    assert all(f"{method} [2, 4]" in log for method in ("fork", "spawn", "forkserver"))
    assert "inner" in log
