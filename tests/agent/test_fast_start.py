"""A fork of a zygote runs its program as a new Python does."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from ddpjob.agent import worker

from .forks import Done, Zygote, finish
from .kubelet import DEADLINE, wait_until

pytest.importorskip("torch")

# Prints whether this process is a fork of the zygote.
MARK = "import sys; print('forked' if 'ddpjob_agent' in sys.modules else 'new')\n"

# A warning of Python's multiprocessing about a semaphore. Its removal reaches the tracker too late.
# The warning depends on the load of the machine, with and without a zygote.
TRACKER = re.compile(r".*resource_tracker.*\n(?:  warnings\.warn.*\n)?")

NO_FAST_START = "ddpjob agent: no fast start of this rank"


@pytest.fixture
def script(zygote: Zygote, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Return a function for writing a script into the folder of the zygote."""

    def write(text: str, name: str = "train.py") -> str:
        folder = zygote.folder / request.node.name.replace("[", "-").strip("]")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        return str(path)

    return write


def assert_same(zygote: Zygote, *arguments: str) -> Done:
    """Run a program in both ways. Return the fork's end, without its mark."""
    forked, new = zygote.fork(*arguments), zygote.plain(*arguments)
    assert forked.stdout.startswith("forked\n")
    assert new.stdout.startswith("new\n")
    forked.stdout = forked.stdout.removeprefix("forked\n")
    assert forked.stdout == new.stdout.removeprefix("new\n")
    assert TRACKER.sub("", forked.stderr) == TRACKER.sub("", new.stderr)
    assert forked.returncode == new.returncode
    return forked


def test_a_fork_does_not_search_the_imports_for_garbage(zygote, script):
    done = zygote.fork(script(MARK + "import gc; print(gc.get_freeze_count() > 100_000)\n"))
    assert done.stdout == "forked\nTrue\n"


# What a program sees

FACTS = """
import gc, json, locale, os, signal, socket
import torch
from pathlib import Path

main = sys.modules["__main__"]
names = sorted(name for name in vars(main) if name.startswith("__"))
print(json.dumps({
    "arguments": [sys.argv, sys.orig_argv, sys.executable],
    "search path": sys.path,
    "main": [names, main.__file__, str(main.__spec__), main.__package__, str(main.__loader__)[:40]],
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "threads": [torch.get_num_threads(), len(os.listdir("/proc/self/task"))],
    "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "folder": os.getcwd(),
    "flags": str(sys.flags),
    "buffers": [sys.stdout.write_through, sys.stderr.write_through, sys.stdout.encoding],
    "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "variables": {name: value for name, value in os.environ.items() if name != "PWD"},
    "variables of children": os.popen("echo $RANK").read(),
    "garbage collection": [gc.isenabled(), gc.get_threshold()],
    "locale": locale.setlocale(locale.LC_CTYPE),
    "limits": Path("/proc/self/limits").read_text(),
}))
"""


def test_a_fork_sees_what_a_new_python_sees(zygote, script):
    path = script(MARK + FACTS)
    forked, new = (run(path, "--lr", "0.1") for run in (zygote.fork, zygote.plain))
    facts, expected = (json.loads(done.stdout.splitlines()[1]) for done in (forked, new))
    for variable in ("DDP_AGENT_FOLDER", "DDP_AGENT_PYTHON"):
        del expected["variables"][variable]
    for name in expected:
        assert facts[name] == expected[name], name


def test_each_rank_has_random_numbers_of_its_own(zygote, script):
    text = """
        import random, numpy, torch, secrets, multiprocessing
        print(torch.initial_seed(), torch.rand(1).item())
        print(numpy.random.rand())
        print(random.random())
        print(bytes(multiprocessing.current_process().authkey).hex())
    """
    path = script(MARK + dedent(text))
    lines = [zygote.fork(path).stdout.splitlines() for _ in range(2)]
    assert [line[0] for line in lines] == ["forked", "forked"]
    assert len(set(lines[0]) | set(lines[1])) == 1 + 2 * 4


