"""The files of the agent in a pod: its programs, and the words that it looks for.

They are in a ConfigMap named by the hash of their content. So pods of two versions of the operator
have two ConfigMaps.

If an agent was killed, the operator itself reads the log of the pod by the same words.

May import `core.observe`.
"""

import json
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files

from ddpjob.core.observe.peer_loss import LOST, UNCLEAR, WAITED
from ddpjob.core.observe.torchrun_log import (
    BEHIND,
    EXCEPTION_LINE,
    HYDRA,
    INTERPRETER,
    NATIVE,
    WHAT,
)

STARTER = "start.sh"
WORDS = "words.json"


@cache
def agent_files() -> Mapping[str, str]:
    """Return the text of each file by its name."""
    programs = {
        file.name: file.read_text(encoding="utf-8")
        for file in files("ddpjob.agent").iterdir()
        if file.name.endswith((".py", ".sh"))
    }
    words = {
        "follower": [words.pattern for words in (*LOST, *WAITED)],
        "unclear": [words.pattern for words in UNCLEAR],
        "behind": [BEHIND.pattern],
        # The first matching pattern gives the exception.
        "end": [f"(?m){HYDRA.pattern}"],
        "exception": [f"(?m)^{EXCEPTION_LINE}", f"(?m){INTERPRETER.pattern}"],
        "abort": [f"(?m){WHAT.pattern}", f"(?m){NATIVE.pattern}"],
    }
    return {**programs, WORDS: json.dumps(words, separators=(",\n", ":")) + "\n"}


@cache
def config_map_name() -> str:
    """Return the name of the ConfigMap with these files."""
    text = json.dumps(agent_files(), sort_keys=True)
    return f"ddpjob-agent-{sha256(text.encode()).hexdigest()[:10]}"
