"""The device layer and NCCL on one NVIDIA GPU: `make test-gpu`.

DDP_TEST_DEVICE=cpu pytest tests/gpu     tries the tests themselves without a GPU
"""

import os

import pytest
import torch
from trainer.launch import TRAINER, new_python, torchrun

DEVICE = os.environ.get("DDP_TEST_DEVICE", "cuda")
BACKEND = {"cuda": "nccl", "cpu": "gloo"}[DEVICE]

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(),
    reason="needs an NVIDIA GPU and a PyTorch with CUDA; there: make test-gpu TORCH=torch",
)

DIGITS = (*TRAINER, "digits", "--epochs", 2)
TOY = (*TRAINER, "toy")


def one_rank(*arguments, device=DEVICE, **variables):
    """Start one rank under torchrun, to have a process group."""
    options = ("--device", device)
    return torchrun(*arguments, *options, processes=1, start=new_python, **variables)


def result_of(run):
    assert run.finish() == 0, run.stderr
    (end,) = run.of("end")
    return end["result"]


@pytest.fixture(scope="module")
def digits():
    run = one_rank(*DIGITS)
    assert result_of(run)["accuracy"] > 0.9
    return run


def test_a_group_of_one_rank_uses_the_device_and_its_backend(digits):
    (start,) = digits.of("start")
    assert (start["device"], start["backend"], start["world_size"]) == (DEVICE, BACKEND, 1)


def test_the_device_is_found_without_a_flag():
    run = torchrun(*TOY, "--steps", 5, processes=1, start=new_python)
    result_of(run)
    assert run.of("start")[0]["device"] == DEVICE


def test_it_learns_what_the_cpu_learns(digits):
    expected = result_of(one_rank(*DIGITS, device="cpu"))
    assert result_of(digits)["loss"] == pytest.approx(expected["loss"], rel=0.1)


def test_a_checkpoint_moves_between_the_device_and_the_cpu(tmp_path):
    def toy(steps, folder, device=DEVICE):
        run = one_rank(*TOY, "--steps", steps, "--checkpoint-dir", tmp_path / folder, device=device)
        return result_of(run)

    whole = toy(60, "whole")
    for first, second in ((DEVICE, DEVICE), (DEVICE, "cpu"), ("cpu", DEVICE)):
        folder = f"{first} to {second}"
        toy(30, folder, first)
        assert toy(60, folder, second)["loss"] == pytest.approx(whole["loss"], rel=1e-4), folder
    (file,) = (tmp_path / "whole").glob("step-*60.pt")
    state = torch.load(file, weights_only=True)
    assert all(tensor.device.type == "cpu" for tensor in state["parts"]["model"].values())


SCRIPT = """
import os, torch
import torch.distributed as dist
from ddp_trainer.ranks.data_parallel import DistributedModel, accumulate, ddp_settings
from ddp_trainer.ranks.group import process_group
from ddp_trainer.run.progress import Progress

with process_group(device="DEVICE") as runtime:
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model = model.to(runtime.device)
    ddp = DistributedModel(model, **ddp_settings(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    inputs = torch.randn(64, 8, device=runtime.device)
    runtime.warm_up(ddp, inputs[:2])

    # The generators of the device are saved and restored.
    state = runtime.hardware.random_state()
    first = torch.rand(4, device=runtime.device)
    runtime.hardware.set_random_state(state)
    same = torch.equal(first, torch.rand(4, device=runtime.device))

    losses = []
    for _ in range(50):
        total = 0.0
        for part in accumulate(ddp, inputs.split(16)):
            with torch.autocast(runtime.device.type, torch.bfloat16):
                loss = (ddp(part).float() - part.sum(1, keepdim=True)).square().sum() / 64
            loss.backward()
            total += loss.item()
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        runtime.step(optimizer)

    # Tensors of both kinds pass through the group. With one rank, Runtime.sum would not use it.
    sums = []
    for device in ("cpu", runtime.device):
        tensor = torch.ones(2, device=device)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, src=0)
        sums.append(tensor.tolist())
    Progress(runtime).end(50, {
        "same": same,
        "sums": sums,
        "learns": losses[-1] < losses[0] / 10,
        "recorder": os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT"),
    })
"""


def test_ddp_over_the_backend_trains_in_bf16_with_accumulation(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("DEVICE", DEVICE))
    found = result_of(torchrun(script, processes=1, start=new_python))
    assert found["same"]
    assert found["sums"] == [[1, 1], [1, 1]]
    assert found["learns"]
    assert found["recorder"] == ("1" if DEVICE == "cuda" else None)


def test_a_second_process_without_a_gpu_is_refused_with_a_sentence():
    count = torch.cuda.device_count() if DEVICE == "cuda" else 0
    if not count:
        pytest.skip("every process has the CPU")
    run = new_python(
        *TOY,
        "--device",
        DEVICE,
        RANK=0,
        WORLD_SIZE=1,
        LOCAL_RANK=count,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=1,
    )
    assert run.finish() == 1
    assert f"LOCAL_RANK {count} needs a device of kind cuda" in run.stderr
    assert "Traceback" not in run.stderr
