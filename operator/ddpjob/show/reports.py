"""Hide needless parts of a node's output: reports of torchrun, and of lost peers.

The message of the job has the cause of a failure, and the log has all lines.
"""

import re
from dataclasses import dataclass, field

from ddpjob.core.observe.peer_loss import FOLLOWER, TIMED_OUT

# A log line of torchrun's agent. After its first error, or a signal, the agent prints only its
# traceback and its failure summary.
TORCHRUN_LINE = re.compile(
    r"(?P<level>[EW])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ torch/distributed/(elastic|run)"
)

# The mark of a rank before a line, set by the agent or by torch itself.
MARK = re.compile(r"(?:\[rank\d+\]: ?)*")

# Stack traces of torch's C++ code. The script's own exception has the same information.
STACK_FRAME = re.compile(
    r"\[[WE]\d{4} .*\.cpp:\d+\]|\[W\d+ .*TCPStore"
    r"|Exception raised from |frame #\d+: |<omitting python frames>"
)

TRACEBACK = "Traceback (most recent call last):"
CHAINS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)

# A frame of torchrun itself. Its tracebacks are not about the script.
TORCHRUN_FRAME = re.compile(
    r'File "[^"]*torch/distributed/(?:run\.py|elastic/(?:agent|rendezvous)/[^"]*)"'
)

# The most lines of a traceback to hold back.
LONGEST = 1000

LOST_A_PEER = "lost a peer; the log has its traceback"


@dataclass
class NodeOutput:
    """The output of one node in an attempt, as a person sees it."""

    # True after the agent of torchrun has reported a failure.
    reports: bool = False
    # The lines of tracebacks before their exception is known, by the marks of their ranks.
    held: dict[str, list[str]] = field(default_factory=dict)
    # The marks of ranks with a hidden last line. An empty line after it is hidden, too.
    hidden: set[str] = field(default_factory=set)
    # The marks of the ranks with a lost peer. One line for several tracebacks is enough.
    lost: set[str] = field(default_factory=set)

    def take(self, text: str) -> list[str]:
        """Return the lines to show after one more line."""
        agent = TORCHRUN_LINE.match(text)
        if agent and (agent["level"] == "E" or "death signal" in text):
            self.reports = True
        mark = MARK.match(text)
        prefix = mark[0].rstrip() if mark else ""
        rest = text[mark.end() if mark else 0 :]
        if prefix in self.held:
            return self._go_on(prefix, rest, text)
        is_report = agent or self.reports or STACK_FRAME.match(rest)
        is_rest = prefix in self.hidden and (not rest.strip() or rest in CHAINS)
        if is_report or is_rest:
            self.hidden.add(prefix)
            return []
        if rest == TRACEBACK:
            self.held[prefix] = [text]
            return []
        self.hidden.discard(prefix)
        return [text]

    def _go_on(self, prefix: str, rest: str, text: str) -> list[str]:
        """Return the lines of a traceback if its exception is known, and nothing before."""
        lines = self.held[prefix]
        lines.append(text)
        if (not rest or rest[0] == " ") and len(lines) < LONGEST:
            return []
        del self.held[prefix]
        is_of_torchrun = any(map(TORCHRUN_FRAME.search, lines))
        has_lost = FOLLOWER.search(rest) and not TIMED_OUT.search(rest)
        if not is_of_torchrun and not has_lost:
            self.hidden.discard(prefix)
            return lines
        self.hidden.add(prefix)
        if is_of_torchrun or prefix in self.lost:
            return []
        self.lost.add(prefix)
        return [f"{prefix} {LOST_A_PEER}".lstrip()]

    def end(self) -> list[str]:
        """Return the lines of tracebacks without an end."""
        lines = [line for lines in self.held.values() for line in lines]
        self.held.clear()
        return lines
