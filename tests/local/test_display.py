"""The display of a run, for any output of a script."""

import io

import pytest
from rich.console import Console

from ddpjob.core.api.status import Status
from ddpjob.core.plan import NEXT_STEP
from ddpjob.jobs.run_metrics import RunMetrics
from ddpjob.show.display import Display

NUMBERS = (
    "parameters",
    "steps",
    "step",
    "loss",
    "accuracy",
    "samples_per_second",
    "images_per_second",
)
AGENT = "1 torch/distributed/elastic"


# The output of a rank and of torchrun on a node after the loss of the node of rank 0.
LOST_RANK = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/app/train.py", line 6, in <module>
[rank1]:     dist.barrier()
[rank1]: RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer
"""
LOST_TORCHRUN = """\
[W1127 08:20:07.540802103 TCPStore.cpp:115] [c10d] recvVector failed on SocketImpl(fd=3)
frame #0: c10::Error::Error() + 0x9d (0x7f2007754b8d in libc10.so)

Traceback (most recent call last):
  File "/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py", line 114, in _call_store
    return getattr(self._store, store_op)(*args, **kwargs)
torch.distributed.DistNetworkError: Broken pipe

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/torch/distributed/run.py", line 1028, in main
    run(args)
torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection failed.
"""
OWN_ERROR = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/app/train.py", line 5, in <module>
[rank0]:     cfg["b"]
[rank0]: KeyError: 'b'
"""


