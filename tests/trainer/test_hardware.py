"""The device layer, with stand-ins of the documented interfaces of torch_xla and TorchNeuron.

tests/xla runs the real torch_xla with one process. PJRT on a CPU supports only one.
"""

import json
import math
import os
import sys
import threading
import types
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_trainer.cli.options import DigitsOptions
from ddp_trainer.errors import UserError
from ddp_trainer.ranks import cpu, hardware
from ddp_trainer.ranks import group as group_module
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run import interrupt
from ddp_trainer.run.interrupt import StopVote
from ddp_trainer.run.progress import Progress
from ddp_trainer.workloads.shared.classification import Task, train_classifier

from .launch import TRAINER, alone, group, torchrun

STANDINS = Path(__file__).parent / "standins"


def on_xla(*arguments, launcher=torchrun, calls, **more):
    return launcher(
        *TRAINER, *arguments, "--device", "xla", PYTHONPATH=STANDINS, STANDIN_CALLS=calls, **more
    )


# At the workload's own rate, rounding decides a ReLU differently on some CPUs, and the training
# magnifies the difference. At this rate the loss still changes by 1e-3, so a wrong mean of
# gradients shows.
SHORT_DIGITS = ("digits", "--epochs", 2, "--learning-rate", "0.005", "--threads", 1)


@pytest.fixture(scope="module")
def result_on_cpu():
    """Return the result of two ranks on the CPU."""
    run = group(*TRAINER, *SHORT_DIGITS)
    assert run.finish() == 0, run.stderr
    return run.of("end")[0]["result"]


@pytest.mark.parametrize(
    ("launcher", "flags"), [(torchrun, []), (alone, ["--spawn", 2])], ids=["torchrun", "spawn"]
)
def test_two_ranks_train_on_xla_as_on_the_cpu(launcher, flags, result_on_cpu, tmp_path):
    xla = on_xla(*SHORT_DIGITS, *flags, launcher=launcher, calls=tmp_path, PJRT_DEVICE="NEURON")
    assert xla.finish() == 0, xla.stderr
    (start,), (end,) = xla.of("start"), xla.of("end")
    assert (start["backend"], start["world_size"]) == ("xla", 2)
    # XLA adds up losses in float32.
    assert end["result"] == pytest.approx(result_on_cpu, rel=1e-5)
    # There is one graph per step, per batch of two evaluations, per broadcast of buffers before
    # them, and for the warm-up.
    batches_evaluated = 2 * math.ceil(360 / 64)
    graphs = end["step"] + batches_evaluated + 2 + 1
    for rank in range(2):
        calls = json.loads((tmp_path / f"{rank}.json").read_text())
        assert calls["sync"] == graphs
        assert calls["manual_seed"] == 1


def test_a_run_on_xla_goes_on_from_its_checkpoint(tmp_path):
    def toy(steps, folder):
        run = on_xla("toy", "--steps", steps, "--checkpoint-dir", folder, calls=tmp_path)
        assert run.finish() == 0, run.stderr
        return run.of("end")[0]["result"]

    toy(20, tmp_path / "two parts")
    assert toy(40, tmp_path / "two parts") == toy(40, tmp_path / "one")


def test_tensors_of_the_cpu_go_to_their_own_group_where_the_devices_carries_none():
    runtime = Runtime(world_size=2, cpu_group="gloo")
    assert runtime._group(torch.zeros(1)) == "gloo"
    assert runtime._group(torch.zeros(1, device="meta")) is None


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        ("skewed --uneven", "all ranks have to take the same steps"),
        ("messages", "does not support messages between only two ranks"),
        ("model_parallel", "torch_xla gives each process one core"),
    ],
)
def test_what_xla_cannot_do_is_said(workload, says, tmp_path):
    run = on_xla(*workload.split(), calls=tmp_path)
    assert run.finish() != 0
    assert says in run.stderr


def test_torch_xla_that_is_not_there_is_said():
    run = alone(*TRAINER, "toy", "--device", "xla")
    assert run.finish() == 2
    assert "torch_xla cannot be imported (No module named 'torch_xla')" in run.stderr
    assert "choose the device cpu" in run.stderr


