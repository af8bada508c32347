"""What a terminal shows of the lines that programs write."""


def as_displayed(line: str) -> str:
    """Return what a terminal shows of a line: a carriage return begins it again.

    Progress bars write all their states into one line.
    """
    return line.rstrip("\r").rpartition("\r")[2]
