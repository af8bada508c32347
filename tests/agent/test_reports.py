"""What an agent reports on a failure."""

import json
import os
import subprocess
import time

import pytest

from ddpjob.agent import HEADER
from ddpjob.agent.message import as_message
from ddpjob.agent.output import Output, Stream
from ddpjob.agent.report import Judge
from ddpjob.core.agent_files import WORDS, agent_files

from .kubelet import wait_until

TRACEBACK = b"Traceback (most recent call last):"
FOLLOWER = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
)


def fail(pod, script, ranks=1, flags=(), **options):
    """Run one attempt of a failing script, and return the report."""
    found = pod(script, **options)
    found.assign(0, ranks, flags=[f"--ranks={ranks}", *flags], wait=0.0)
    found.start()
    assert found.end() == 1
    return found.report


def loses_its_peer(rank_1):
    """Return a script: rank 0 loses its peer once rank 1 has run the statement, and waits."""
    return f"""
import os, signal, time, traceback
def fail(statement):
    try:
        exec(statement)
    except BaseException:
        traceback.print_exc()
if os.environ["RANK"] == "0":
    while not os.path.exists(__file__ + ".ready"):
        time.sleep(0.02)
    raise RuntimeError({FOLLOWER[14:]!r})
{rank_1}
open(__file__ + ".ready", "w").close()
time.sleep(600)
"""


def test_an_exception_is_reported_with_its_rank_and_its_last_lines(pod):
    script = """
import os
print("step 7")
if os.environ["LOCAL_RANK"] == "1":
    raise ValueError("bad batch\\nsecond line")
import time; time.sleep(600)
"""
    before = time.time()
    report = fail(pod, script, ranks=2, flags=["--first-rank=4"])
    assert report["cause"] == "Failure"
    assert (report["rank"], report["localRank"], report["exitCode"]) == (5, 1, 1)
    assert report["exception"] == "ValueError: bad batch"
    assert report["lines"][-2:] == ["ValueError: bad batch", "second line"]
    assert "step 7" in report["lines"]
    assert before < report["time"] < time.time()


def test_a_signal_is_reported_as_a_negative_exit_code(pod):
    report = fail(pod, "import os; os.kill(os.getpid(), 9)")
    assert (report["cause"], report["exitCode"], report["exception"]) == (
        "Failure",
        -9,
        "SIGKILL",
    )


def test_of_several_failures_the_first_is_reported(pod):
    # torchrun reports the failure of rank 0 with the same time.
    script = """
import os, signal, time
def fail(number, frame):
    raise RuntimeError("failure of rank " + os.environ["RANK"])
# torchrun sends SIGTERM to the others after the first failure.
signal.signal(signal.SIGTERM, fail)
open(__file__ + os.environ["RANK"], "w").close()
while not all(os.path.exists(f"{__file__}{rank}") for rank in range(3)):
    time.sleep(0.02)
if os.environ["RANK"] == "2":
    fail(0, None)
time.sleep(600)
"""
    report = fail(pod, script, ranks=3)
    assert (report["rank"], report["exception"]) == (2, "RuntimeError: failure of rank 2")


def test_a_peer_that_failed_by_itself_is_reported_before_a_follower(pod):
    script = loses_its_peer("signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))")
    report = fail(pod, script, ranks=2)
    assert (report["cause"], report["rank"], report["exitCode"]) == ("Failure", 1, 7)


def test_peers_that_torchrun_ended_are_not_reported(pod):
    script = """
import os, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), 11)
time.sleep(600)
"""
    report = fail(pod, script, ranks=3, env={"PYTHONFAULTHANDLER": ""})
    assert (report["cause"], report["rank"], report["exitCode"]) == ("Failure", 1, -11)


def test_an_abort_without_a_text_is_unclear(pod):
    report = fail(pod, "import os; os.abort()", env={"PYTHONFAULTHANDLER": ""})
    assert (report["cause"], report["exitCode"]) == ("Unclear", -6)


def test_torchrun_that_dies_without_a_record_is_a_failure(pod):
    script = "import os, time; os.kill(os.getppid(), 9); time.sleep(600)"
    found = pod(script)
    found.assign(0)
    found.start()
    assert found.end() == 137
    assert (found.report["cause"], found.report["exitCode"]) == ("Failure", -9)


def test_a_torchrun_that_somebody_else_stopped_is_not_the_cause(pod):
    found = pod(command=["sh", "-c", "kill -TERM $$"])
    found.assign(0, wait=0.0)
    found.start()
    assert found.end() == 143
    assert found.report["cause"] == "Follower"


