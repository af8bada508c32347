"""Import torch and the trainer, and fork a process for each stand-in: python FOLDER DESCRIPTOR."""

import atexit
import gc
import importlib
import multiprocessing
import os
import pkgutil
import socket
import sys
import tempfile
import threading
from types import ModuleType

import descriptors

import ddp_trainer
from ddpjob.agent import FOLDER, watch, worker
from ddpjob.agent.zygote import Zygote

PRELOADED = ("torch.distributed.run", "torch._dynamo", "torch.utils.data", "PIL.Image")

# Variables that differ between tests, and are read only by the program itself.
OWN_PREFIXES = ("PET_", "SM_", "SAGEMAKER_", "SLURM_", "STANDIN_", "PJRT_", "PYTEST_", "RDZV_")
OWN_VARIABLES = {FOLDER, "PYTHON_EXEC", "PYTHONPATH"}


def main(descriptor: int) -> None:
    """Serve the socket with this descriptor. Only a fork goes on after `serve`."""
    server = Zygote(socket.socket(fileno=descriptor))
    # torch sets variables of its own.
    server_variables = variables()
    # A third of the time of the imports would be a search for garbage. Forks have it again.
    gc.disable()
    import_modules()
    request = server.serve()
    arguments = request["arguments"]
    # Spawned processes of multiprocessing are forks too.
    multiprocessing.set_executable(os.path.join(os.environ.pop(FOLDER), "python"))
    descriptors.take(request["process"])
    sys.path[:0] = python_path()
    reason = why_not(arguments, server_variables)
    if reason:
        log(f"{reason}: {arguments}")
        os.execv(sys.executable, [sys.executable, *arguments])
    end(run(arguments))


def import_modules() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    for module in pkgutil.walk_packages(ddp_trainer.__path__, "ddp_trainer."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def variables() -> dict[str, str]:
    """Return the variables read by Python, torch and their libraries when they start."""
    return {
        name: value
        for name, value in os.environ.items()
        if not (worker.is_own(name) or name.startswith(OWN_PREFIXES) or name in OWN_VARIABLES)
    }


def log(line: str) -> None:
    """Append a line to $FORK_SERVER_LOG, if it is set."""
    path = os.environ.get("FORK_SERVER_LOG")
    if path:
        with open(path, "a") as file:
            print(line.replace("\n", " ")[:500], file=file)


def python_path() -> list[str]:
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def why_not(arguments: list[str], server_variables: dict[str, str]) -> str:
    """Return why a fork must become a new Python, or an empty string."""
    others = {name for name, _ in variables().items() ^ server_variables.items()}
    if others:
        return f"its variables are other ones, {', '.join(sorted(others))}"
    if arguments[:1] == ["-u"]:
        arguments = arguments[1:]
    if arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        return "Python has options"
    folders = python_path()
    try:
        if not is_imported(arguments) and comes_too_late(arguments):
            return "it may do what must be done before the import of torch"
        if arguments[0] != "-c":
            folders.append(worker.folder_of(["-u", *arguments]))
        if any(map(watch.hidden_modules, filter(os.path.isdir, folders))):
            return "it has a module of its own in place of an imported one"
    except (OSError, ValueError, SyntaxError, RecursionError, IndexError) as error:
        return f"its program cannot be read: {error}"
    return ""


def comes_too_late(arguments: list[str]) -> str:
    """Return the program's work that must come before the import of torch, if any."""
    if arguments[0] != "-c":
        return worker.comes_too_late(worker.sources(["-u", *arguments]))
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(arguments[1])
        file.flush()
        return worker.comes_too_late([file.name])


def is_imported(arguments: list[str]) -> bool:
    """Return True for `-m MODULE` of a package already imported by the server."""
    return arguments[0] == "-m" and arguments[1].partition(".")[0] in sys.modules


def run(arguments: list[str]) -> int:
    """Run a program as `__main__`, and return its exit code."""
    worker.reseed()
    sys.orig_argv = [sys.executable, *arguments]
    if arguments[0] == "-u":
        arguments = arguments[1:]
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        if arguments[0] == "-c":
            run_text(*arguments)
        else:
            if arguments[0] == "-m":
                # runpy warns of a module if it is imported already.
                sys.modules.pop(arguments[1], None)
            worker.run_program(["-u", *arguments], lambda: None)
    except SystemExit as error:
        return exit_code(error)
    except KeyboardInterrupt:
        # Python ends by the signal.
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        worker.print_exception(error.with_traceback(trace))
        return 1
    return 0


def run_text(option: str, text: str, *arguments: str) -> None:
    """Run `python -c TEXT`."""
    main_module = ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main_module
    sys.argv = [option, *arguments]
    sys.path.insert(0, "")
    exec(compile(text, "<string>", "exec", dont_inherit=True), main_module.__dict__)


def exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def end(code: int) -> None:
    """End this process as Python does, but without taking its modules apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# Python searches this folder first.
del sys.path[0]
main(int(sys.argv[1]))
