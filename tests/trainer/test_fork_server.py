"""A fork of the tests' server behaves as a new Python would in its place."""

import os
import re
import signal

import pytest

from .launch import TRAINER, Run, alone, new_python, torchrun

# What the server has imported before, and a new Python has not.
IS_FORK = "import sys; print('ddpjob.agent.zygote' in sys.modules)\n"


def ends(*arguments, **variables) -> tuple[Run, Run]:
    """Run a program in a fork and in a new Python, and return both."""
    runs = (
        alone(*arguments, **variables),
        new_python(*arguments, PYTHON_EXEC=os.devnull, **variables),
    )
    for run in runs:
        run.finish()
    return runs


FACTS = """
import atexit, gc, json, os, signal, threading, torch
atexit.register(print, '{"event": "at exit"}')
threading.Timer(0.1, print, ['{"event": "thread"}']).start()
variables = {name: os.environ[name] for name in os.environ}
for name in ("PYTHON_EXEC", "PWD", "_"):
    variables.pop(name, None)
print(json.dumps({
    "event": "facts",
    "arguments": [sys.argv, sys.orig_argv[1:], sys.executable, __name__],
    "path": sys.path,
    "folder": os.getcwd(),
    "variables": variables,
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "session": os.getsid(0) == os.getpid(),
    "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "threads": [torch.get_num_threads(), len(os.listdir("/proc/self/task"))],
    "garbage collection": gc.isenabled(),
    "main": [main.__package__, getattr(main, "__file__", "")],
}))
""".replace("import atexit", 'main = sys.modules["__main__"]\nimport atexit')


@pytest.fixture(params=["text", "script", "module"])
def program(request, tmp_path, monkeypatch):
    """Return a function to get the arguments with which Python runs a text."""

    def arguments(text):
        (tmp_path / "program.py").write_text(text)
        monkeypatch.chdir(tmp_path)
        return {
            "text": ("-c", text),
            "script": (tmp_path / "program.py",),
            "module": ("-m", "program"),
        }[request.param]

    return arguments


def test_a_program_sees_the_same(program):
    fork, new = ends(*program(IS_FORK + FACTS), "a b", RANK=3, SM_HOSTS="x", PYTHONPATH="/none")
    assert (fork.stray, new.stray) == (["True\n"], ["False\n"])
    (seen,), (expected,) = fork.of("facts"), new.of("facts")
    assert {name: seen[name] for name in seen if seen[name] != expected[name]} == {}
    assert [event["event"] for event in fork.events] == ["facts", "thread", "at exit"]


@pytest.mark.parametrize(
    "text",
    [
        "sys.exit()",
        "sys.exit(3)",
        "sys.exit(-1)",
        "sys.exit('what is wrong')",
        "def f():\n    raise ValueError('no')\nf()",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.abort()",
        "raise KeyboardInterrupt",
    ],
)
def test_a_program_ends_the_same(text):
    fork, new = ends("-c", f"import sys\n{text}")
    assert fork.process.returncode == new.process.returncode
    # The frames of the server come first where Python itself ends the process.
    assert fork.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]
    if "ValueError" in text:
        assert fork.stderr == new.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_a_fork(number):
    for start in (alone, new_python):
        run = start("-c", 'import time; print(\'{"event": "x"}\', flush=True); time.sleep(60)')
        run.wait_for("x")
        run.signal(number)
        assert run.finish() == -number


def without_times(run):
    """Return the events of the trainer without what differs between two equal runs."""
    measured = r"'(time|seconds|samples_per_second|peak_memory_mib)': ({.*?}|[\d.]+)"
    return re.sub(measured, "", str(run.events))


def test_the_trainer_trains_the_same(tmp_path):
    fork, new = ends(*TRAINER, "toy", "--steps", 3, "--log-every", 1, "--threads", 1)
    assert fork.of("end")
    assert without_times(fork) == without_times(new)
    assert fork.stderr == new.stderr


def test_the_ranks_of_torchrun_are_forks_too(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(IS_FORK)
    run = torchrun(path)
    assert run.finish() == 0, run.stderr
    # Both write at the same time.
    assert sorted("".join(run.stray)) == sorted("True\n" * 2)


SPAWNS = """
import multiprocessing, sys
def answer(asked, answered):
    is_fork = "ddpjob.agent.zygote" in sys.modules
    parent = multiprocessing.parent_process().is_alive()
    answered.put([is_fork, asked.get(), parent, sys.argv])
    sys.exit(7)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    asked, answered = context.SimpleQueue(), context.SimpleQueue()
    child = context.Process(target=answer, args=(asked, answered))
    child.start()
    asked.put("question")
    print(answered.get())
    child.join()
    print(child.exitcode)
"""


def test_a_spawned_process_is_a_fork_too(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(SPAWNS)
    fork, new = ends(path, "a")
    assert (fork.process.returncode, fork.stderr) == (new.process.returncode, new.stderr) == (0, "")
    expected = f"'question', True, {[str(path), 'a']}]\n"
    assert "".join(fork.stray) == f"[True, {expected}"
    assert "".join(new.stray) == f"[False, {expected}"
    assert [str(run.events) for run in (fork, new)] == ["[7]"] * 2


WITH_A_CHILD = """
import json, multiprocessing, signal
child = multiprocessing.get_context("fork").Process(target=signal.pause)
child.start()
signal.signal(signal.SIGTERM, lambda *_: None)
print(json.dumps({"event": "started"}), flush=True)
child.join()
print(json.dumps({"event": "child", "code": child.exitcode}), flush=True)
"""


def test_torchruns_signal_reaches_the_children_of_a_fork(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(WITH_A_CHILD)
    run = torchrun(path, processes=1)
    run.wait_for("started")
    run.signal(signal.SIGTERM)
    run.finish()
    assert run.of("child")[0]["code"] == -signal.SIGTERM


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("", {"OMP_NUM_THREADS": 2}),
        ("import os; os.environ['OMP_NUM_THREADS'] = '2'; import torch", {}),
    ],
    ids=["variable of torch", "variable that the program sets"],
)
def test_a_fork_that_could_differ_becomes_a_new_python(text, variables, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(f"{text}\nimport torch\nprint('threads:', torch.get_num_threads())\n{IS_FORK}")
    run = alone(path, **variables)
    assert run.finish() == 0
    assert run.stray == ["threads: 2\n", "False\n"]


def test_a_module_in_place_of_an_imported_one_is_used(tmp_path):
    (tmp_path / "PIL.py").write_text("raise ImportError('mine')")
    for run in ends("-c", "import PIL", PYTHONPATH=tmp_path):
        assert run.stderr.splitlines()[-1] == "ImportError: mine"