def displayed(*metrics: dict, terminal: bool = False) -> str:
    """Return the display of a run with these events."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    with Display(console, RunMetrics()) as display:
        display.status(Status(phase="Running"))
        for metric in metrics:
            display.metric(metric)
    return console.file.getvalue()


def test_of_a_start_only_what_may_last_long_has_a_line_of_its_own():
    console = Console(file=io.StringIO(), width=200)
    reasons = ("CreatingPods", "SettingUp", "ContainersStarting", "SettingUp", "WaitingForPeers")
    with Display(console, RunMetrics()) as display:
        for reason in reasons:
            display.status(Status(phase="Starting", reason=reason, message=reason))
        display.status(Status(phase="Running", reason="NodesRunning", message="runs"))
    words = [line.split()[1] for line in console.file.getvalue().splitlines()]
    assert words == ["CreatingPods", "SettingUp", "WaitingForPeers", "runs"]


def shown_lines(*outputs: tuple[int, str]) -> list[str]:
    """Return what is shown of the output of nodes."""
    console = Console(file=io.StringIO(), width=200)
    with Display(console, RunMetrics()) as display:
        for index, text in outputs:
            for line in text.splitlines():
                display.line(index, line)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("value", [None, "high", [1], {}, True])
def test_metrics_that_are_not_numbers_are_accepted(value, terminal):
    fields = dict.fromkeys(NUMBERS, value)
    for event in ("start", "train", "rate", "eval", "end"):
        displayed({"event": event, **fields}, terminal=terminal)


def test_a_failed_run_does_not_ask_to_delete_a_job_of_a_cluster():
    console = Console(file=io.StringIO(), width=200)
    message = f"pod digits-0-1 failed with exit code 2; {NEXT_STEP}: it begins anew"
    with Display(console, RunMetrics()) as display:
        display.status(Status(phase="Failed", message=message))
    shown = console.file.getvalue()
    assert "failed with exit code 2" in shown
    assert "delete the job" not in shown


@pytest.mark.parametrize("unit", ["samples", "images", "tokens"])
def test_the_speed_is_displayed_in_the_unit_of_the_trainer(unit):
    start = {"event": "start", "workload": "gpt", "steps": 10}
    shown = displayed(
        start,
        {"event": "train", "step": 5, "loss": 1.5, f"{unit}_per_second": 12345.6},
        terminal=True,
    )
    assert f"12,346 {unit}/s" in shown


def test_an_accuracy_is_displayed_in_percent():
    assert "accuracy 50.0%" in displayed({"event": "eval", "accuracy": 0.5})


@pytest.mark.parametrize("loss", [None, float("nan")], ids=["JSON's null", "nan"])
def test_a_loss_that_diverged_is_displayed(loss):
    assert "test loss nan" in displayed({"event": "eval", "step": 1, "loss": loss})


@pytest.mark.parametrize(
    "report",
    [
        f"E1122 20:00:01.100000 {AGENT}/multiprocessing/api.py:1002] failed (exitcode: 1)",
        f"W1122 20:00:01.100000 {AGENT}/agent/server/api.py:753] Received 15 death signal, ending",
    ],
    ids=["a failure", "a signal"],
)
def test_lines_after_an_agents_report_are_hidden_but_not_after_its_warning(report):
    # On macOS the first line of torchrun is such a warning.
    warning = f"W1122 20:00:00.100000 {AGENT}/multiprocessing/redirects.py:35] NOTE: Redirects"
    console = Console(file=io.StringIO(), width=200)
    with Display(console, RunMetrics()) as display:
        for line in (warning, "one", report, "Traceback", "two"):
            display.line(0, line)
    assert console.file.getvalue() == "[n0] one\n"


def test_brackets_are_not_markup():
    assert "[red]net" in displayed({"event": "start", "workload": "[red]net"})


# -- a script of one's own


def test_events_of_a_script_without_a_start_have_their_total_and_nothing_invented():
    event = {"event": "train", "step": 950, "steps": 1500, "loss": 0.1}
    shown = displayed(event, terminal=True)
    assert "step 950/1500, loss 0.1000" in shown
    for invented in ("None", "importing torch", "950/?", "epoch"):
        assert invented not in shown


def test_in_a_pipe_each_event_of_the_training_is_a_line():
    events = [{"event": "train", "step": step, "steps": 1500, "loss": 0.1} for step in (0, 950)]
    lines = displayed(*events).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        "step 0/1500, loss 0.1000",
        "step 950/1500, loss 0.1000",
    ]


def test_a_script_that_prints_nothing_has_no_steps_and_no_time_left():
    shown = displayed(terminal=True)
    assert "running" in shown
    assert "left" not in shown
    assert "0/" not in shown


def test_a_line_that_has_been_printed_is_not_printed_again():
    console = Console(file=io.StringIO(), width=200)
    with Display(console, RunMetrics()) as display:
        display.metric({"event": "train", "step": 1}, is_printed=True)
    assert console.file.getvalue() == ""


def test_a_label_is_apart_from_what_follows():
    console = Console(file=io.StringIO(), width=200)
    display = Display(console, RunMetrics())
    display.summary(Status(), {"Checkpoints": "claim ckpt, folder train/"})
    assert console.file.getvalue() == "Checkpoints claim ckpt, folder train/\n"


def test_the_summary_ends_with_the_attempts_and_the_next_commands():
    message = "rank 0 failed with exit code 1: " + "a long message, " * 10 + "raise resources"
    attempts = [{"attempt": 0, "cause": "Failure", "message": message}]
    console = Console(file=io.StringIO(), width=80)
    display = Display(console, RunMetrics())
    display.summary(Status.from_dict({"attempts": attempts}), {})
    display.next({"ddpjob logs j": "prints the output", "ddpjob retry j --x": "tries again"})
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "Attempts"
    assert lines[2].endswith(message)
    assert lines[3:] == [
        "Next        ddpjob logs j        prints the output",
        "Next        ddpjob retry j --x   tries again",
    ]


# -- failures


def test_the_error_of_a_script_is_shown_and_not_the_tracebacks_of_its_peers():
    lines = shown_lines((1, LOST_RANK), (1, LOST_TORCHRUN), (0, OWN_ERROR), (0, "done"))
    own = [f"[n0] {line}" for line in OWN_ERROR.splitlines()]
    assert lines == ["[n1] [rank1]: lost a peer; the log has its traceback", *own, "[n0] done"]


def test_a_traceback_of_a_library_of_torch_is_hidden_also_behind_the_mark_of_a_rank():
    frames = [f"[rank3]: {line}" for line in LOST_TORCHRUN.splitlines()[:3]]
    assert shown_lines((1, "\n".join(frames))) == []


def test_a_chain_of_exceptions_of_a_script_is_shown_whole():
    chain = OWN_ERROR + "\nDuring handling of the above exception, another one:\n\n" + OWN_ERROR
    assert shown_lines((0, chain)) == [f"[n0] {line}" for line in chain.splitlines()]


def test_a_traceback_that_is_cut_off_is_shown_at_the_end():
    cut = OWN_ERROR.splitlines()[:2]
    assert shown_lines((0, "\n".join(cut))) == [f"[n0] {line}" for line in cut]


def test_an_empty_line_of_a_script_is_shown():
    assert shown_lines((0, "one\n\ntwo")) == ["[n0] one", "[n0] ", "[n0] two"]


def test_a_script_that_waited_too_long_names_the_slow_rank():
    text = OWN_ERROR.replace("KeyError: 'b'", "ddp_trainer.errors.SlowRankError: rank 1 is slow")
    assert len(shown_lines((0, text))) == 4
