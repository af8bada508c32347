"""The locks of the images fix what pyproject.toml asks for."""

import re
import runpy
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LOCKS = dict(runpy.run_path(str(ROOT / "release" / "locks.py"))["locks"]())
PIN = re.compile(r"(?m)^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)")


def pins(lock):
    return {name: version for name, version, _ in PIN.findall(lock.read_text())}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: str(lock.relative_to(ROOT)))
def test_each_requirement_is_fixed_within_its_range(lock):
    found = pins(lock)
    for line in LOCKS[lock]:
        needed = Requirement(line)
        assert needed.specifier.contains(found[needed.name.lower()]), f"make locks: {needed}"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: str(lock.relative_to(ROOT)))
def test_a_lock_has_nothing_without_a_hash(lock):
    # Neither an address of an index, nor an option.
    assert not PIN.sub("", lock.read_text()).strip()
    assert "torch" not in pins(lock)
