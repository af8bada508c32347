"""Read the text of a /metrics endpoint, as far as the benchmarks need it."""

import re
from collections.abc import Iterator

# A name, labels and a value in a line.
METRIC = re.compile(r"^(\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


def samples(text: str, *metrics: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the name, the labels and the value of each sample of some metrics."""
    for name, labels, value in METRIC.findall(text):
        if name in metrics:
            yield name, dict(LABEL.findall(labels)), float(value)