def test_ranks_meet_by_a_file_too(tmp_path):
    results = []
    for flags in ((), ("--init-method", f"file://{tmp_path}/meet")):
        run = group(*TRAINER, "toy", "--steps", 10, *flags)
        assert run.finish() == 0, run.stderr
        results.append(run.of("end")[0]["result"])
    assert results[0] == results[1]


def test_where_the_ranks_are_is_not_written_into_a_file_that_would_keep_all_of_it(tmp_path):
    script = (
        "import sys; from ddp_trainer.ranks.group import process_group\n"
        "with process_group(init_method=sys.argv[1]) as runtime: assert runtime.stragglers is None"
    )
    run = alone("-c", script, f"file://{tmp_path}/meet", RANK=0, WORLD_SIZE=1)
    assert run.finish() == 0, run.stderr


def test_a_file_that_another_run_has_met_at_is_refused(tmp_path):
    (tmp_path / "meet").touch()
    meet = ("toy", "--steps", 2, "--init-method", f"file://{tmp_path}/meet")
    store = torch.distributed.FileStore(str(tmp_path / "meet"), 2)
    for _ in range(2):  # the killed ranks of an earlier run
        store.add("restart 0, group 0/joined", 1)
    run = torchrun(*TRAINER, *meet)
    assert run.finish() != 0
    assert "was used by another run" in run.stderr, run.stderr


def test_a_script_may_join_one_group_after_another(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from ddp_trainer.ranks.group import process_group\n"
        "for number in range(2):\n"
        "    with process_group() as runtime: assert runtime.gather(runtime.rank) == [0, 1]\n"
    )
    run = torchrun(script)
    assert run.finish() == 0, run.stderr


def test_an_init_method_without_ranks_is_refused(tmp_path):
    run = alone(*TRAINER, "toy", "--init-method", f"file://{tmp_path}/meet")
    assert run.finish() == 2
    assert "RANK and WORLD_SIZE are not set; set them for each process" in run.stderr


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (
            "xla://",
            "expected env://, file:///a/path/that/all/ranks/see or, with the device xla, xla",
        ),
        ("file://meet", "expected env://, file:///a/path/that/all/ranks/see or"),
        ("file:///no/such/folder/meet", "folder /no/such/folder not found"),
    ],
)
def test_an_init_method_that_cannot_work_is_refused(method, says):
    run = alone(*TRAINER, "toy", "--init-method", method, RANK=0, WORLD_SIZE=2)
    assert run.finish() == 2
    assert f"init method {method}" in run.stderr
    assert says in run.stderr


def test_only_the_gpus_that_are_visible_count(monkeypatch):
    # PyTorch counts the GPUs in CUDA_VISIBLE_DEVICES. Two processes cannot share one.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    message = (
        "LOCAL_RANK 1 needs a device of kind cuda, but this process sees 1 in all; "
        "start fewer processes per node"
    )
    with pytest.raises(UserError, match=message):
        hardware.choose("auto").prepare(1, 1)


@pytest.mark.parametrize(
    ("buffer_size", "record_file"),
    [
        ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    ],
)
def test_nccls_record_of_the_last_collectives_is_switched_on_and_named(
    monkeypatch, tmp_path, capsys, buffer_size, record_file
):
    """No GPU was there to try it. NCCL itself writes the file."""
    monkeypatch.setattr(hardware.Cuda, "take", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    # Variables set below are removed at the end of the test.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in chain(*hardware.FLIGHT_RECORDER):
        os.environ.pop(name, None)
    # The user's values are kept, also under an older name.
    os.environ[buffer_size] = "9"
    os.environ[record_file] = f"{tmp_path}/record-"
    cuda = hardware.Cuda()
    cuda.prepare(0, 1)
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert [os.environ.get(name) for name in hardware.RECORD_FILE].count(None) == 1
    assert os.environ[buffer_size] == "9"
    # The process is left to NCCL's watchdog.
    group_module._report_slow_rank(cuda, 3, "rank 1 is slow")
    assert (
        f"SlowRankError: rank 1 is slow. NCCL writes this rank's last collectives to "
        f"{tmp_path}/record-3;" in capsys.readouterr().err
    )


def test_an_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="device 'gpu': expected auto, cpu, cuda, xla, neuron"):
        hardware.choose("gpu")


# --- TorchNeuron: its module torch.neuron has the form of torch.cuda.