def test_the_same_numbers_come_from_a_seed_and_from_large_products(zygote, script):
    text = """
        import random, numpy, torch
        torch.manual_seed(7); numpy.random.seed(7); random.seed(7)
        print(torch.rand(3).tolist(), numpy.random.rand(3).tolist(), random.random())
        print(torch.nn.Linear(4, 4)(torch.ones(4)).tolist())
        ones = numpy.ones((700, 700))
        print((ones @ ones).sum(), (torch.ones(700, 700) @ torch.ones(700, 700)).sum().item())
    """
    assert_same(zygote, script(MARK + dedent(text)))


# Modules


def test_a_module_of_a_package_runs_as_main(zygote, script):
    script("import torch\n", "parts/__init__.py")
    text = (
        "import sys, __main__\nprint(__main__.__spec__.name, __name__, __package__, sys.argv[1:])\n"
    )
    path = script(MARK + text, "parts/train.py")
    folder = Path(path).parent.name
    name = f"{Path(path).parents[1].name}.parts.train"
    assert folder == "parts"
    done = assert_same(zygote, "-m", name, "--epochs", "3")
    assert f"{name} __main__" in done.stdout
    script(MARK, "parts/__main__.py")
    assert_same(zygote, "-m", name.removesuffix(".train"))


def assert_reported_by_a_new_python(zygote: Zygote, *arguments: str) -> None:
    forked, new = zygote.fork(*arguments), zygote.plain(*arguments)
    reason, _, rest = forked.stderr.partition("\n")
    assert reason.startswith(f"{NO_FAST_START}: its program cannot be read")
    assert (forked.returncode, rest) == (new.returncode, new.stderr)


def test_a_module_that_does_not_exist_is_reported_by_a_new_python(zygote):
    assert_reported_by_a_new_python(zygote, "-m", "no.such.module")


def test_imports_from_the_folder_of_the_script_work(zygote, script):
    script("VALUE = 5\n", "helper.py")
    assert (
        assert_same(zygote, script(MARK + "import helper; print(helper.VALUE)\n")).stdout == "5\n"
    )


# Ends

ENDS = {
    "success": "pass",
    "exit code": "sys.exit(17)",
    "exit with a text": "sys.exit('no data')",
    "exception": "def load():\n    raise ValueError('bad batch')\nload()",
    "chain of exceptions": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('x')",
    "group of exceptions": "raise ExceptionGroup('two', [ValueError('a'), TypeError('b')])",
    "exit without cleaning up": "import os; os._exit(3)",
    "SIGKILL": "import os; os.kill(os.getpid(), 9)",
    "SIGTERM": "import os; os.kill(os.getpid(), 15)",
    "handler at exit": "import atexit; atexit.register(print, 'bye'); raise OSError('disk')",
    "state at exit": """import atexit
def leave():
    error = getattr(sys, 'last_value', None)
    print(repr(error), repr(getattr(sys, 'last_exc', None)), getattr(sys, 'last_type', None))
    print(error and sys.last_traceback.tb_frame.f_code.co_name)
atexit.register(leave)
raise OSError('disk')""",
    "state at exit without an error": "import atexit\n"
    "atexit.register(lambda: print(hasattr(sys, 'last_value'))); sys.exit(3)",
    "hook": "sys.excepthook = lambda *error: print('hook', error[0].__name__)\nraise OSError",
    "thread": "import threading\nthreading.Timer(0.1, print, ['late']).start()",
}


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS)
def test_a_program_ends_in_the_same_way(zygote, script, text):
    assert_same(zygote, script(MARK + text + "\n"))


def test_a_crash_has_its_signal(zygote, script):
    done = zygote.fork(script("import ctypes, torch; ctypes.string_at(0)\n"))
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr


def test_a_syntax_error_is_reported(zygote, script):
    assert_reported_by_a_new_python(zygote, script("import torch\nif True\n"))


# Processes

POOL = """
import multiprocessing, os, torch
from torch.utils.data import DataLoader

class Item:
    def __init__(self, value): self.value = value

def double(item):
    return Item(2 * item.value)

if __name__ == "__main__":
    print("METHOD")
    with multiprocessing.get_context("METHOD").Pool(1) as pool:
        print([item.value for item in pool.map(double, [Item(1), Item(2)])])
        pool.close()
        pool.join()
    data = DataLoader(torch.arange(4.0), num_workers=1, multiprocessing_context="METHOD")
    print(sum(batch.item() for batch in data))
"""


