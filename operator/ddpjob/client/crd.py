"""The CustomResourceDefinition, of which the chart has the only copy."""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from ddpjob.core.api import names

# Its place in a wheel, and that in a checkout.
PACKAGED = "crd.yaml"
CHECKOUT = Path(__file__).parents[3] / "charts" / "ddpjob-operator" / "files" / "crd.yaml"


@cache
def schema() -> dict[str, Any]:
    """Return the schema of a DDPJob."""
    packaged = files("ddpjob").joinpath(PACKAGED)
    text = packaged.read_text() if packaged.is_file() else CHECKOUT.read_text()
    versions = yaml.safe_load(text)["spec"]["versions"]
    found = next(version for version in versions if version["name"] == names.VERSION)
    return dict(found["schema"]["openAPIV3Schema"])
