"""Text for people: columns, ages and times."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from rich.text import Text

from ddpjob.core.api.times import since

PHASE_STYLES = {
    "Running": "green",
    "Restarting": "yellow",
    "Suspended": "dim",
    "Failed": "bold red",
    "Complete": "bold green",
}

# Columns of the first word of a line about a job.
LABEL_WIDTH = 12

# Columns between two columns of a table.
GAP = "   "


def columns(headers: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> list[Text]:
    """Return the lines of a table in the style of kubectl. The widths are those of the content."""
    table = [[Text(header, style="bold") for header in headers]]
    for row in rows:
        table.append([cell if isinstance(cell, Text) else Text(cell) for cell in row])
    widths = [max(cell.cell_len for cell in column) for column in zip(*table, strict=True)]
    lines = []
    for row_cells in table:
        padded = []
        for cell, width in zip(row_cells, widths, strict=True):
            cell.pad_right(width - cell.cell_len)
            padded.append(cell)
        line = Text(GAP).join(padded)
        line.rstrip()
        lines.append(line)
    return lines


def command_lines(commands: Mapping[str, str]) -> list[str]:
    """Return a line for each command, with its description."""
    width = max(map(len, commands), default=0)
    return [f"{command:<{width}}{GAP}{what}" for command, what in commands.items()]


def duration(time: timedelta) -> str:
    """Return a duration as kubectl shows ages: 45s, 12m, 3h20m, 5d."""
    seconds = int(time.total_seconds())
    if seconds < 120:
        return f"{seconds}s"
    minutes = seconds // 60
    if minutes < 120:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes}m" if minutes else f"{hours}h"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours}h" if days < 8 and hours else f"{days}d"


def rounded(text: str) -> str:
    """Return a number with four digits, and an integer or another text unchanged."""
    if text.isdecimal():
        return text
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text


def ordinal(number: int) -> str:
    """Return an integer as an ordinal: 1st, 2nd, 3rd, 4th, 11th, 21st."""
    is_teen = 11 <= number % 100 <= 13
    suffix = "th" if is_teen else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def age(moment: datetime | None, now: datetime) -> str:
    return duration(since(moment, now)) if moment else ""


def phase(name: str) -> Text:
    return Text(name, style=PHASE_STYLES.get(name, "bold"))
