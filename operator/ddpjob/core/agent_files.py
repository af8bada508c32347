"""The files of the agent, as a pod gets them: the program, and the words that it looks for.

The words are those by which the operator itself reads the log of a pod whose agent was killed.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from ddpjob.core.peer_loss import LOST, UNCLEAR, WAITED
from ddpjob.core.torchrun_log import EXCEPTION, INTERPRETER, WHAT

PROGRAM = "agent.py"
WORDS = "words.json"


@cache
def agent_files() -> Mapping[str, str]:
    """Return the text of each file by its name."""
    program = (files("ddpjob.agent") / PROGRAM).read_text(encoding="utf-8")
    words = {
        "follower": [words.pattern for words in (*LOST, *WAITED)],
        "unclear": [words.pattern for words in UNCLEAR],
        # The first pattern that matches gives the exception.
        "exception": [f"(?m){found.pattern}" for found in (EXCEPTION, WHAT, INTERPRETER)],
    }
    return {PROGRAM: program, WORDS: json.dumps(words, indent=1) + "\n"}