# A server of forks starts as a spawned process does, and once only.
@pytest.mark.parametrize(
    "method", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"]
)
def test_multiprocessing_works(zygote, script, method):
    text = f"if __name__ == '__main__':\n    {MARK}" + POOL.replace("METHOD", method)
    done = assert_same(zygote, script(text))
    assert done.stdout == f"{method}\n[2, 4]\n6.0\n"


WAIT = (
    MARK
    + """
import os, signal, time, torch
signal.signal(signal.SIGUSR1, lambda *_: print("got SIGUSR1"))
signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(7)))
print(os.getpid())
while True:
    time.sleep(0.05)
"""
)


def begin(process: subprocess.Popen[str]) -> int:
    """Wait until a worker has begun, and return its process."""
    assert process.stdout
    assert process.stdout.readline() == "forked\n"
    return int(process.stdout.readline())


def test_signals_reach_the_worker(zygote, script):
    process = zygote.start(script(WAIT))
    begin(process)
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "got SIGUSR1\n"
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert (done.stdout, done.returncode) == ("saved\n", 7)


def test_the_worker_ends_if_its_stand_in_is_killed(zygote, script):
    process = zygote.start(script(WAIT))
    forked = begin(process)
    process.kill()
    finish(process)
    wait_until(lambda: not Path(f"/proc/{forked}").exists())