def test_a_rank_that_succeeded_earlier_does_not_count(pod):
    # torchrun has not killed the second rank: nobody had failed before it.
    script = """
import os, signal, time
if os.environ["RANK"] == "1":
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    report = fail(pod, script, ranks=2, env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"})
    assert (report["cause"], report["rank"], report["exitCode"]) == ("Failure", 1, -9)


def test_a_program_that_writes_no_record_is_judged_by_its_output(pod):
    report = fail(pod, "raise ValueError('bad')", flags=["--no-record"])
    assert (report["cause"], report["exitCode"]) == ("Failure", 1)
    assert report["exception"] == report["lines"][-1] == "ValueError: bad"


def test_the_exit_code_of_a_rank_is_known_without_a_record_too(pod, port):
    # The launcher itself ends with 1. It has not yet asked for the exit code. Once it has, no other
    # process can read it.
    found = pod("import sys; print('wrong use'); sys.exit(2)", port=port)
    asks = found.folder / "asks"
    flags = ["--ranks=1", "--no-record", "--first-rank=4", f"--after={asks}"]
    found.assign(0, 1, flags=flags, wait=0.0)
    found.start()
    wait_until(lambda: found.is_up() and json.loads(found.get("/state")[1])["ended"] == [[4, 2]])
    asks.touch()
    assert found.end() == 1
    report = found.report
    assert (report["cause"], report["rank"], report["exitCode"]) == ("Failure", 4, 2)
    assert report["exception"] == "wrong use"


def end_after_a_rank(found):
    """Let a pod of two ranks end by one of them, after the other has ended."""
    found.assign(0, 2, flags=["--ranks=2"], wait=0.0)
    found.start()
    wait_until(lambda: found.is_up() and json.loads(found.get("/state")[1])["ended"])
    (found.folder / "script.py.ready").touch()
    assert found.end() == 1


def test_a_rank_that_ended_too_early_is_named_by_the_one_that_lost_it(pod, port):
    script = f"""
import os, time
while os.environ["RANK"] == "1":
    if os.path.exists(__file__ + ".ready"):
        raise RuntimeError({FOLLOWER[14:]!r})
    time.sleep(0.02)
"""
    found = pod(script, port=port)
    end_after_a_rank(found)
    report = found.report
    assert (report["cause"], report["rank"], report["exitCode"]) == ("EndedEarly", 0, 0)
    assert report["exception"].startswith(
        "rank 0 ended with exit code 0 while rank 1 was still training: do all ranks make"
    )


# Rank 0 ends with 0, and rank 1 by an exception. `{wait}` decides their order.
ONE_ENDS_WELL = """
import os, signal, time
from pathlib import Path
def wait(path):
    while not Path(path).exists():
        time.sleep(0.02)
ready = __file__ + ".ready"
if os.environ["RANK"] == "0":
    {rank_0}
    raise SystemExit(0)
{rank_1}
raise {error}
"""


def test_an_exception_of_its_own_is_the_cause_also_if_a_peer_has_ended_before(pod, port):
    script = ONE_ENDS_WELL.format(rank_0="", rank_1="wait(ready)", error="ValueError('bad')")
    found = pod(script, port=port)
    end_after_a_rank(found)
    assert found.report["exception"] == "ValueError: bad"


def test_a_peer_that_ends_well_when_torchrun_stops_it_has_not_ended_too_early(pod):
    ends = (
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); Path(ready).touch(); signal.pause()"
    )
    lost = f"RuntimeError({FOLLOWER[14:]!r})"
    script = ONE_ENDS_WELL.format(rank_0=ends, rank_1="wait(ready)", error=lost)
    report = fail(pod, script, ranks=2)
    assert (report["cause"], report["rank"]) == ("Follower", 1)


def test_a_worker_that_torchrun_had_to_kill_is_not_the_cause(pod):
    # Rank 0 lost its peer. Rank 1 ignores SIGTERM, so torchrun kills it later.
    script = loses_its_peer("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}
    report = fail(pod, script, ranks=2, env=env)
    assert (report["cause"], report["rank"]) == ("Follower", 0)


# Rank 1 waits until rank 0 opens the pipe. Rank 0 waits until the end of rank 1 closes it.
IN_TURN = f"""
import os, signal, sys, traceback
from contextlib import suppress
pipe = __file__ + ".pipe"
with suppress(FileExistsError):
    os.mkfifo(pipe)