@pytest.fixture
def neuron(monkeypatch):
    """Set up a node with 4 logical NeuronCores."""
    state = {"current": None, "random": torch.arange(3, dtype=torch.uint8), "waited": 0}

    def wait():
        state["waited"] += 1

    module = types.SimpleNamespace(
        device_count=lambda: 4,
        set_device=lambda device: state.update(current=device),
        synchronize=wait,
        get_rng_state=lambda: state["random"].clone(),
        set_rng_state=lambda new: state.update(random=new),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda name: {"neuron": module}[name])
    # Only torch_neuronx knows the device type "neuron".
    monkeypatch.setattr(torch, "device", lambda name, index: (name, index))
    monkeypatch.setattr(torch, "neuron", module, raising=False)
    monkeypatch.setitem(sys.modules, "torch_neuronx", types.ModuleType("torch_neuronx"))
    return state


def test_a_process_takes_the_core_of_its_local_rank(neuron):
    chosen = hardware.choose("neuron")
    chosen.prepare(3, 1)
    # TorchNeuron sets its device after the process group is joined.
    assert neuron["current"] is None
    assert chosen.take(3, 1) == ("neuron", 3) == neuron["current"]
    chosen.wait()
    assert neuron["waited"] == 1


def test_the_torch_neuronx_of_trainium_1_is_told_apart(neuron, monkeypatch):
    monkeypatch.delattr(torch, "neuron")
    with pytest.raises(UserError, match="works through torch_xla; choose the device xla"):
        hardware.choose("neuron")


def test_more_processes_than_cores_are_refused(neuron):
    message = "LOCAL_RANK 4 needs a device of kind neuron, but this process sees 4 in all"
    with pytest.raises(UserError, match=message):
        hardware.choose("neuron").prepare(4, 1)


def test_random_states_of_the_device_are_kept_and_those_of_another_kind_left(neuron):
    chosen = hardware.choose("neuron")
    with chosen.random_state_kept():
        neuron["random"] = torch.zeros(3, dtype=torch.uint8)
    assert neuron["random"].tolist() == [0, 1, 2]
    chosen.set_random_state({"cpu": torch.get_rng_state()})
    assert neuron["random"].tolist() == [0, 1, 2]


# --- The interval of votes to stop.


def test_a_vote_takes_place_at_the_first_step_of_another_kind(monkeypatch):
    # After an evaluation with steps of 10 ms, training may have steps of a second.
    monkeypatch.setattr(StopVote, "_listen", lambda vote: None)  # pytest has its own handlers
    clock, votes = [0.0], []
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        Runtime, "maximum", lambda runtime, ballot: votes.append(clock[0]) or ballot
    )
    vote = StopVote(Runtime())
    for seconds in (0.01, 1.0):
        vote.vote_at_next_step()
        for _ in range(3):
            clock[0] += seconds
            vote.at_step_boundary()
    assert votes == pytest.approx([0.01, 1.03, 2.03, 3.03])


# --- Memory formats, and the shapes of batches.


@pytest.fixture
def train_a_little(monkeypatch):
    """Return a function to train on 10 images in batches of 4 and to evaluate 5.

    It returns the model and the batches seen by the model.
    """
    monkeypatch.setattr(StopVote, "_listen", lambda vote: None)  # pytest has its own handlers

    def train(hardware):
        torch.manual_seed(0)
        images, labels = torch.randn(10, 3, 8, 8), torch.arange(10)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 10))
        seen = []
        model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        task = Task(
            name="test",
            samples=10,
            test_samples=5,
            image_shape=(3, 8, 8),
            fetch=lambda shard: (images[shard.indices], labels[shard.indices]),
            fetch_test=lambda indices: (images[indices], labels[indices]),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            learning_rate=0.1,
        )
        train_classifier(
            task, DigitsOptions(epochs=1, batch_size=4), Progress(Runtime(hardware=hardware), 1)
        )
        return model, seen[2:]  # without those of the warm-up

    return train


