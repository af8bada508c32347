"""The blocks of docs/users/tracking.md, in the script of docs/users/own-script.md.

`make test-frameworks` sets up their environment.
"""

import re
import sqlite3
import struct
from pathlib import Path

import pytest
import yaml

from frameworks import loops

USERS = Path(__file__).parents[2] / "docs" / "users"
LOOP = "for step in range(first, steps):\n"

# The script saves every 50 steps.
STEPS, FAILS_AT, RESUMES_AT = 120, 70, 51

# The first attempt fails once. What it has logged up to then is to be sent.
LOGS = f"""
    log(step, {{"loss": loss.item()}})
    if step == {FAILS_AT} and os.environ["DDP_ATTEMPT"] == "0":
        sys.exit(1)
"""


def blocks(page, language):
    text = (USERS / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_with(tracker, folder, **variables):
    """Run the script with the block of a tracker, in the job of the page, on this machine."""
    # torch has a module for TensorBoard, but not the package.
    missing = loops.why_skipped(tracker.rpartition(".")[2])
    if missing:
        pytest.skip(missing)
    (script,) = blocks("own-script", "python")
    (block,) = [found for found in blocks("tracking", "python") if f" {tracker}" in found]
    assert LOOP in script
    text = script.replace(LOOP, f"{block}\n{LOOP}")
    text = text.replace("    optimizer.step()\n", f"    optimizer.step()\n{LOGS}")
    (folder / "train.py").write_text(text)

    (job,) = [
        found
        for found in map(yaml.safe_load, blocks("tracking", "yaml"))
        if found["kind"] == "DDPJob"
    ]
    job["spec"]["args"] = [str(folder / "train.py"), str(STEPS)]
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    claim = folder / "claim"
    claim.mkdir()
    own = [f"--env={name}={value}" for name, value in variables.items()]
    words = (
        *(folder / "job.yaml", "--runs", folder / "runs", "--max-restarts", 1),
        *("--claim", f"checkpoints={claim}", "--env", "WANDB_API_KEY=none", *own),
    )
    with loops.started_job(*words) as process:
        said, _ = process.communicate(timeout=loops.DEADLINE)
    assert process.returncode == 0, said
    return claim / "train"


def test_weights_and_biases_has_one_run_for_all_attempts(tmp_path):
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": "$(DDP_CHECKPOINT_DIR)"}
    folder = run_with("wandb", tmp_path, **offline)
    found = sorted((folder / "wandb").glob("offline-run-*"))
    # One for each attempt, and none of another rank.
    assert len(found) == 2
    assert {path.name.split("-", 3)[3] for path in found} == {"local-train"}
    steps = [logged_offline(path) for path in found]
    assert steps == [[*range(FAILS_AT + 1)], [*range(RESUMES_AT, STEPS)]]


def logged_offline(folder):
    """Return the steps in the file of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("*.wandb")
    steps = []
    for data in read_log(file.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            steps.append(record.history.step.num)
    return steps


def read_log(data):
    """Yield the records of a file in the log format of LevelDB, after 7 bytes of W&B's own."""
    block, place, record = 32768, 7, b""
    while place < len(data):
        if block - place % block < 7:
            # The rest of a block that is too short for a header is empty.
            place += block - place % block
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_mlflow_has_one_run_with_both_values_of_a_repeated_step(tmp_path):
    store = tmp_path / "mlflow.db"
    run_with("mlflow", tmp_path, MLFLOW_TRACKING_URI=f"sqlite:///{store}")
    with sqlite3.connect(store) as base:
        (run,) = base.execute("select run_uuid, name, status from runs").fetchall()
        assert run[1:] == ("train", "FINISHED")
        steps = [step for (step,) in base.execute("select step from metrics order by step")]
        tags = dict(base.execute("select key, value from tags"))
    again = range(RESUMES_AT, FAILS_AT + 1)
    assert steps == sorted([*range(STEPS), *again])
    assert tags["attempt"] == "1"


def test_tensorboard_shows_each_step_once(tmp_path):
    folder = run_with("torch.utils.tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    assert [event.step for event in found.Scalars("loss")] == list(range(STEPS))
    assert len(list((folder / "tensorboard").iterdir())) == 2
