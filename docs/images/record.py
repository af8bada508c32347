"""Record commands of a terminal as a picture (SVG), with their real output and colours.

python docs/images/record.py docs/images/terminal.svg "ddpjob list" "ddpjob status digits"
"""

import io
import os
import shlex
import subprocess
import sys

from rich.console import Console
from rich.text import Text

COLUMNS = 104

# Lines of a command's output that are shown.
MAX_LINES = 24


def main() -> None:
    picture, *commands = sys.argv[1:]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for command in commands:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
        done = subprocess.run(
            shlex.split(command), stdout=subprocess.PIPE, env=environment, text=True, check=False
        )
        for line in done.stdout.splitlines()[:MAX_LINES]:
            console.print(Text.from_ansi(line), no_wrap=True, overflow="ellipsis")
        console.print()
    console.save_svg(picture, title="ddpjob")


if __name__ == "__main__":
    main()
