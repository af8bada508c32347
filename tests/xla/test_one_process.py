"""The device layer on the real torch_xla. `make test-xla` sets up its environment.

PJRT on a CPU supports one process only. tests/trainer/test_hardware.py runs several processes with
a stand-in for torch_xla.
"""

import importlib
import math
import re
from pathlib import Path

import pytest

torch_xla = pytest.importorskip(
    "torch_xla", reason="torch_xla needs an environment of its own, with torch 2.9: make test-xla"
)

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainer.launch import TRAINER, new_python, torchrun

from ddp_trainer.ranks.data_parallel import ddp_settings
from ddp_trainer.ranks.group import process_group
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.batch_norm import synchronise
from ddp_trainer.workloads.shared.gradient_arms import _spread

DIGITS = (*TRAINER, "digits", "--epochs", 2)
TABLE = Path(__file__).parents[2] / "docs" / "workloads" / "xla.md"


def result_of(run):
    assert run.finish() == 0, run.stderr
    (end,) = run.of("end")
    return end["result"]


@pytest.fixture(scope="module")
def by_environment():
    run = torchrun(*DIGITS, start=new_python, processes=1, PJRT_DEVICE="CPU")
    assert result_of(run)["accuracy"] > 0.9
    return run


def test_the_device_and_the_group_are_xla(by_environment):
    (start,) = by_environment.of("start")
    assert (start["device"], start["backend"], start["world_size"]) == ("xla", "xla", 1)


@pytest.mark.parametrize("meet", ["xla://", "file://{folder}/meet"])
def test_every_init_method_gives_the_same_bits(meet, by_environment, tmp_path):
    flags = ("--init-method", meet.format(folder=tmp_path))
    run = torchrun(*DIGITS, *flags, start=new_python, processes=1, PJRT_DEVICE="CPU")
    assert result_of(run) == result_of(by_environment)


def test_spawn_gives_the_same_bits(by_environment):
    assert result_of(new_python(*DIGITS, "--spawn", 1, PJRT_DEVICE="CPU")) == result_of(
        by_environment
    )


def test_it_learns_what_the_cpu_learns(by_environment):
    expected = result_of(new_python(*DIGITS, "--device", "cpu"))
    assert result_of(by_environment)["loss"] == pytest.approx(expected["loss"], rel=0.1)


