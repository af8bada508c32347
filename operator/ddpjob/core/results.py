"""The result that rank 0 left in its termination message."""

import json
from collections.abc import Mapping

MAX_ENTRIES, MAX_TEXT = 32, 256


def read_result(message: str) -> Mapping[str, str]:
    """The JSON object in `message` as texts, at most 32 entries; empty where there is none (a log tail, say)."""
    try:
        data = json.loads(message)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(data, dict):
        return {}
    return {
        str(key)[:MAX_TEXT]: _text(value)[:MAX_TEXT]
        for key, value in list(data.items())[:MAX_ENTRIES]
    }


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
