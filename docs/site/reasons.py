"""Write the table of reasons into docs/users/operations.md: `python docs/site/reasons.py`.

The rows are in ddpjob/core/api/reasons.py. `tests/unit/test_docs.py` compares the page with them.
"""

from collections.abc import Iterator
from pathlib import Path

from ddpjob.core.api.reasons import Reason

PAGE = Path(__file__).parents[1] / "users" / "operations.md"

# The table is between the lines with these words. They are comments, which a reader does not see.
BEGIN = "<!-- Written by docs/site/reasons.py. -->\n"
END = "<!-- The end of what is written. -->\n"


def rows() -> Iterator[str]:
    yield "| reason | meaning | what to do |"
    yield "|---|---|---|"
    for reason in Reason:
        yield f"| {reason} | {reason.meaning} | {reason.advice} |".replace("|  |", "| |")


def build() -> str:
    """Return the whole page with the table as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE}: expected the line {END!r} after {BEGIN!r}"
    # Markdown has an empty line between a comment and a table.
    table = "\n".join(rows())
    return f"{before}{BEGIN}\n{table}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(build())
