"""Flags of torchrun: each is accepted, or refused in every spelling, with a sentence."""

import re
from pathlib import Path

import pytest
from builders.jobs import a_spec

from ddpjob.core.api.readers import SpecError
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.torchrun_flags import FLAGS
from ddpjob.core.api.yaml_text import load_yaml

ROOT = Path(__file__).parents[2]
WORKING = [flag for flag in FLAGS if not flag.instead]
REFUSED = [flag for flag in FLAGS if flag.instead]
LOG_FILES = (
    "the agent reads the output of each rank, so torchrun's log files would be empty; remove it, "
    "and use ddpjob logs"
)


def names(flags):
    return [flag.name for flag in flags]


def flags_of(*words):
    return Spec.from_dict(a_spec(torchrun={"args": [*words]})).torchrun_args


def refusal_of(*words, field="args"):
    given = ["torchrun", *words] if field == "command" else [*words]
    with pytest.raises(SpecError) as refused:
        Spec.from_dict(a_spec(torchrun={field: given}))
    return str(refused.value).removeprefix(f"spec.torchrun.{field}: ")


def written(flag):
    """Return torchrun's forms of a flag, as lists of words."""
    value = ["1"] if flag.takes_value else []
    for name in flag.spellings:
        yield [name, *value]
        if value:
            yield [f"{name}=1"]
    if flag.letter:
        yield [flag.letter, *value]
    if flag.letter and value:
        yield [f"{flag.letter}1"]


# The whole table


@pytest.mark.parametrize("flag", WORKING, ids=names(WORKING))
def test_a_flag_that_works_is_accepted_in_each_way_of_writing(flag):
    for words in written(flag):
        assert flags_of(*words, "--role", "a") == (*words, "--role", "a")


@pytest.mark.parametrize("flag", REFUSED, ids=names(REFUSED))
@pytest.mark.parametrize("field", ["args", "command"])
def test_another_flag_is_refused_in_each_way_of_writing_and_at_each_place(flag, field):
    for words in written(flag):
        for before in ([], ["--role", "a"], ["--no-python", "--role=a"]):
            message = refusal_of(*before, *words, field=field)
            assert message.startswith(words[0])
            assert message.endswith(f"cannot be used: {flag.instead}")


@pytest.mark.parametrize("flag", FLAGS, ids=names(FLAGS))
def test_the_beginning_of_a_name_is_refused_as_torchrun_would_take_it(flag):
    for end in range(3, len(flag.name)):
        begun = flag.name[:end]
        if begun in names(FLAGS):
            continue
        message = refusal_of(f"{begun}=1")
        others = [name for name in names(FLAGS) if name.startswith(begun)]
        assert flag.name in message
        assert ("can be any of" in message) == (len(others) > 1)


# What is refused, and the whole message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes=4"], "--nnodes=4 cannot be used: set spec.nodes instead"),
        (["--nn", "4"], "--nn (--nnodes) cannot be used: set spec.nodes instead"),
        (["--nproc_per_node"], "--nproc_per_node cannot be used: set spec.nprocPerNode instead"),
        (
            ["--role=a", "--nnodes", "1:4", "--max-restarts=100"],
            "--nnodes cannot be used: set spec.nodes instead",
        ),
        (["--tee", "3", "--nnodes=4"], f"--tee cannot be used: {LOG_FILES}"),
        (["-r3"], f"-r3 (--redirects) cannot be used: {LOG_FILES}"),
        (
            ["--rdzv=c10d"],
            "--rdzv=c10d can be any of --rdzv-backend, --rdzv-endpoint, --rdzv-id, --rdzv-conf; "
            "write the whole name",
        ),
        (["--mon", "1"], 'write --monitor-interval in place of "--mon"'),
        (
            ["--event-log_handler=x"],
            'write --event-log-handler in place of "--event-log_handler"',
        ),
        (["--tees", "3"], "unknown flag of torchrun \"--tees\" (did you mean '--tee'?)"),
        (["--rolle=a"], "unknown flag of torchrun \"--rolle=a\" (did you mean '--role'?)"),
        (["-nnodes=2"], "unknown flag of torchrun \"-nnodes=2\" (did you mean '--nnodes'?)"),
        (["-u"], 'unknown flag of torchrun "-u"'),
        (["--"], 'unknown flag of torchrun "--"'),
        (["-"], 'unknown flag of torchrun "-"'),
        (["train.py"], 'the script belongs to spec.args, got "train.py"'),
        (["--no-python", "bash"], 'the script belongs to spec.args, got "bash"'),
        (["--role", "a", "b"], 'the script belongs to spec.args, got "b"'),
        ([""], 'the script belongs to spec.args, got ""'),
        (["--role"], "--role needs a value; write --role=VALUE"),
        (["--role", "--no-python"], "--role needs a value; write --role=VALUE"),
        (["--no-python=1"], '--no-python takes no value, got "--no-python=1"'),
    ],
)
def test_a_word_that_torchrun_cannot_be_given_is_refused_with_a_message(words, message):
    assert refusal_of(*words) == message
    assert refusal_of(*words, field="command") == message


def test_an_empty_list_is_no_flag():
    assert flags_of() == ()


@pytest.mark.parametrize("value", ["--role=", "--role=a=b", "--role=a b", "--role=-1"])
def test_a_value_after_an_equals_sign_may_be_anything(value):
    assert flags_of(value) == (value,)


@pytest.mark.parametrize(
    "command",
    [["accelerate", "launch", "--tees", "x"], ["python", "-u", "-m", "pkg", "--nnodes=2"]],
)
def test_the_flags_of_another_launcher_are_not_looked_at(command):
    flags = ["--mixed_precision", "fp16", "script"]
    spec = Spec.from_dict(a_spec(torchrun={"command": command, "args": flags}))
    assert (list(spec.command), list(spec.torchrun_args)) == (command, flags)


@pytest.mark.parametrize(
    "program",
    [
        ["/opt/conda/bin/torchrun"],
        ["python3.11", "-m", "torch.distributed.run"],
        ["/opt/my env/bin/python", "-m", "torch.distributed.run"],
    ],
)
def test_torchrun_is_known_by_its_path_and_by_its_module(program):
    with pytest.raises(SpecError, match=r"spec.torchrun.command: --nnodes=2 cannot be used"):
        Spec.from_dict(a_spec(torchrun={"command": [*program, "--nnodes=2"]}))


# The CRD and the documentation


def test_the_reference_has_a_row_for_each_flag():
    text = (ROOT / "docs/users/reference.md").read_text()
    section = text.partition("\n## Flags of torchrun\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`-.*`) \| (.*) \|$", section, re.MULTILINE)
    documented = {}
    for cell, text in rows:
        for name in re.findall(r"`(--[a-z-]+)`", cell):
            documented[name] = text.replace("`", "")
    assert list(documented) == names(FLAGS)
    for flag in FLAGS:
        assert documented[flag.name].startswith(flag.instead or "works"), flag.name


def test_the_crd_declares_the_flags_as_a_list_of_strings():
    crd = load_yaml((ROOT / "charts/ddpjob-operator/files/crd.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    field = schema["properties"]["spec"]["properties"]["torchrun"]["properties"]["args"]
    assert field["items"]["type"] == "string"
    assert "default" not in field