def catch(error):
    try:
        raise error
    except Exception:
        traceback.print_exc()
def wrap():
    try:
        raise RuntimeError({FOLLOWER[14:]!r})
    except RuntimeError as error:
        raise ValueError("step 1 failed") from error
if os.environ["RANK"] == "0":
    {{before}}
    open(pipe).read()
    {{after}}
os.open(pipe, os.O_WRONLY)
{{rank_1}}
"""
NO_DATA = "print('no data on this rank'); sys.exit(1)"


@pytest.mark.parametrize(
    ("before", "after", "rank_1", "expected"),
    [
        # It has caught an exception. torchrun ends it because of rank 1.
        (
            "catch(OSError('nope'))",
            "signal.pause()",
            NO_DATA,
            ("Unclear", 1, "no data on this rank"),
        ),
        # It has lost rank 1, and says so in an exception of its own.
        (
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
            "wrap()",
            NO_DATA,
            ("Unclear", 1, "no data on this rank"),
        ),
        # An abort without a text is likely to follow from the exception of a peer.
        (
            "catch(ValueError('bad shard'))",
            "signal.pause()",
            "os.abort()",
            ("Failure", 0, "ValueError: bad shard"),
        ),
    ],
    ids=["caught", "wrapped", "abort"],
)
def test_a_rank_that_torchrun_told_to_end_is_the_cause_only_of_an_abort(
    pod, before, after, rank_1, expected
):
    script = IN_TURN.format(before=before, after=after, rank_1=rank_1)
    report = fail(pod, script, ranks=2, env={"PYTHONFAULTHANDLER": ""})
    assert (report["cause"], report["rank"], report["exception"]) == expected


GROUP = "raise ExceptionGroup('several', [ValueError('bad')])"


@pytest.mark.parametrize(
    ("written", "exception"),
    [
        ("fail('raise ValueError(\\'bad\\')')", "ValueError: bad"),
        ("fail('import queue; raise queue.Empty')", "_queue.Empty"),
        ("fail('raise ValueError(\\'bad\\' + chr(10) * 20)')", "ValueError: bad"),
        (f"fail({GROUP!r})", "ExceptionGroup: several (1 sub-exception)"),
        # The program has caught the exception, and goes on. The last one does so for longer than
        # ENDING_SECONDS.
        ("fail('raise ValueError'); print('step\\n' * 40)", None),
        ("fail('raise ValueError'); print('{\\\"step\\\": 1}')", None),
        ("fail('raise ValueError'); time.sleep(5)", None),
        ("print('ValueError: bad')", None),
        # Nobody failed: it was told to end.
        ("fail('raise SystemExit(143)')", None),
        ("signal.signal(15, lambda *_: (fail('raise EOFError'), os._exit(143)))", None),
    ],
    ids=[
        *("exception", "another name", "long", "group"),
        *("earlier", "a step later", "long ago", "no traceback", "exit", "after SIGTERM"),
    ],
)
def test_a_rank_that_torchrun_stopped_had_failed_if_it_was_ending_so(pod, written, exception):
    script = loses_its_peer(written)
    found = pod(script)
    program = found.programs / "report.py"
    text = program.read_text()
    assert "ENDING_SECONDS = 10.0" in text
    program.write_text(text.replace("ENDING_SECONDS = 10.0", "ENDING_SECONDS = 3.0"))
    found.assign(0, 2, flags=["--ranks=2"], wait=0.0)
    found.start()
    assert found.end() == 1
    report = found.report
    if exception:
        expected = ("Failure", 1, 1, exception)
        known = (report["cause"], report["rank"], report["exitCode"], report["exception"])
        assert known == expected
    else:
        assert (report["cause"], report["rank"]) == ("Follower", 0)


@pytest.mark.parametrize("looks_between", [0, 1, 2])
@pytest.mark.parametrize(("exit_code", "cause"), [(143, "Follower"), (-15, "Failure")])
def test_a_late_look_does_not_change_the_order_of_what_happened(exit_code, cause, looks_between):
    # If one look or two looks in a row saw both, it is not known whether rank 1 wrote before rank 0
    # ended. Only a rank without a handler of SIGTERM cannot have written because of the signal.
    output = Output()
    ends, processes = [], []
    for rank, line in enumerate((FOLLOWER, "EOFError")):
        read_end, write_end = os.pipe()
        output.add(read_end, rank)
        process = subprocess.Popen(["sleep", "600"])
        processes.append(process)
        begin = HEADER + json.dumps({"rank": rank, "pid": 1, "process": process.pid}).encode()
        os.write(write_end, b"\n".join([begin, TRACEBACK, b"  File x", line.encode(), b""]))
        ends.append(write_end)
    for _ in range(looks_between):
        output.copy(0.0)
    for end in ends:
        os.close(end)
    for process in processes:
        process.kill()
        process.wait()
    while not output.have_all_ended():
        output.copy(0.0)
    codes = enumerate((1, exit_code))
    failures = [
        {"rank": rank, "localRank": rank, "exitCode": code, "exception": ""} for rank, code in codes
    ]
    judge = Judge(agent_files()[WORDS].encode(), 30.0)
    found = judge.judge(1, output.streams, {"failures": failures})["cause"]
    assert found == ("Failure" if looks_between == 2 else cause)


@pytest.mark.parametrize(
    "text",
    ["\\x00" * 5000, "é" * 5000, "\\n" * 5000, '"' * 5000, "\\ud83d\\ude00" * 3000],
    ids=["control", "umlaut", "newlines", "quotes", "pairs"],
)
def test_a_report_fits_into_a_termination_message(pod, text):
    script = f"""
