"""Golden files: whole objects in files. `UPDATE_GOLDEN=1 pytest tests/unit` writes them again."""

import os
from pathlib import Path
from typing import Any

import yaml

from ddpjob.core.api.yaml_text import load_all_yaml

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name: str, *objects: Any) -> None:
    """Compare objects with those of a golden file."""
    file = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        text = yaml.safe_dump_all(objects, sort_keys=False, allow_unicode=True, width=120)
        file.write_text(text)
    assert list(objects) == list(load_all_yaml(file.read_text()))