def test_a_resumed_run_ends_with_the_same_bits_and_its_file_needs_no_xla(tmp_path):
    def toy(steps, folder, **variables):
        return result_of(
            new_python(*TRAINER, "toy", "--steps", steps, "--checkpoint-dir", folder, **variables)
        )

    toy(30, tmp_path / "two parts", PJRT_DEVICE="CPU")
    whole = toy(60, tmp_path / "one", PJRT_DEVICE="CPU")
    assert toy(60, tmp_path / "two parts", PJRT_DEVICE="CPU") == whole
    (file,) = (tmp_path / "one").glob("step-*60.pt")
    state = torch.load(file, weights_only=True)
    assert all(tensor.device.type == "cpu" for tensor in state["parts"]["model"].values())
    on_cpu = toy(60, tmp_path / "one", PJRT_DEVICE="")
    assert on_cpu["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def test_what_several_processes_do_with_tensors_works_on_the_device():
    """A single process skips these steps, because it has no peers."""
    device = torch_xla.device()
    gradients = [torch.zeros(2, 3, device=device), torch.zeros(4, device=device)]
    _spread(torch.arange(10.0, device=device), gradients)
    assert gradients[1].cpu().tolist() == [6, 7, 8, 9]
    bits = gradients[1].view(torch.int32).sum(dtype=torch.int64)
    assert int(bits) == int(torch.tensor([6.0, 7, 8, 9]).view(torch.int32).sum(dtype=torch.int64))

    plain, ours = nn.BatchNorm2d(3), nn.BatchNorm2d(3).to(device)
    synchronise(ours, Runtime(device=device))
    images = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(ours(images.to(device)).cpu(), plain(images), atol=1e-5)
    assert torch.allclose(ours.running_var.cpu(), plain.running_var, rtol=1e-4)


@pytest.mark.parametrize("arm", ["ddp", "native"])
def test_mnist_trains_on_xla(arm, tmp_path):
    random = np.random.default_rng(0)
    for kind, shape, magic in (
        ("images-idx3", (200, 28, 28), 0x803),
        ("labels-idx1", (200,), 0x801),
    ):
        header = np.array([magic, *shape], ">i4").tobytes()
        content = random.integers(0, 10, shape, np.uint8).tobytes()
        (tmp_path / f"t10k-{kind}-ubyte").write_bytes(header + content)
    run = new_python(
        *TRAINER,
        "mnist",
        "--data",
        tmp_path,
        "--epochs",
        1,
        "--arm",
        arm,
        "--batch-size",
        32,
        PJRT_DEVICE="CPU",
    )
    assert math.isfinite(result_of(run)["loss"])


COUNT_COMPILATIONS = """
import sys
from ddp_trainer.cli.main import main
code = main()
import torch_xla.debug.metrics as metrics
print("compilations", metrics.metric_data("CompileTime")[0])
sys.exit(code)
"""


def test_cifar10s_network_trains_on_xla_and_a_smaller_last_batch_compiles_nothing_more(tmp_path):
    from PIL import Image

    from ddp_trainer.workloads.datasets.cifar10 import CLASSES

    for part in ("train", "test"):
        for number, name in enumerate(CLASSES):
            (tmp_path / part / name).mkdir(parents=True)
            for image in range(4):
                Image.new("RGB", (32, 32), (25 * number, 60 * image, 0)).save(
                    tmp_path / part / name / f"{image}.png"
                )
    compilations = []
    for images in (32, 40):
        flags = (
            "--recipe",
            "fast",
            "--batch-size",
            16,
            "--limit-train",
            images,
            "--limit-test",
            images,
        )
        run = new_python(
            "-c", COUNT_COMPILATIONS, "cifar10", "--data", tmp_path, *flags, PJRT_DEVICE="CPU"
        )
        assert math.isfinite(result_of(run)["loss"])
        [counted] = [line for line in run.stray if line.startswith("compilations")]
        compilations.append(counted)
    assert compilations[0] == compilations[1]


def test_a_second_process_that_pjrt_does_not_know_is_refused():
    run = torchrun(*TRAINER, "toy", start=new_python, PJRT_DEVICE="CPU")
    assert run.finish() != 0
    assert re.search(
        r"rank \d of 2, but torch_xla on CPU counts it as rank 0 of 1; PJRT on a CPU supports one",
        run.stderr,
    )


def test_under_ddp_gradients_lie_in_its_bucket_and_are_those_of_the_bare_model(monkeypatch):
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29577,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with process_group(seed=3) as runtime:
        models = [
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(runtime.device)
            for _ in range(2)
        ]
        models[1].load_state_dict(models[0].state_dict())
        ddp = DistributedDataParallel(models[1], **ddp_settings(models[1]))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
        for step in range(5):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(
                runtime.device
            )
            for module, optimizer in zip((models[0], ddp), optimizers, strict=True):
                module(inputs).square().sum().backward()
                runtime.step(optimizer)
        for bare, wrapped in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(bare.cpu(), wrapped.cpu())


def names_in_the_table():
    """Return the rows of the table in the docs as (old names, new names), lists of dotted names."""
    rows = []
    for line in TABLE.read_text().splitlines():
        if line.startswith(("| `xm", "| `torch_xla")) and line.count("|") == 4:
            old, new = (re.findall(r"`([\w.]+)", cell) for cell in line.split("|")[1:3])
            rows.append((old, new))
    return rows


def exists(dotted):
    short = {
        "xm": "torch_xla.core.xla_model",
        "xmp": "torch_xla.distributed.xla_multiprocessing",
        "xr": "torch_xla.runtime",
    }
    first, _, rest = dotted.partition(".")
    module, _, name = f"{short.get(first, first)}.{rest}".rpartition(".")
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def test_the_docs_table_names_calls_that_there_are():
    rows = names_in_the_table()
    assert len(rows) >= 8
    assert [name for _, new in rows for name in new if not exists(name)] == []


def test_the_docs_say_of_the_right_calls_that_they_are_gone():
    gone = re.findall(r"`(xm\.\w+)\(\)` \(gone", TABLE.read_text())
    assert gone
    assert [name for name in gone if exists(name)] == []