def test_a_classifier_gets_images_and_weights_in_the_hardwares_layout(train_a_little):
    model, seen = train_a_little(hardware.Hardware())
    in_layout = [images.is_contiguous(memory_format=torch.channels_last) for images in seen]
    assert in_layout == [True] * 5  # three batches, and two of the evaluation
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_hardware_that_wants_equal_shapes_gets_them_and_trains_the_same(train_a_little, capsys):
    class Equal(hardware.Hardware):
        wants_equal_shapes = True

    plain, seen = train_a_little(hardware.Hardware())
    assert [len(images) for images in seen] == [4, 4, 2, 4, 1]
    expected = capsys.readouterr().out.splitlines()[-1]
    equal, seen = train_a_little(Equal())
    assert [len(images) for images in seen] == [4, 4, 4, 4, 4]
    for ours, theirs in zip(equal.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    found, expected = (
        json.loads(line)["result"] for line in (capsys.readouterr().out.splitlines()[-1], expected)
    )
    assert found == pytest.approx(expected, rel=1e-5)


def test_layouts_are_left_to_compilers_and_on_gpus_follow_the_tensor_cores(neuron):
    cpu, cuda, others = hardware.Hardware(), hardware.Cuda(), hardware.Neuron()
    assert cpu.image_layout(bf16=False) == cpu.image_layout(bf16=True) == torch.channels_last
    assert cuda.image_layout(bf16=True) == torch.channels_last
    assert (
        cuda.image_layout(bf16=False) == others.image_layout(bf16=True) == torch.contiguous_format
    )


# --- Scheduling.


def test_a_policy_that_somebody_has_chosen_is_kept():
    # Other systems have no policies, and schedule_as_batch must not fail there.
    on_linux = sys.platform == "linux"
    found = []

    def look():
        if on_linux:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        cpu.schedule_as_batch()
        found.append(os.sched_getscheduler(0) if on_linux else None)

    # A policy belongs to a thread, so this one does not change the policy of pytest.
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [os.SCHED_IDLE if on_linux else None]


@pytest.mark.parametrize("asked", [False, True])
def test_the_process_is_tuned_only_if_that_is_asked_for(monkeypatch, asked):
    done = []
    for name in ("schedule_as_batch", "keep_freed_memory"):
        monkeypatch.setattr(group_module, name, lambda name=name: done.append(name))
    with group_module.process_group(device="cpu", tune_cpu=asked):
        pass
    assert done == (["schedule_as_batch", "keep_freed_memory"] if asked else [])


# --- Memory.


@pytest.mark.parametrize(
    ("libc", "variables", "takes", "expected"),
    [
        ("glibc", {}, 1, [(-3, 32 << 20), (-1, -1)]),
        (
            "glibc",
            {"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=512"},
            1,
            [(-3, 32 << 20), (-1, -1)],
        ),
        ("glibc", {}, 0, [(-3, 32 << 20)]),
        ("glibc", {"MALLOC_TRIM_THRESHOLD_": "131072"}, 1, []),
        ("glibc", {"MALLOC_MMAP_THRESHOLD_": "131072"}, 1, []),
        ("glibc", {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}, 1, []),
        ("", {}, 1, []),
    ],
    ids=[
        "told",
        "other tunables",
        "refused",
        "trim chosen",
        "mmap chosen",
        "malloc's tunables",
        "not glibc",
    ],
)
def test_malloc_is_told_to_keep_memory_unless_somebody_has_set_it(
    monkeypatch, libc, variables, takes, expected
):
    told = []

    def mallopt(*setting):
        told.append(setting)
        return takes

    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cpu.platform, "libc_ver", lambda: (libc, ""))
    monkeypatch.setattr(cpu.ctypes, "CDLL", lambda _: types.SimpleNamespace(mallopt=mallopt))
    cpu.keep_freed_memory()
    assert told == expected


# --- The choice of --device auto.


@pytest.mark.parametrize(
    ("modules", "pjrt", "found"),
    [
        ([], "", "cpu"),
        (["torch_xla"], "", "cpu"),  # on a laptop, without a device for it
        (["torch_xla"], "CPU", "xla"),
        (["torch_xla", "libneuronxla", "torch_neuronx"], "", "xla"),  # AWS's image for Trainium 1
        (["torch_neuronx"], "", "neuron"),
        ([], "TPU", "cpu"),
    ],
)
def test_auto_takes_what_is_there(modules, pjrt, found, monkeypatch):
    monkeypatch.setattr(hardware, "find_spec", lambda name: name in modules)
    monkeypatch.setenv("PJRT_DEVICE", pjrt)
    assert hardware._find() == found
