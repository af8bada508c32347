"""The lines of programs as a terminal shows them."""


def as_displayed(line: str) -> str:
    """Return the visible part of a line in a terminal: a carriage return begins it again.

    Progress bars write all their states into one line.
    """
    return line.rstrip("\r").rpartition("\r")[2]
