"""The sentence on the end of a script: its exception, or else its last words."""

import json
import time
import traceback

import pytest

from ddpjob.agent.exceptions import LastException, first_line
from ddpjob.agent.output import Stream
from ddpjob.agent.report import Judge
from ddpjob.core.agent_files import WORDS, agent_files

from .test_reports import FOLLOWER, TRACEBACK, fail

# What Hydra 1.3.8 writes of mistakes in a configuration.
ADVICE = "\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n"
WARNING = "/app/train.py:2: UserWarning: In 'config': no `_self_`.\n  warnings.warn(msg)\n"
NOT_IN_STRUCT = WARNING + (
    "Could not override 'x'.\nTo append to your config use +x=1\nKey 'x' is not in struct\n"
    "    full_key: x\n    object_type=dict\n"
)
IN_CALL = WARNING + (
    "Error executing job with overrides: ['mode=inst']\n"
    "Error in call to target 'builtins.int':\nValueError(\"invalid literal\")\n"
)

# How scripts end by an exception, and its first line.
EXCEPTIONS = {
    "no usual name": ("import zipfile; raise zipfile.BadZipFile('bad')", "zipfile.BadZipFile: bad"),
    "no text": ("import queue; raise queue.Empty", "_queue.Empty"),
    "first letter": ("class Ünglück(Exception): pass\nraise Ünglück('x')", "Ünglück: x"),
    "own class": ("class Oops(Exception): pass\nraise Oops('batch')", "Oops: batch"),
    "local class": (
        "def f():\n    class Lost(Exception): pass\n    raise Lost('way')\nf()",
        "f.<locals>.Lost: way",
    ),
    "group": (
        "raise ExceptionGroup('several', [ValueError('one'), TypeError('two')])",
        "ExceptionGroup: several (2 sub-exceptions)",
    ),
    "chain": (
        "try:\n    open('/none')\nexcept OSError as e:\n    raise LookupError('none') from e",
        "LookupError: none",
    ),
    "long": (
        "raise RuntimeError('Error(s) in loading state_dict:\\n\\t' + 'Missing key ' * 4000)",
        "RuntimeError: Error(s) in loading state_dict: Missing key Missing key",
    ),
    "many lines": ("raise ValueError('first\\n' + 'more\\n' * 60)", "ValueError: first"),
    "worker of DataLoader": (
        "raise ValueError('Caught ValueError in DataLoader worker process 1.\\n'\n"
        "    'Original Traceback (most recent call last):\\n  File \"a.py\", line 1, in f\\n'\n"
        "    '    raise ValueError(x)\\nValueError: sample 40 is corrupt')",
        "ValueError: sample 40 is corrupt",
    ),
    "import": ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
    "syntax": ("exec('def f(:')", "SyntaxError: invalid syntax"),
    "a place in its text": (
        "raise ValueError('bad template\\n  File \"a.html\", line 3\\nNotFound: x')",
        "ValueError: bad template",
    ),
    "os error": ("open('/none/x')", "FileNotFoundError: [Errno 2] No such file or directory:"),
}