import sys
for _ in range(20):
    sys.stdout.buffer.write("{text}".encode("utf-8", "surrogatepass") + b"\\n")
raise ValueError("{text}".encode("utf-8", "replace").decode())
"""
    found = pod(script, env={"PYTHONIOENCODING": "utf-8:backslashreplace"})
    found.assign(0)
    found.start()
    assert found.end() == 1
    assert (found.folder / "message").stat().st_size <= 4096
    assert found.report["cause"] == "Failure"
    assert found.report["rank"] == 0


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{'loss': 0.5}", {}),
        ('{"loss": 0.5}', {"loss": 0.5}),
        ("[1, 2]", {}),
        (json.dumps({"text": "x" * 3000}), {"text": "x" * 3000}),
        (json.dumps({"text": "x" * 5000}), {}),
        ('{"text": "' + "é" * 1500 + '"}', {}),
        ("[" * 100_000, {}),
    ],
)
def test_only_a_small_object_is_a_result(pod, written, expected):
    found = pod("import os; os.replace('result-file', os.environ['DDP_RESULT_FILE'])")
    (found.folder / "result-file").write_text(written)
    found.assign(0)
    found.start(cwd=found.folder)
    assert found.end() == 0
    assert found.report["result"] == expected


def test_a_result_of_an_earlier_attempt_does_not_count(pod):
    script = """
import os
if os.environ["DDP_ATTEMPT"] == "0":
    open(os.environ["DDP_RESULT_FILE"], "w").write('{"a": 1}')
    os.kill(os.getpid(), 15)
"""
    found = pod(script)
    found.assign(0)
    found.start()
    found.wait_for("waiting for the next attempt")
    found.assign(1)
    assert found.end() == 0
    assert found.report["result"] == {}


def test_a_pod_without_an_assignment_says_so(pod):
    found = pod()
    program = found.programs / "agent.py"
    text = program.read_text()
    assert "ASSIGNMENT_SECONDS = 60.0" in text
    program.write_text(text.replace("ASSIGNMENT_SECONDS = 60.0", "ASSIGNMENT_SECONDS = 0.5"))
    found.start()
    assert found.end() == 1
    assert found.report["exception"] == f"no assignment in {found.folder / 'assignment'}"


STEPS = """
import json, os, sys
attempt = int(os.environ["DDP_ATTEMPT"])
print(json.dumps({"event": "start", "resumed_step": 10 * attempt}))
for step in range(10 * attempt + 1, 10 * attempt + 15):
    print(json.dumps({"event": "progress", "step": step, "loss": 0.5}))
if attempt == 2:
    sys.exit(3)
