"""Read YAML with the parser in C, where PyYAML has it: it takes a tenth of the time.

For files of the package, and for what the operator itself writes. ddpjob.jobs.documents reads the
manifests of users.
"""

from collections.abc import Iterator
from typing import Any

import yaml

# PyYAML's wheels have it. Some platforms lack it.
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(text: str) -> Any:
    """Return the one document of a text. Raises yaml.YAMLError if it has no or several."""
    return yaml.load(text, Loader)


def load_all_yaml(text: str) -> Iterator[Any]:
    """Return the documents of a text. Raises yaml.YAMLError when it comes to a mistake."""
    return yaml.load_all(text, Loader)