# What else scripts do at their end, and the sentence.
ENDS = {
    "text": ("sys.exit('data folder /data is empty')", "data folder /data is empty"),
    "argparse": (
        "import argparse; argparse.ArgumentParser(prog='train.py').parse_args(['--foo'])",
        "train.py: error: unrecognized arguments: --foo",
    ),
    "log, then exit": ("print('ERROR no disk', file=sys.stderr); sys.exit(1)", "ERROR no disk"),
    "another code": ("print('cannot go on'); sys.exit(3)", "cannot go on"),
    "line of the agent": (
        "print('no data'); print('ddpjob agent: fast start: x', file=sys.stderr); sys.exit(3)",
        "no data",
    ),
    "box": (
        "print('╭─ Error ──╮\\n│ Invalid value for --epochs │\\n╰─────╯'); sys.exit(2)",
        "Invalid value for --epochs",
    ),
    "heap": ("import os; print('free(): invalid pointer', flush=True); os.abort()", "free(): inv"),
    "assertion": (
        "import os; print('k.cpp:88: f: Assertion `i < n failed.', flush=True); os.abort()",
        "k.cpp:88: f: Assertion `i < n failed.",
    ),
    "log after it": (
        "import atexit; atexit.register(print, '{\"msg\": \"ok\"}')\nraise ValueError('bad')",
        "ValueError: bad",
    ),
    "open line": (
        "print('epoch 3:  95%|███ | 19/20', end=' ', flush=True)\n"
        "class BatchBroken(Exception): pass\nraise BatchBroken('sample 17\\n' + 'row\\n' * 20)",
        "BatchBroken: sample 17",
    ),
    "another form of traceback": (
        "sys.excepthook = lambda kind, error, _: print(f'╭ Trace ╮\\n{kind.__name__}: {error}')\n"
        "raise ValueError('bad config')",
        "ValueError: bad config",
    ),
    "words after it": (
        "import atexit; atexit.register(print, 'summary\\n' * 60)\nraise ValueError('bad')",
        "ValueError: bad",
    ),
    "syntax error of a module": (
        "exec('x = 1\\n  y = 2')",
        "IndentationError: unexpected indent (<string>, line 2)",
    ),
    "syntax error of the script": ("def f(:", "SyntaxError: invalid syntax (script.py, line 3)"),
    "configuration": (
        f"print({NOT_IN_STRUCT!r} + {ADVICE!r}, file=sys.stderr); sys.exit(1)",
        "Could not override 'x'.",
    ),
    "configuration after a similar line": (
        "print('Error rate target: 0.1\\nMissing keys: []', flush=True)\n"
        f"print({NOT_IN_STRUCT!r} + {ADVICE!r}, file=sys.stderr); sys.exit(1)",
        "Could not override 'x'.",
    ),
    "configuration of an object": (
        f"print({IN_CALL!r} + {ADVICE!r}, file=sys.stderr); sys.exit(1)",
        "Error in call to target 'builtins.int': ValueError(\"invalid literal\")",
    ),
}


def raised_by(statement):
    """Run a statement of a script, and return its exception."""
    try:
        exec(statement, {"__name__": "__main__"})
    except Exception as error:
        return error
    raise AssertionError(statement)


@pytest.mark.parametrize("mark", ["", "[rank3]: "])
@pytest.mark.parametrize(("statement", "line"), EXCEPTIONS.values(), ids=list(EXCEPTIONS))
def test_the_first_line_of_an_exception_is_found_in_its_traceback_and_in_itself(
    statement, line, mark
):
    error = raised_by(statement)
    printed = "".join(traceback.format_exception(error))
    found = LastException()
    found.take(b"step 1\nValueError: of an earlier line\n", 1.0)
    # The output comes in pieces of whole lines.
    for each in printed.splitlines():
        found.take(f"{mark}{each}\n".encode(), 2.0)
    found.take(b"wandb: done\n", 3.0)
    assert found.text.startswith(line)
    assert (found.text, found.counts, found.time) == (first_line(error)[0], True, 2.0)
    assert len(found.text) <= 500


@pytest.mark.parametrize(
    "prefix", ["W0712 convert_frame.py:844] [0/0] ", "  | ", "ERROR: ", "[12:00][train][ERROR] - "]
)
def test_a_traceback_behind_the_prefix_of_a_log_is_none(prefix):
    found = LastException()
    found.take(f"{prefix}{TRACEBACK.decode()}\n{prefix}  File x\nEpoch: 1\n".encode(), 1.0)
    assert not found.counts


def test_a_traceback_that_was_logged_as_one_text_is_one():
    found = LastException()
    found.take(f"ERROR: {TRACEBACK.decode()}\n  File x\nBadShard: shard 4\n".encode(), 1.0)
    assert (found.text, found.counts) == ("BadShard: shard 4", True)


def test_a_frame_long_after_the_prefix_of_a_log_begins_no_traceback():
    found = LastException()
    text = f"ERROR - {TRACEBACK.decode()}\nERROR -   File x\n" + "ERROR - y\n" * 4
    found.take(f'{text}  File "x", line 3 in f\ndone\n'.encode(), 1.0)
    assert not found.counts


CHAINED = "try: raise KeyError('lost_peer' + {end} * 1000)\nexcept KeyError: raise OSError('step')"


def test_a_long_message_does_not_hide_the_chain():
    for error in map(raised_by, (CHAINED.format(end="'x'"), CHAINED.format(end="'\\n x'"))):
        found = LastException()
        found.take("".join(traceback.format_exception(error)).encode(), 1.0)
        assert "lost_peer" in found.words
        assert "lost_peer" in first_line(error)[1]