raise RuntimeError("WORDS")
""".replace("WORDS", FOLLOWER.partition(": ")[2])


def test_the_report_has_the_steps_of_each_attempt(pod):
    found = pod(STEPS)
    began = time.time()
    for attempt in range(2):
        found.assign(attempt)
        if attempt == 0:
            found.start()
        found.wait_for(f"attempt {attempt} has lost a peer")
    found.assign(2, wait=0)
    assert found.end() == 1
    assert found.report["steps"] == {"0": [0, 14], "1": [10, 24], "2": [20, 34]}
    assert list(found.report["trained"]) == ["0", "1", "2"]
    assert began < found.report["trained"]["0"] < found.report["trained"]["2"] < time.time()


def a_rank(number, output, began, ended, exit_code=None):
    """Return the output of an ended rank, as the agent has read it."""
    stream = Stream(0, 0)
    stream.worker = {"rank": number, "pid": 1, "process": 1}
    stream.take(output, began)
    stream.open_at = stream.ended = ended
    stream.exit_code = exit_code
    return stream


RAISED = TRACEBACK + b"\n  File x\nValueError: the real reason\n"
LOST = TRACEBACK + f"\n  File x\n{FOLLOWER}\n".encode()


@pytest.mark.parametrize(
    ("output", "began", "cause", "exception"),
    [
        (RAISED, 99.0, "Failure", "ValueError: the real reason"),
        # It was caught, and the rank went on.
        (RAISED, 60.0, "Follower", "RendezvousConnectionError: no store"),
        (LOST, 99.0, "Follower", "RendezvousConnectionError: no store"),
    ],
)
def test_a_rank_that_raised_comes_before_the_error_of_a_torchrun_without_its_store(
    output, began, cause, exception
):
    judge = Judge(agent_files()[WORDS].encode(), 30.0)
    record = {"error": "RendezvousConnectionError: no store", "failures": []}
    streams = [a_rank(1, output, began, 101.0), Stream(0)]
    report = judge.judge(1, streams, record)
    assert (report["cause"], report["exception"]) == (cause, exception)
    assert report.get("rank") == (1 if cause == "Failure" else None)


@pytest.mark.parametrize(
    ("output", "began", "code", "rank", "time"),
    [
        # It ends after its peer has noticed it: a library uploads something at its end.
        (RAISED, 99.0, 1, 1, 99.0),
        # It was caught, and the rank has ended for another reason.
        (RAISED, 60.0, 1, 0, 100.0),
        (RAISED + b"again\n" * 40, 99.0, 1, 0, 100.0),
        (RAISED + b'{"step": 5}\n  what():  no memory\n', 99.0, -6, 0, 100.0),
    ],
)
def test_a_rank_has_failed_when_it_raised_its_last_exception(output, began, code, rank, time):
    judge = Judge(agent_files()[WORDS].encode(), 30.0)
    failures = [
        {"rank": 0, "localRank": 0, "exitCode": 3, "exception": ""},
        {"rank": 1, "localRank": 1, "exitCode": code, "exception": ""},
    ]
    streams = [a_rank(0, b"lost the others\n", 0.0, 100.0), a_rank(1, output, began, 103.0)]
    report = judge.judge(1, streams, {"failures": failures})
    assert (report["rank"], report["time"]) == (rank, time)


@pytest.mark.parametrize(
    ("stopped", "cause", "rank"), [(False, "EndedEarly", 0), (True, "Follower", 1)]
)
def test_a_rank_that_was_told_to_end_has_not_ended_too_early(stopped, cause, rank):
    judge = Judge(agent_files()[WORDS].encode(), 30.0)
    failure = {"rank": 1, "localRank": 1, "exitCode": 1, "exception": "", "note": None}
    streams = [a_rank(0, b"", 99.0, 100.0, 0), a_rank(1, LOST, 100.5, 101.0, 1), Stream(0)]
    report = judge.judge(1, streams, {"failures": [failure]}, stopped=stopped)
    assert (report["cause"], report["rank"], report["exitCode"]) == (cause, rank, rank)


@pytest.mark.parametrize(("output", "code"), [(b"done\n", 0), (RAISED, None)])
def test_an_unknown_exit_code_is_no_success_after_an_exception(output, code):
    found = Output()
    found.streams = [a_rank(1, output, 99.0, 100.0)]
    found.now = 110.0
    assert found.ended_ranks() == [(1, code)]


def test_a_rank_that_ends_with_a_code_of_its_own_may_have_lost_a_peer(pod):
    report = fail(pod, f"import os; print({FOLLOWER!r}, flush=True); os._exit(4)")
    assert (report["cause"], report["exitCode"]) == ("Follower", 4)


def test_a_report_has_no_control_characters():
    text = "a \x1b[31mred\x1b[0m\tword \x00\u202e ü"
    report = json.loads(as_message({"cause": "Failure", "exception": text, "lines": [text]}))
    assert report["exception"] == report["lines"][0] == "a red word \ufffd\ufffd ü"
    several = json.loads(as_message({"cause": "Failure", "exception": "a\nb\u3000c"}))
    assert several["exception"] == "a\nb c"