def test_a_signal_after_the_end_of_the_worker_starts_nothing_anew(zygote, script):
    # The stand-in is stopped while the worker ends, so it finds the signal and the end together.
    process = zygote.start(script(WAIT))
    forked = begin(process)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: state_of(process.pid) == "T")
    os.kill(forked, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{forked}").exists())
    process.terminate()
    process.send_signal(signal.SIGCONT)
    done = finish(process)
    assert (done.stdout, done.returncode) == ("", -signal.SIGKILL)


def test_a_request_of_a_stand_in_that_has_ended_runs_nothing(zygote, script):
    path = script("import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n")
    os.kill(zygote.process.pid, signal.SIGSTOP)
    try:
        process = zygote.start(path)
        # It waits for the answer.
        wait_until(lambda: state_of(process.pid) == "S")
        process.kill()
        process.wait(DEADLINE)
    finally:
        os.kill(zygote.process.pid, signal.SIGCONT)
    # Requests are served in their order.
    assert zygote.fork(script(MARK)).stdout == "forked\n"
    assert not Path(path).with_name("ran").exists()


def test_a_worker_on_other_cores_needs_a_new_python(zygote, script):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("this needs two cores")
    os.sched_setaffinity(0, cores[:1])
    try:
        process = zygote.start(script(MARK))
    finally:
        os.sched_setaffinity(0, cores)
    done = finish(process)
    assert done.stdout == "new\n"
    assert done.stderr.startswith(
        "ddpjob agent: no fast start of this worker: the zygote has ended, "
    )


def test_signals_reach_the_processes_of_the_worker(zygote, script):
    text = """
        import os, signal, time, torch
        parent = os.getpid()
        def stop(*_):
            if os.getpid() == parent:
                os.wait()
                os._exit(7)
            print("child")
            os._exit(0)
        signal.signal(signal.SIGTERM, stop)
        # The child prints, since Python forgets the signals that come while it forks.
        if os.fork() == 0:
            print(os.getpid())
        # A signal just before a sleep runs its handler after it.
        while True:
            time.sleep(0.05)
    """
    process = zygote.start(script(MARK + dedent(text)))
    begin(process)
    process.terminate()
    done = finish(process)
    assert (done.stdout, done.returncode) == ("child\n", 7)


def test_the_stand_in_ends_if_the_worker_is_killed(zygote, script):
    process = zygote.start(script(WAIT))
    os.kill(begin(process), signal.SIGKILL)
    assert finish(process).returncode == -signal.SIGKILL


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_without_a_zygote_a_new_python_starts(zygote, script, tmp_path):
    assert zygote.fork(script(MARK), DDP_AGENT_FOLDER=str(tmp_path)).stdout == "new\n"


# Programs for a new Python


def test_a_variable_that_torch_reads_at_its_import_needs_a_new_python(zygote, script):
    path = script(MARK)
    done = zygote.fork(path, OMP_NUM_THREADS="2")
    assert (done.stdout, done.stderr) == (
        "new\n",
        f"{NO_FAST_START}: its environment is another one: OMP_NUM_THREADS\n",
    )
    assert zygote.fork(path, PYTHONOPTIMIZE="1").stdout == "new\n"
    assert zygote.fork(path, MASTER_PORT="1", TORCHELASTIC_RUN_ID="x").stdout == "forked\n"


def test_another_python_runs_the_worker_that_is_to_have_it(zygote, script, tmp_path):
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    done = zygote.fork(script(MARK + "print(sys.executable)\n"), DDP_AGENT_PYTHON=str(other))
    assert done.stdout == f"new\n{other}\n"


def test_a_file_that_hides_an_imported_module_needs_a_new_python(zygote, script):
    script("VALUE = 'mine'\n", "sympy.py")
    path = script(MARK + "import sympy; print(sympy.VALUE)\n")
    assert zygote.fork(path).stdout == "new\nmine\n"


SETS_VARIABLES = {
    "import os\nos.environ['A'] = '1'\nimport torch": True,
    "import os\nos.environ.setdefault('A', '1')\nimport torch": True,
    "from os import environ\nenviron.update(A='1')\nimport torch.nn": True,
    "import os\nos.putenv('A', '1')\nfrom torch import nn": True,
    "import os\ndef main():\n    os.environ['A'] = '1'\n    import torch\nmain()": True,
    "import os\nif True:\n    del os.environ['A']\nimport torch": True,
    "import os\nos.unsetenv('A')\nimport torch": True,
    "from dotenv import load_dotenv\nload_dotenv()\nimport torch": True,
    "import os, torch\nos.environ['TORCH_COMPILE_DISABLE'] = '1'": True,
    "import os\nimport torch\nos.environ['A'] = '1'": False,
    "import os\nhas_rank = 'RANK' in os.environ\nimport torch": False,
    "import os\nbefore = os.environ.copy()\nimport torch": False,
    "import os\nrank = int(os.environ['RANK'])\nimport torch": False,
    "import os\nsize = os.environ.get('WORLD_SIZE', '1')\nimport torch": False,
    "from .torch import x\nimport os\nos.environ['A'] = '1'": True,
    "print('no torch')": False,
}


INSTALLS_PACKAGES = {
    "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'pip', 'install', 'x'])": True,
    "import os, torch\ndef main():\n    os.system(f'pip install {os.name}')": True,
    "from subprocess import check_call\ncheck_call('uv pip install x', shell=True)": True,
    "import subprocess\nsubprocess.run(['pip', 'list'])": False,
    "import sys\nsys.exit('torch is missing: pip install torch')": False,
}


@pytest.mark.parametrize(("text", "expected"), INSTALLS_PACKAGES.items())
def test_programs_that_install_packages_are_found(tmp_path, text, expected):
    path = tmp_path / "train.py"
    path.write_text(text)
    assert bool(worker.comes_too_late([str(path)])) is expected


@pytest.mark.parametrize(("text", "expected"), SETS_VARIABLES.items())
def test_programs_that_set_variables_before_they_import_torch_are_found(tmp_path, text, expected):
    path = tmp_path / "train.py"
    path.write_text(text)
    assert bool(worker.comes_too_late([str(path)])) is expected


def test_a_package_that_sets_variables_is_found(zygote, script):
    script("import os\nos.environ['A'] = '1'\n", "parts/__init__.py")
    path = script(MARK + "import torch\n", "parts/train.py")
    name = f"{Path(path).parents[1].name}.parts.train"
    assert zygote.fork("-m", name).stdout == "new\n"


# Differences from a new Python are logged

SAYS = "ddpjob agent: fast start: "


def what_is_logged(zygote: Zygote, path: str) -> list[str]:
    """Run a program as a fork, and return the agent's messages about it."""
    done = zygote.fork(path)
    assert done.stdout.startswith("forked\n"), done.stderr
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    return [line.removeprefix(SAYS).partition(";")[0] for line in lines if line.startswith(SAYS)]


def test_a_variable_that_a_module_sets_before_it_imports_torch_is_logged(zygote, script):
    text = """
        import os
        os.environ["PYTORCH_JIT"] = "0"
        os.environ["MY_OPTION"] = os.environ["TORCH_HOME"] = "x"
        os.environ.pop("OMP_NUM_THREADS")
        os.environ["PYTORCH_JIT"] = "1"
    """
    script(text, "settings.py")
    logged = what_is_logged(zygote, script(MARK + "import settings, torch\n"))
    assert logged == [
        f"the program sets {name}, which was read before it began"
        for name in ("PYTORCH_JIT", "OMP_NUM_THREADS")
    ]


@pytest.mark.parametrize("statement", ["import torch", "from torch.nn import Linear"])
def test_a_variable_that_is_set_after_the_import_of_torch_is_not_logged(zygote, script, statement):
    text = (
        "import os\ndef main():\n    os.environ['PYTORCH_JIT'] = os.environ['TORCH_LOGS'] = '+a'\n"
    )
    script(text, "settings.py")
    path = script(f"{MARK}import settings\n{statement}\nsettings.main()\n")
    # The compiler reads its own ones when it is imported.
    assert what_is_logged(zygote, path) == [
        "the program sets TORCH_LOGS, which was read before it began"
    ]


INSTALLERS = {
    "a process": "import subprocess\nsubprocess.run([sys.executable, '-m', *words])\n",
    "a shell": "import os\nos.system(' '.join([sys.executable, '-m', *words]) + ' || true')\n",
    "pip itself": "import pip\n",
}


@pytest.mark.parametrize("text", INSTALLERS.values(), ids=INSTALLERS)
def test_a_program_that_installs_packages_is_logged(zygote, script, text):
    # The words are not in the text of the call.
    words = "words = 'pip install --no-index --quiet no-such-package'.split()\n"
    found = what_is_logged(zygote, script(MARK + words + text))
    assert found == ["the program installs packages"]


def test_a_folder_on_the_search_path_that_hides_an_imported_module_is_logged(zygote, script):
    vendored = Path(script("VALUE = 1\n", "vendored/sympy.py")).parent
    script("VALUE = 2\n", "vendored/other.py")
    path = script(f"{MARK}sys.path.insert(0, {str(vendored)!r})\nimport other\n")
    assert what_is_logged(zygote, path) == [
        f"{vendored} has sympy, which was imported before it began"
    ]


@pytest.mark.parametrize("words", [[], ["-V"], ["-u"], ["train.py"]], ids=str)
def test_a_python_with_less_than_a_script_is_a_new_one(words):
    before = worker.Surroundings.of_this_process()
    assert worker.why_not(sys.executable, words, before).startswith("it runs neither")


def test_packages_that_were_installed_since_need_a_new_python(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    before = worker.Surroundings.of_this_process()
    (tmp_path / "sympy").mkdir()
    assert worker.why_not(sys.executable, ["-u", "train.sh"], before).startswith("it runs neither")
    (tmp_path / "sympy-9.9.dist-info").mkdir()
    reason = worker.why_not(sys.executable, ["-u", "train.sh"], before)
    assert reason == (
        "packages were installed or removed after the import of torch: "
        f"{tmp_path}/sympy-9.9.dist-info"
    )


THREADS = {
    "no thread": ("", True),
    "a thread of Python": (
        "import threading, time; threading.Thread(target=time.sleep, args=[1]).start()",
        False,
    ),
    "a thread of a library": (
        "import ctypes; libc = ctypes.CDLL(None); "
        "libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.pause, None)",
        False,
    ),
    "threads of OpenBLAS": ("import numpy; numpy.ones((9, 9)) @ numpy.ones((9, 9))", True),
    "threads of OpenMP": (
        "import torch; torch.set_num_threads(2); torch.ones(500, 500) @ torch.ones(500, 500)",
        False,
    ),
}


@pytest.mark.parametrize(("text", "expected"), THREADS.values(), ids=THREADS)
def test_a_zygote_with_threads_that_a_fork_would_lack_is_found(text, expected):
    text = f"from ddpjob.agent import zygote\n{text}\nprint(zygote.has_one_thread())"
    done = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert done.stdout == f"{expected}\n"