def test_a_chain_that_was_caught_before_is_of_no_other_exception():
    found = LastException()
    for statement in (CHAINED.format(end="''"), "raise ValueError('bad shard')"):
        printed = "".join(traceback.format_exception(raised_by(statement)))
        found.take(f"{printed}step 1\n".encode(), 1.0)
    assert found.text == "ValueError: bad shard"
    assert "lost_peer" not in found.words


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no traceback"), "ValueError: no traceback"),
        (RuntimeError(f"remote\n{TRACEBACK.decode()}\n  File x\n    1/0"), "RuntimeError: remote"),
        (KeyboardInterrupt(), ""),
    ],
)
def test_an_exception_has_its_first_line_in_any_case(error, text):
    assert first_line(error)[0] == text


def test_another_thread_may_write_within_a_traceback():
    found = LastException()
    found.take(f"{TRACEBACK.decode()}\nstep 3\nstep 4\n  File x\nOops: a\n".encode(), 1.0)
    assert found.text == "Oops: a"


@pytest.mark.parametrize("way", ["from e", ""])
def test_the_words_of_an_exception_have_those_that_led_to_it(way):
    error = raised_by(f"try: [].lost_peer\nexcept AttributeError as e: raise OSError('step') {way}")
    found = LastException()
    found.take("".join(traceback.format_exception(error)).encode(), 1.0)
    for text, words in (first_line(error), (found.text, found.words)):
        assert text == "OSError: step"
        assert "lost_peer" in words
    hidden = raised_by("try: [].lost_peer\nexcept AttributeError: raise OSError('step') from None")
    assert "lost_peer" not in first_line(hidden)[1]


@pytest.mark.parametrize("bar", ["epoch 3: 95%|█ | 19/20 [00:01<00:00, 3it/s]", "loading … "])
@pytest.mark.parametrize("mark", ["", "[rank1]: "])
def test_a_traceback_may_begin_on_an_open_line(bar, mark):
    found = LastException()
    lines = [f"{bar}{mark}{TRACEBACK.decode()}", f"{mark}  File x", f"{mark}Oops: sample 17"]
    found.take("\n".join([*lines, ""]).encode(), 1.0)
    assert (found.text, found.counts) == ("Oops: sample 17", True)


def test_a_traceback_in_a_message_is_a_part_of_the_message():
    error = RuntimeError("request failed\n" + TRACEBACK.decode() + "\nKeyError: 'user'")
    assert first_line(error)[0] == "RuntimeError: request failed"


@pytest.mark.parametrize("later", [b'{"step": 3}\n', b"step 3\n" * 1001])
def test_an_exception_does_not_count_if_the_process_has_gone_on(later):
    found = LastException()
    printed = "".join(traceback.format_exception(raised_by("1 / 0")))
    found.take(printed.encode(), 1.0)
    assert found.counts
    found.take(later, 2.0)
    assert not found.counts


@pytest.mark.parametrize(
    "before",
    [
        *("Exception ignored in: <function f>", "Exception in thread Thread-1:", "Error in sys.x"),
        "Process ForkProcess-1:",
    ],
)
@pytest.mark.parametrize("in_one_piece", [True, False])
def test_a_traceback_that_ends_no_process_does_not_count(before, in_one_piece):
    found = LastException()
    own = "".join(traceback.format_exception(raised_by("1 / 0")))
    aside = f"{before}\n" + "".join(traceback.format_exception(raised_by("[].x")))
    for text in (own + aside,) if in_one_piece else (own, *aside.splitlines(keepends=True)):
        found.take(text.encode(), 1.0)
    assert found.text == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [*EXCEPTIONS.values(), *ENDS.values()],
    ids=[*EXCEPTIONS, *ENDS],
)
def test_the_report_says_how_a_script_has_ended(pod, statement, sentence):
    report = fail(pod, f"import sys\nprint('step 1')\n{statement}")
    assert report["exception"].startswith(sentence)
    assert report["cause"] == ("Unclear" if sentence.startswith(("ERROR", "data")) else "Failure")


HANDLED = """
import logging, os, sys
try:
    raise ValueError("sample 17 is broken, skipped")
except ValueError:
    logging.exception("skipped")
"""


@pytest.mark.parametrize(
    ("end", "exception"),
    [
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import faulthandler; faulthandler.disable(); os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("print('the loss is nan'); sys.exit(3)", "the loss is nan"),
    ],
)
def test_an_exception_that_was_caught_is_not_the_cause(pod, end, exception):
    report = fail(pod, HANDLED + end)
    assert (report["cause"], report["exception"]) == ("Failure", exception)


def test_an_exception_that_was_caught_long_before_the_end_is_not_the_cause():
    stream = Stream(0, 0)
    stream.take(
        b"".join([TRACEBACK, b"\n  File x\nValueError: a sample\n", b"no data\n" * 20]), 100.0
    )
    judge = Judge(agent_files()[WORDS].encode(), 30.0)
    for ended, exception in ((219.0, "ValueError: a sample"), (221.0, "no data")):
        stream.ended = ended
        assert judge.words_at_end(stream, 1).text == exception


def test_words_of_a_lost_peer_that_were_caught_do_not_count(pod):
    script = f"""
import sys, traceback
try:
    raise RuntimeError({FOLLOWER[14:]!r})
except RuntimeError:
    traceback.print_exc()
print("the loss is nan")
sys.exit(3)
"""
    report = fail(pod, script)
    assert (report["cause"], report["exception"]) == ("Failure", "the loss is nan")


@pytest.mark.parametrize("words", [f"NCCL WARN {FOLLOWER}", "watchdog hang", "NRT_TIMEOUT"])
def test_words_of_a_lost_peer_count_in_the_last_traceback_only(pod, words):
    report = fail(pod, f"print({words!r}); raise KeyError('label')")
    assert (report["cause"], report["exception"]) == ("Failure", "KeyError: 'label'")


def test_an_end_without_a_cause_ends_the_pod_at_once(pod):
    found = pod("import sys; sys.exit(1)")
    # The wait for another assignment would be longer than the test.
    found.assign(0)
    found.start()
    assert found.end() == 1
    assert found.report["cause"] == "Unclear"
    assert "waiting for the next attempt" not in found.log


def test_the_end_of_a_rank_is_that_of_its_process(pod):
    # The child of rank 0 keeps its pipe. Rank 1 hears nothing, and torchrun kills it.
    script = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "0":
    while not os.path.exists(__file__ + ".ready"):
        time.sleep(0.02)
    subprocess.Popen(["sleep", "600"])
    raise MemoryError("in rank 0")
open(__file__ + ".ready", "w").close()
time.sleep(600)
"""
    env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}
    report = fail(pod, script, ranks=2, env=env)
    assert (report["rank"], report["exception"]) == (0, "MemoryError: in rank 0")


def test_ranks_that_all_have_the_local_rank_0_have_their_own_pipes(pod):
    script = """
import os, time
print("here")
if os.environ["RANK"] == "0":
    open(__file__ + ".ready", "w").close()
    time.sleep(600)
while not os.path.exists(__file__ + ".ready"):
    time.sleep(0.02)
raise ValueError("in rank 1")
"""
    found = pod(script)
    found.assign(0, 2, flags=["--ranks=2", "--virtual-local-rank"], wait=0.0)
    found.start()
    assert found.end() == 1
    assert "[rank0]: here" in found.log
    assert (found.report["rank"], found.report["exception"]) == (1, "ValueError: in rank 1")


@pytest.mark.parametrize(
    ("end", "exception"),
    [
        *EXCEPTIONS.values(),
        ("sys.exit('no data\\nin /data')", "no data in /data"),
        # Neither is an exception, or a text.
        ("sys.exit(1)", None),
        ("os._exit(1)", None),
        ("os.fork() or sys.exit('in a child')", None),
    ],
)
def test_a_fork_notes_the_exception_itself(zygote, end, exception):
    """Whatever it has caught before, and wherever its output goes."""
    note = zygote.folder / "exception-1"
    note.unlink(missing_ok=True)
    (zygote.folder / "script.py").write_text(
        f"{HANDLED}\nos.dup2(os.open(os.devnull, 1), 2)\n{end}"
    )
    zygote.fork("script.py", rank=5)
    found = json.loads(note.read_text())["exception"] if note.exists() else None
    assert found == exception if exception is None else found.startswith(exception)


def search_time_of(text):
    """Return the CPU seconds of the search for the last words in an output."""
    stream = Stream(0, 0)
    stream.take(text.encode(), 1.0)
    judge = Judge(agent_files()[WORDS].encode(), 30.0)
    began = time.process_time()
    judge.words_at_end(stream, 1)
    return time.process_time() - began


@pytest.mark.parametrize(
    "text",
    [
        "Missing m\n" * 20 + ADVICE.rstrip() + " " * 4000 + "\nx",
        "Key 'x" + " " * 16000,
        "Missing m:\n" * 1600,
    ],
)
def test_no_output_makes_the_search_for_its_last_words_slow(text):
    ordinary = search_time_of("epoch 3, loss 0.31\n" * 1000)
    assert search_time_of(text) < 50 * max(ordinary, 1e-3)
